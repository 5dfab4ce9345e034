"""The table and the submit ring, with records taken out by hand: policies, deadlines, ABORTs, req_ids, a worker's death."""

import asyncio

import pytest
from puppet import Rings, finish_record, started_record, until

from shmserve.config import RingConfig
from shmserve.http.errors import ApiError
from shmserve.rings.observe import RingView, rings_of
from shmserve.wire.submit_slots import SubmitKind

SMALL = RingConfig(token_slots=64, submit_slots=4, table_size=16, submit_deadline_s=0.05)


def submit_ring(rings):
    """The producer's words of the submit ring, as an observer sees them."""
    (name,) = [name for name in rings_of(rings.instance) if name.endswith(".submit")]
    view = RingView(name)
    stats = view.stats()
    view.close()
    return stats.producer


async def fill(rings, count=4):
    """Take every slot of the submit ring."""
    return [await rings.submit() for _ in range(count)]


def test_a_submit_is_in_the_table_until_its_finish():
    async def scenario():
        async with Rings() as rings:
            entry = await rings.submit(3)
            request = await rings.submitted()
            assert (request.req_id, len(request.prompt_ids)) == (entry.req_id, 3)
            assert rings.client.in_flight == {entry.req_id: entry}
            assert rings.client.num_waiting == 1
            rings.put(started_record(entry.req_id))
            await until(lambda: entry.started, "STARTED")
            assert rings.client.num_waiting == 0
            rings.put(finish_record(entry.req_id, completion_tokens=5))
            await until(lambda: entry.is_over, "FINISH")
            assert entry.finish.completion_tokens == 5
            assert not rings.client.in_flight and not rings.link.in_flight

    asyncio.run(scenario())


def test_a_place_that_is_used_again_gets_a_new_generation():
    async def scenario():
        async with Rings(RingConfig(token_slots=64, submit_slots=16, table_size=1)) as rings:
            seen = []
            for _ in range(5):
                entry = await rings.submit()
                seen.append(entry.req_id)
                rings.take()
                rings.put(finish_record(entry.req_id))
                await until(lambda: not rings.client.in_flight, "FINISH")
            assert len(set(seen)) == 5 and seen == sorted(seen)
            assert {req_id & 0xFFFF for req_id in seen} == {0}
            assert len({req_id >> 24 for req_id in seen}) == 5

    asyncio.run(scenario())


def test_a_full_table_refuses_and_a_finish_makes_room():
    async def scenario():
        async with Rings(RingConfig(token_slots=64, submit_slots=16, table_size=2)) as rings:
            first, _ = await fill(rings, 2)
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert (refused.value.status, refused.value.code) == (503, "table_full")
            rings.put(finish_record(first.req_id))
            await until(lambda: len(rings.client.in_flight) == 1, "FINISH")
            await rings.submit()

    asyncio.run(scenario())


def test_under_drop_a_full_ring_refuses_at_once_and_keeps_nothing():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="drop")
        async with Rings(config) as rings:
            entries = await fill(rings)
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
        async with Rings(SMALL) as rings:
            await fill(rings)
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
            await fill(rings)
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
            entries = await fill(rings)
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
            await fill(rings)
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
            await fill(rings)
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


def test_waiters_learn_of_the_workers_death_and_none_is_written_to_the_next():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            entries = await fill(rings)
            waiting = [asyncio.create_task(rings.submit()) for _ in range(3)]
            await asyncio.sleep(0.01)
            rings.take(2)  # the first in line has its turn in the very moment of the death
            rings.link._on_credits()
            rings.link.close("it died")
            rings.connect()
            done = await asyncio.gather(*waiting, return_exceptions=True)
            for error in done:
                assert isinstance(error, ApiError), repr(error)
                assert (error.status, error.code) == (503, "worker_died")
            assert all(entry.error.code == "worker_died" for entry in entries)
            assert not rings.client.in_flight
            assert rings.take() == []
            await rings.submit()
            assert len(rings.take()) == 1

    asyncio.run(scenario())


def test_under_coalesce_a_submit_waits_outside_and_an_abort_undoes_it():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_policy="coalesce")
        async with Rings(config) as rings:
            await fill(rings)
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
            entries = await fill(rings)
            for entry in entries:
                rings.client.abort(entry)
                rings.client.abort(entry)  # again: it is told once
            assert len(rings.client.in_flight) == 4
            taken = rings.take()
            await until(lambda: not rings.link._writer.is_starved, "the ABORTs are written")
            taken += rings.take()
            assert [kind for kind, *_ in taken] == [SubmitKind.SUBMIT] * 4 + [SubmitKind.ABORT] * 4
            assert [req_id for _, req_id, _ in taken[4:]] == [entry.req_id for entry in entries]

    asyncio.run(scenario())


def test_an_abort_replaces_a_pause_that_still_waits():
    async def scenario():
        async with Rings(SMALL) as rings:
            entries = await fill(rings)
            rings.client.set_paused(entries[0], True)
            rings.client.abort(entries[0])
            taken = rings.take()
            await until(lambda: not rings.link._writer.is_starved, "it is written")
            assert [kind for kind, *_ in taken + rings.take()][4:] == [SubmitKind.ABORT]

    asyncio.run(scenario())


def test_a_resume_does_not_replace_an_abort_that_still_waits():
    """A client that reads on in the moment in which its request is aborted: the sequence must not run on for nobody."""

    async def scenario():
        async with Rings(SMALL) as rings:
            entries = await fill(rings)
            rings.client.abort(entries[0])
            assert not rings.client.set_paused(entries[0], False)
            taken = rings.take()
            await until(lambda: not rings.link._writer.is_starved, "it is written")
            assert [kind for kind, *_ in taken + rings.take()][4:] == [SubmitKind.ABORT]

    asyncio.run(scenario())


def test_an_abort_of_what_is_over_is_silent():
    async def scenario():
        async with Rings() as rings:
            entry = await rings.submit()
            rings.take()
            rings.put(finish_record(entry.req_id))
            await until(lambda: entry.is_over, "FINISH")
            rings.client.abort(entry)
            assert rings.take() == []

    asyncio.run(scenario())


def test_a_request_that_takes_more_than_half_the_ring_is_413_and_leaves_nothing():
    async def scenario():
        async with Rings(SMALL) as rings:
            with pytest.raises(ApiError) as refused:
                await rings.submit(4000)
            assert refused.value.status == 413
            assert "16384" in refused.value.message and "8192" in refused.value.message
            assert not rings.client.in_flight and rings.take() == []
            await rings.submit(1900)

    asyncio.run(scenario())


def test_without_a_worker_a_submit_is_refused():
    async def scenario():
        async with Rings() as rings:
            rings.link.close("it died")
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert (refused.value.status, refused.value.code) == (503, "worker_died")
            rings.connect()
            rings.link.state = "hung"
            with pytest.raises(ApiError):
                await rings.submit()

    asyncio.run(scenario())


def test_credits_that_cannot_be_end_the_channel_and_not_the_asker():
    async def scenario():
        async with Rings(SMALL) as rings:
            entries = await fill(rings)
            rings.channel.submit.credits.add(100)
            for entry in entries:
                rings.client.abort(entry)  # reads the counter: none of these may raise
            await until(lambda: rings.link.channel is None, "the channel is closed")
            assert all(entry.error is not None for entry in entries)
            assert not rings.client.in_flight
            rings.connect()
            entries = await fill(rings)
            rings.channel.submit.credits.add(100)
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert refused.value.code == "worker_died"
            await until(lambda: rings.link.channel is None, "the channel is closed")

    asyncio.run(scenario())


def test_the_drain_is_over_when_the_table_runs_empty():
    async def scenario():
        async with Rings() as rings:
            drained = []
            entries = await fill(rings, 2)
            rings.client.on_drained = lambda: drained.append(True)
            rings.put(finish_record(entries[0].req_id))
            await until(lambda: len(rings.client.in_flight) == 1, "FINISH")
            assert not drained
            rings.put(finish_record(entries[1].req_id))
            await until(lambda: drained, "drained")

    asyncio.run(scenario())
