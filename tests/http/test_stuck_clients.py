"""Clients that have stopped reading, behind a real socket and with every record put in by hand: text waits, and ends come behind it."""

import asyncio
import contextlib
import os

import pytest
from puppet import (
    events_of,
    finish_record,
    read_answer,
    text_of,
    tokens_record,
    until,
)
from stuck import DOG, WORLD, run, stick

from shmserve.request import FinishReason
from shmserve.wire.submit_slots import SubmitKind


@pytest.mark.parametrize("how", ["finish", "error"])
def test_an_end_while_the_client_is_stuck_comes_behind_all_the_text(default_model, how):
    async def scenario(puppet):
        reader, writer, req_id, count = await stick(puppet)
        puppet.put(tokens_record(req_id, [DOG], count))
        if how == "finish":
            puppet.put(finish_record(req_id))
        else:
            puppet.put(finish_record(req_id, FinishReason.ERROR, "no"))
        await until(lambda: not puppet.client.in_flight, "FINISH")
        assert puppet.board["mailbox_bytes"] > 0
        writer.transport.resume_reading()
        _, body = await read_answer(reader)
        events = events_of(body)
        assert text_of(events) == " world" * count + " dog"
        assert events[-1] == "[DONE]"
        assert ("error" in events[-2]) == (how == "error")
        await until(lambda: puppet.board["mailbox_bytes"] == 0, "the mailbox is empty")

    run(scenario, default_model)


def test_after_a_jam_the_stream_goes_on_token_by_token(default_model):
    async def scenario(puppet):
        reader, writer, req_id, count = await stick(puppet)
        writer.transport.resume_reading()
        await until(lambda: puppet.board["mailbox_bytes"] == 0, "the mailbox is empty")
        for i in range(5):
            puppet.put(tokens_record(req_id, [DOG], count + i))
            await asyncio.sleep(0.01)
        puppet.put(finish_record(req_id))
        _, body = await read_answer(reader)
        events = events_of(body)
        assert text_of(events) == " world" * count + " dog" * 5
        assert [e["choices"][0]["text"] for e in events[-7:-2]] == [" dog"] * 5

    run(scenario, default_model)


def test_a_client_that_leaves_while_it_is_stuck_is_aborted_and_its_mailbox_forgotten(default_model):
    async def scenario(puppet):
        _, writer, req_id, _ = await stick(puppet)
        writer.transport.abort()
        taken = await until(puppet.take, "an ABORT")
        assert [(kind, each) for kind, each, _ in taken] == [(SubmitKind.ABORT, req_id)]
        puppet.put(finish_record(req_id, FinishReason.ABORT))
        await until(lambda: not puppet.client.in_flight, "FINISH")
        await until(lambda: puppet.board["mailbox_bytes"] == 0, "the mailbox is forgotten")

    run(scenario, default_model)


def test_the_gauge_is_the_sum_over_all_stuck_clients(default_model):
    async def scenario(puppet):
        *_, first, _ = await stick(puppet)
        before = puppet.board["mailbox_bytes"]
        reader, writer, second, _ = await stick(puppet)
        writer.transport.resume_reading()
        puppet.put(finish_record(second))
        await read_answer(reader)
        await until(lambda: puppet.board["mailbox_bytes"] == before, "one is left")
        assert puppet.client.in_flight.keys() == {first}

    run(scenario, default_model)


def pile_up(puppet, req_id, count, num_bytes, *more):
    """So many bytes of text for a stuck client, and `more` records, in one publish; the tokens put so far."""
    per_record = 8 * len(" world")
    num_records = -(-num_bytes // per_record)
    puppet.put(
        *(tokens_record(req_id, [WORLD] * 8, count + 8 * i) for i in range(num_records)), *more
    )
    return count + 8 * num_records


def test_a_client_that_reads_slowly_is_not_one_that_is_stuck(default_model):
    """What waits takes several times --slow-client-seconds to be read, and the client reads on."""

    async def scenario(puppet):
        reader, writer, req_id, count = await stick(puppet)
        count = pile_up(puppet, req_id, count, 60_000, finish_record(req_id))
        await until(lambda: puppet.board["mailbox_bytes"] > 60_000, "it waits")
        fd = writer.transport.get_extra_info("socket").fileno()
        data = b""
        for _ in range(15):  # 1.5 s, twice what is allowed to one that reads nothing
            await asyncio.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                data += os.read(fd, 2000)
        assert puppet.board["num_slow_clients"] == 0
        writer.transport.resume_reading()
        _, body = await read_answer(Prefixed(data, reader))
        assert text_of(events_of(body)) == " world" * count

    run(scenario, default_model, slow_client_seconds=0.75, slow_client_bytes=1 << 20)


class Prefixed:
    """A reader that has read `data` already."""

    def __init__(self, data, reader):
        self._inner = asyncio.StreamReader(limit=1 << 20)
        self._inner.feed_data(data)
        self._reader = reader
        self._task = asyncio.create_task(self._pour())

    async def _pour(self):
        while more := await self._reader.read(65536):
            self._inner.feed_data(more)
        self._inner.feed_eof()

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_client_that_does_not_read_the_end_is_closed(default_model):
    async def scenario(puppet):
        _, _, req_id, count = await stick(puppet)
        pile_up(puppet, req_id, count, 60_000, finish_record(req_id))
        await until(lambda: puppet.board["num_slow_clients"] == 1, "it is closed")
        await until(lambda: not puppet.client.in_flight, "FINISH")

    run(scenario, default_model, slow_client_seconds=0.3, slow_client_bytes=1 << 20)
