"""The pump, with token records put in by hand: what it hands over, what it ignores, and how it ends."""

import asyncio

import pytest
from puppet import Rings, finish_record, started_record, tokens_record, until

from shmserve.http import pump
from shmserve.request import FinishReason
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.tokens import TokenKind


async def one(rings):
    entry = await rings.submit()
    rings.take()
    return entry


def test_records_of_several_tokens_arrive_whole_and_in_order():
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            rings.put(
                tokens_record(entry.req_id, range(8)),
                tokens_record(entry.req_id, [8], 8),
                tokens_record(entry.req_id, [9, 10, 11], 9, is_stop=True),
                finish_record(entry.req_id, FinishReason.STOP_TOKEN),
            )
            await until(lambda: entry.is_over, "FINISH")
            assert entry.token_ids == list(range(12))
            assert entry.was_stop_token
            assert rings.board["tokens"] == 12

    asyncio.run(scenario())


def test_the_first_tokens_wake_the_handler_and_so_does_the_end():
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            rings.put(tokens_record(entry.req_id, [1]))
            assert await entry.signal.wait(20)
            rings.put(tokens_record(entry.req_id, [2], 1), finish_record(entry.req_id))
            assert await entry.signal.wait(20)
            assert entry.is_over

    asyncio.run(scenario())


def test_a_finish_before_anything_else_is_an_end():
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            rings.put(finish_record(entry.req_id, FinishReason.ERROR, "it does not fit"))
            await until(lambda: entry.is_over, "FINISH")
            assert (entry.error.status, entry.error.message) == (500, "it does not fit")
            assert not rings.client.in_flight

    asyncio.run(scenario())


def test_a_long_message_is_put_together_and_a_missing_one_is_replaced():
    async def scenario():
        async with Rings() as rings:
            first, second = await one(rings), await one(rings)
            text = "déjà vu " * 30
            rings.put(
                finish_record(first.req_id, FinishReason.ERROR, text),
                finish_record(second.req_id, FinishReason.ERROR),
            )
            await until(lambda: second.is_over, "FINISH")
            assert first.error.message == text
            assert second.error.message

    asyncio.run(scenario())


def test_stale_records_reach_nobody():
    """Records of a request that is forgotten, whose place in the table another has now."""

    async def scenario():
        async with Rings() as rings:
            old = await one(rings)
            rings.put(finish_record(old.req_id))
            await until(lambda: old.is_over, "FINISH")
            entry = await one(rings)
            assert entry.req_id != old.req_id
            rings.put(
                tokens_record(old.req_id, [1, 2, 3]),
                finish_record(old.req_id, FinishReason.ERROR, "no"),
                tokens_record(0x1234 << 24, [4]),
                pack_finish(TokenKind.READY, 0, time_ns=1, step=0),
                tokens_record(entry.req_id, [5]),
            )
            await until(lambda: entry.token_ids, "tokens")
            assert entry.token_ids == [5] and not entry.is_over
            assert rings.link.pump.num_stale == 4  # an error's FINISH has a MESSAGE before it

    asyncio.run(scenario())


def test_a_record_of_an_unknown_kind_ends_its_request_only():
    """It may have been its FINISH: who waited on would wait for ever."""

    async def scenario():
        async with Rings() as rings:
            entry, other = await one(rings), await one(rings)
            strange = bytearray(tokens_record(entry.req_id, [1]))
            strange[20] = 77
            rings.put(bytes(strange), tokens_record(other.req_id, [2]))
            await until(lambda: other.token_ids, "tokens")
            assert entry.error.status == 500 and not other.is_over
            assert rings.board["num_bad_records"] == 1

    asyncio.run(scenario())


def test_what_goes_wrong_for_one_request_ends_that_one_only():
    async def scenario():
        async with Rings() as rings:
            bad, good = await one(rings), await one(rings)

            def fails(entry):
                raise RuntimeError("on purpose")

            bad.on_tokens = fails
            rings.put(
                tokens_record(bad.req_id, [1]),
                tokens_record(good.req_id, [2]),
                tokens_record(bad.req_id, [3], 1),
            )
            await until(lambda: good.token_ids, "tokens")
            assert bad.error.status == 500 and "on purpose" not in bad.error.message
            ((_, req_id, _),) = rings.take()
            assert req_id == bad.req_id  # its ABORT
            rings.put(finish_record(bad.req_id, FinishReason.ABORT))
            await until(lambda: len(rings.client.in_flight) == 1, "FINISH")
            assert bad.error.status == 500

    asyncio.run(scenario())


def test_more_records_than_one_turn_takes_come_in_order_and_leave_turns_to_others():
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            turns = 0

            def tick():
                nonlocal turns
                turns += 1
                if not entry.is_over:
                    asyncio.get_running_loop().call_soon(tick)

            total = 3 * pump.RECORDS_PER_TURN
            expected = []
            tick()
            for start in range(0, total, 200):
                part = range(start, min(start + 200, total))
                await until(lambda: rings.producer.free(200) >= 200, "room")
                rings.put(*(tokens_record(entry.req_id, [i], i) for i in part))
                expected += part
            await until(lambda: rings.producer.free(1), "room")
            rings.put(finish_record(entry.req_id))
            await until(lambda: entry.is_over, "FINISH")
            assert entry.token_ids == expected
            assert turns > 3

    asyncio.run(scenario())


def test_at_the_workers_death_announced_records_are_handled_and_the_rest_ends_in_errors():
    async def scenario():
        async with Rings() as rings:
            done, torn, waiting = await one(rings), await one(rings), await one(rings)
            rings.put(
                started_record(done.req_id),
                tokens_record(done.req_id, [1, 2]),
                tokens_record(torn.req_id, [3]),
                finish_record(done.req_id),
            )
            rings.link.close("it died")  # before the loop had a turn
            assert done.finish is not None and done.error is None
            assert done.token_ids == [1, 2] and torn.token_ids == [3]
            for entry in (torn, waiting):
                assert (entry.error.status, entry.error.code) == (503, "worker_died")
            assert not rings.client.in_flight
            assert rings.link.channel is None and not rings.link.is_serving

    asyncio.run(scenario())


def test_a_new_channel_serves_after_a_death_and_the_old_ones_records_are_gone():
    async def scenario():
        async with Rings() as rings:
            old = await one(rings)
            producer = rings.producer
            rings.link.close("it died")
            rings.connect()
            entry = await one(rings)
            assert producer.try_write(
                tokens_record(entry.req_id, [9]), 1
            )  # the dead one still writes
            rings.put(tokens_record(entry.req_id, [1]), finish_record(entry.req_id))
            await until(lambda: entry.is_over, "FINISH")
            assert entry.token_ids == [1]
            assert old.error is not None

    asyncio.run(scenario())


def test_a_counter_that_lies_ends_the_channel_and_nothing_it_announced_is_believed():
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            rings.put(tokens_record(entry.req_id, [1]))
            await until(lambda: entry.token_ids, "tokens")
            rings.channel.tokens.data.add(1 << 40)
            await until(lambda: entry.is_over, "the error end")
            assert entry.error.code == "worker_died"
            assert entry.token_ids == [1]
            await until(lambda: rings.link.channel is None, "the channel is closed")
            assert not rings.link.is_serving and not rings.link.is_behind

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_tokens_are_counted_whichever_way_they_come(num_tokens):
    async def scenario():
        async with Rings() as rings:
            entry = await one(rings)
            for i in range(10):
                rings.put(tokens_record(entry.req_id, [7] * num_tokens, i * num_tokens))
            rings.put(pack_message(entry.req_id, "x", time_ns=1), finish_record(entry.req_id))
            await until(lambda: entry.is_over, "FINISH")
            assert rings.board["tokens"] == 10 * num_tokens

    asyncio.run(scenario())
