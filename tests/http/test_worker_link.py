"""A worker's channel, its life and its end, as whoever submits to it learns of them."""

import asyncio

import pytest
from puppet import SMALL_RINGS, Rings, tokens_record, until

from shmserve.config import RingConfig
from shmserve.http.errors import ApiError


def test_waiters_learn_of_the_workers_death_and_none_is_written_to_the_next():
    async def scenario():
        config = RingConfig(token_slots=64, submit_slots=4, submit_deadline_s=20)
        async with Rings(config) as rings:
            entries = await rings.fill()
            waiting = [asyncio.create_task(rings.submit()) for _ in range(3)]
            await asyncio.sleep(0.01)
            rings.take(2)  # the first in line has its turn in the very moment of the death
            rings.link.writer.take_credits()
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


def test_a_request_that_takes_more_than_half_the_ring_is_413_and_leaves_nothing():
    async def scenario():
        async with Rings(SMALL_RINGS) as rings:
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
        async with Rings(SMALL_RINGS) as rings:
            entries = await rings.fill()
            rings.channel.submit.credits.add(100)
            for entry in entries:
                rings.client.abort(entry)  # reads the counter: none of these may raise
            await until(lambda: rings.link.channel is None, "the channel is closed")
            assert all(entry.error is not None for entry in entries)
            assert not rings.client.in_flight
            rings.connect()
            entries = await rings.fill()
            rings.channel.submit.credits.add(100)
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert refused.value.code == "worker_died"
            await until(lambda: rings.link.channel is None, "the channel is closed")

    asyncio.run(scenario())


def test_an_abort_in_the_moment_of_the_workers_death_leaves_no_reader_behind():
    """What it had announced is handled at its end; who aborts then would wait for credits of a ring that is gone."""

    async def scenario():
        async with Rings(SMALL_RINGS) as rings:
            entries = await rings.fill()
            credits_fd = rings.link.channel.submit.credits.fd
            entries[0].on_tokens = rings.client.abort
            rings.put(tokens_record(entries[0].req_id, [5]))
            rings.link.close("it died")
            assert entries[0].is_aborted and entries[0].is_over
            assert not asyncio.get_running_loop().remove_reader(credits_fd)

    asyncio.run(scenario())


def test_a_fault_of_ours_at_the_workers_death_leaves_nobody_waiting(caplog):
    """What it had announced could not be read: who waits for it is told, and the next life is served."""

    async def scenario():
        async with Rings() as rings:
            entry = await rings.submit()
            rings.put(tokens_record(entry.req_id, [1]))

            def fault(most):
                raise ValueError("made for this test")

            rings.link.pump._take = fault
            rings.link.close("it died")
            assert (entry.error.status, entry.error.code) == (503, "worker_died")
            assert rings.link.channel is None and not rings.client.in_flight
            rings.connect()
            await rings.submit()
            assert len(rings.take()) == 1

    asyncio.run(scenario())
    assert "could not be read to its end" in caplog.text


def test_a_channel_that_is_broken_off_does_not_take_the_next_one_with_it():
    """Its worker is replaced in the same turn of the loop."""

    async def scenario():
        async with Rings() as rings:
            rings.link.break_off("it lies")
            rings.link.close("it was replaced")
            rings.connect()
            await asyncio.sleep(0.01)
            assert rings.link.is_serving
            await rings.submit()

    asyncio.run(scenario())
