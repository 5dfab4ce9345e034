"""The table of requests in flight, with records taken out by hand: places, req_ids, aborts, the drain."""

import asyncio

import pytest
from puppet import Rings, finish_record, started_record, until

from shmserve.config import RingConfig
from shmserve.http.errors import ApiError


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
            first, _ = await rings.fill(2)
            with pytest.raises(ApiError) as refused:
                await rings.submit()
            assert (refused.value.status, refused.value.code) == (503, "table_full")
            rings.put(finish_record(first.req_id))
            await until(lambda: len(rings.client.in_flight) == 1, "FINISH")
            await rings.submit()

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


def test_the_drain_is_over_when_the_table_runs_empty():
    async def scenario():
        async with Rings() as rings:
            drained = []
            entries = await rings.fill(2)
            rings.client.on_drained = lambda: drained.append(True)
            rings.put(finish_record(entries[0].req_id))
            await until(lambda: len(rings.client.in_flight) == 1, "FINISH")
            assert not drained
            rings.put(finish_record(entries[1].req_id))
            await until(lambda: drained, "drained")

    asyncio.run(scenario())
