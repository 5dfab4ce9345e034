"""What becomes of a SUBMIT and of an ABORT when the submit ring is full, with records taken out by hand: policies, deadlines, the line."""

import asyncio

import pytest
from puppet import SMALL_RINGS, Rings, until

from shmserve.config import RingConfig
from shmserve.http.endings import ending_of
from shmserve.http.errors import ApiError
from shmserve.rings.observe import RingView, rings_of
from shmserve.wire.submit_slots import SubmitKind


def submit_ring(rings):
    """The producer's words of the submit ring, as an observer sees them."""
    (name,) = [name for name in rings_of(rings.instance) if name.endswith(".submit")]
    view = RingView(name)
    stats = view.stats()
    view.close()
    return stats.producer


def test_under_drop_a_full_ring_refuses_at_once_and_keeps_nothing():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="drop")
        async with Rings(config) as rings:
            entries = await rings.fill()
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert (refused.value.status, refused.value.code) == (503, "submit_ring_full")
            assert refused.value.retry_after_s == 1
            assert set(rings.client.in_flight) == {entry.req_id for entry in entries}
            assert submit_ring(rings)["refused"] == 1
            rings.take()
            await rings.submit()

    asyncio.run(scenario())


def test_under_block_a_full_ring_refuses_when_the_deadline_is_over():
    async def scenario():
        async with Rings(SMALL_RINGS) as rings:
            await rings.fill()
            loop = asyncio.get_running_loop()
            begin = loop.time()
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert loop.time() - begin >= 0.05
            assert (refused.value.status, refused.value.code) == (503, "submit_ring_full")
            assert len(rings.client.in_flight) == 4

    asyncio.run(scenario())


def test_under_block_who_came_first_is_written_first_however_large():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            await rings.fill()
            large = asyncio.create_task(rings.submit(1500))  # two slots
            small = [asyncio.create_task(rings.submit(i + 1)) for i in range(2)]
            await asyncio.sleep(0.01)
            assert (
                len(rings.take(1)) == 1
            )  # one slot: not enough for the first in line, and nobody overtakes it
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in (large, *small))
            seen = rings.take()
            entry = await large
            await asyncio.gather(*small)
            seen += rings.take()
            order = [len(request.prompt_ids) for _, _, request in seen[3:]]
            assert order == [1500, 1, 2]
            assert seen[3][1] == entry.req_id

    asyncio.run(scenario())


def test_an_abort_beside_the_line_does_not_make_it_deaf():
    """The ring has one free slot, a request of two waits. An ABORT takes the slot; the credits that come wake the line."""

    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            entries = await rings.fill()
            waiting = asyncio.create_task(rings.submit(1500))
            await asyncio.sleep(0.01)
            rings.take(1)
            await asyncio.sleep(0.01)
            rings.client.abort(entries[1])
            await asyncio.sleep(0.01)
            taken = rings.take()
            assert [kind for kind, *_ in taken] == [SubmitKind.SUBMIT] * 3 + [SubmitKind.ABORT]
            await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


def test_a_waiter_that_is_cancelled_leaves_the_line_and_its_place():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            await rings.fill()
            first, second = (asyncio.create_task(rings.submit()) for _ in range(2))
            await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait([first])
            assert len(rings.client.in_flight) == 5
            rings.take(1)
            entry = await asyncio.wait_for(second, 10)
            assert [req_id for _, req_id, _ in rings.take()][-1] == entry.req_id

    asyncio.run(scenario())


@pytest.mark.parametrize("is_after_credits", [False, True])
def test_a_waiter_that_is_sent_away_is_never_written(is_after_credits):
    """Else its ABORT would go ahead of its SUBMIT, and the worker would compute it for nobody."""

    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            await rings.fill()
            first, second = (asyncio.create_task(rings.submit(n)) for n in (1500, 1))
            await asyncio.sleep(0.01)
            (entry,) = list(rings.client.in_flight.values())[4:5]
            if is_after_credits:  # too few for the first
                rings.take(1)
                await asyncio.sleep(0.01)
            rings.client.refuse(entry, ApiError(503, "somebody better came", code="evicted"))
            with pytest.raises(ApiError, match="somebody better came"):
                await asyncio.wait_for(first, 10)
            taken = rings.take()
            written = await asyncio.wait_for(second, 10)
            taken += rings.take()
            assert {kind for kind, *_ in taken} == {SubmitKind.SUBMIT}
            ids = [req_id for _, req_id, _ in taken]
            assert entry.req_id not in ids and ids[-1] == written.req_id
            assert len(rings.client.in_flight) == 5

    asyncio.run(scenario())


def test_under_coalesce_a_submit_waits_outside_and_an_abort_undoes_it():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="coalesce")
        async with Rings(config) as rings:
            await rings.fill()
            undone, kept = await rings.submit(), await rings.submit()
            assert not undone.is_submitted
            rings.client.abort(undone)
            assert undone.is_over and undone.req_id not in rings.client.in_flight
            taken = rings.take()
            await until(lambda: kept.is_submitted, "it is written")
            taken += rings.take()
            assert [kind for kind, *_ in taken] == [SubmitKind.SUBMIT] * 5
            assert taken[-1][1] == kept.req_id

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", ["block", "drop", "coalesce"])
def test_an_abort_is_never_lost_when_the_ring_is_full(policy):
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy=policy)
        async with Rings(config) as rings:
            entries = await rings.fill()
            for entry in entries:
                rings.client.abort(entry)
                rings.client.abort(entry)  # again: it is told once
            assert len(rings.client.in_flight) == 4
            taken = rings.take()
            await until(lambda: not rings.link.writer.is_starved, "the ABORTs are written")
            taken += rings.take()
            assert [kind for kind, *_ in taken] == [SubmitKind.SUBMIT] * 4 + [SubmitKind.ABORT] * 4
            assert [req_id for _, req_id, _ in taken[4:]] == [entry.req_id for entry in entries]

    asyncio.run(scenario())


def test_an_abort_replaces_a_pause_that_still_waits():
    async def scenario():
        async with Rings(SMALL_RINGS) as rings:
            entries = await rings.fill()
            rings.client.set_paused(entries[0], True)
            rings.client.abort(entries[0])
            taken = rings.take()
            await until(lambda: not rings.link.writer.is_starved, "it is written")
            assert [kind for kind, *_ in taken + rings.take()][4:] == [SubmitKind.ABORT]

    asyncio.run(scenario())


def test_a_resume_does_not_replace_an_abort_that_still_waits():
    """A client that reads on in the moment in which its request is aborted: the sequence must not run on for nobody."""

    async def scenario():
        async with Rings(SMALL_RINGS) as rings:
            entries = await rings.fill()
            rings.client.abort(entries[0])
            assert not rings.client.set_paused(entries[0], False)
            taken = rings.take()
            await until(lambda: not rings.link.writer.is_starved, "it is written")
            assert [kind for kind, *_ in taken + rings.take()][4:] == [SubmitKind.ABORT]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_submit_that_an_abort_of_another_took_along_counts_as_written(is_aborted):
    """Under coalesce: the credits came, and before the loop looked at them an ABORT was written, with all that waited before it."""

    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="coalesce")
        async with Rings(config) as rings:
            entries = await rings.fill()
            waiting = await rings.submit()
            assert not waiting.is_submitted
            taken = rings.take(3)
            rings.client.abort(entries[0])
            assert waiting.is_submitted and not rings.link.writer.is_starved
            if is_aborted:
                rings.client.abort(waiting)
            taken += rings.take()
            assert [req_id for _, req_id, _ in taken[4:6]] == [waiting.req_id, entries[0].req_id]
            assert [req_id for _, req_id, _ in taken[6:]] == [waiting.req_id] * is_aborted
            rings.link.close("it died")
            ended = "abort" if is_aborted else "error"
            assert ending_of(waiting) == ended

    asyncio.run(scenario())


def test_a_submit_that_waits_outside_is_not_lost_for_a_pause_or_somebody_elses_abort():
    """A choice of a stream whose first ones have filled its client's buffers, before the ring has had room for it."""

    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="coalesce")
        async with Rings(config) as rings:
            await rings.fill()
            paused, ended = await rings.submit(), await rings.submit()
            assert not rings.client.set_paused(paused, True)
            rings.client.end(ended)
            assert ended.error.code == "aborted" and ended.req_id not in rings.client.in_flight
            taken = rings.take()
            await until(lambda: paused.is_submitted, "it is written")
            taken += rings.take()
            assert [kind for kind, *_ in taken] == [SubmitKind.SUBMIT] * 5
            assert taken[-1][1] == paused.req_id
            rings.client.end(paused)
            assert [(kind, req_id) for kind, req_id, _ in rings.take()] == [
                (SubmitKind.ABORT, paused.req_id)
            ]
            assert not paused.is_over

    asyncio.run(scenario())
