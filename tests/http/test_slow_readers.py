"""Clients that read oddly, behind a real socket and with every record put in by hand: how long they are waited for, and what is said."""

import asyncio
import contextlib
import functools
import json
import logging
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

from shmserve.http import slow_client
from shmserve.request import FinishReason
from shmserve.rings.board import BoardReader
from shmserve.wire.submit_slots import SubmitKind

congest = functools.partial(stick, word="clients_congested")


async def end_of_body(reader):
    """What is left of a chunked body, its framing included."""
    return await reader.readuntil(b"\r\n0\r\n\r\n")


def test_a_client_that_reads_a_byte_now_and_then_is_stuck_between_two_windows(default_model):
    """Its receive buffer swallows what it does not read, and the kernel tells of no single byte."""

    async def scenario(puppet):
        _, writer, _, _ = await congest(puppet)
        fd = writer.transport.get_extra_info("socket").fileno()
        while not puppet.board["num_slow_clients"]:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 1)
            await asyncio.sleep(0.02)
        await until(lambda: not puppet.board["clients_congested"], "its connection is closed")
        await until(lambda: [k for k, *_ in puppet.take()] == [SubmitKind.ABORT], "an ABORT")

    run(scenario, default_model, slow_client_seconds=0.3)


def test_a_reader_of_http_1_0_that_resumes_gets_every_byte_and_then_the_end(default_model):
    async def scenario(puppet):
        reader, writer, req_id, count = await congest(puppet, version="1.0")
        puppet.put(tokens_record(req_id, [DOG], count), finish_record(req_id))
        await until(lambda: not puppet.client.in_flight, "FINISH")
        writer.transport.resume_reading()
        _, body = await read_answer(reader)  # to the end of the connection
        assert text_of(events_of(body)) == " world" * count + " dog"
        assert events_of(body)[-1] == "[DONE]"

    run(scenario, default_model)


def test_a_connection_that_was_congested_serves_the_next_request(default_model):
    async def scenario(puppet):
        reader, writer, req_id, count = await congest(puppet)
        puppet.put(finish_record(req_id))
        writer.transport.resume_reading()
        assert text_of(events_of((await read_answer(reader))[1])) == " world" * count
        for stream in (False, True):
            body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            req_id = (await puppet.submitted()).req_id
            puppet.put(tokens_record(req_id, [DOG]), finish_record(req_id))
            status, answer = await read_answer(reader)
            assert status == 200 and b" dog" in answer
        assert puppet.board["clients_congested"] == 0

    run(scenario, default_model)


async def ask_for_a_long_answer(puppet, version):
    """A plain completion of 100 KB, more than the kernel takes, for a client that does not read yet."""
    reader, writer = await puppet.ask(receive_buffer=4096, version=version)
    writer.transport.pause_reading()
    req_id = (await puppet.submitted()).req_id
    puppet.put(*(tokens_record(req_id, [WORLD] * 8, 8 * i) for i in range(2000)))
    puppet.put(finish_record(req_id, completion_tokens=16_000))
    await until(lambda: puppet.board["clients_congested"] == 1, "it is congested")
    return reader, writer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_plain_answer_that_nobody_reads_does_not_stay_for_ever(default_model, version):
    """64 KiB of it wait in the transport without aiohttp's waiting for them, whether the connection goes on or not."""

    async def scenario(puppet):
        await ask_for_a_long_answer(puppet, version)
        await until(lambda: puppet.board["num_slow_clients"] == 1, "it is given up")
        await until(lambda: not puppet._runner.server.connections, "it is closed")
        assert puppet.board["clients_congested"] == 0

    run(scenario, default_model, slow_client_seconds=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_plain_answer_that_is_read_slowly_is_served_to_the_end(default_model, version):
    """It takes several times --slow-client-seconds."""

    async def scenario(puppet):
        reader, writer = await ask_for_a_long_answer(puppet, version)
        fd = writer.transport.get_extra_info("socket").fileno()
        data = b""
        for _ in range(40):
            await asyncio.sleep(0.06)
            with contextlib.suppress(BlockingIOError):
                data += os.read(fd, 1500)
        assert puppet.board["clients_congested"] == 1 and puppet.board["num_slow_clients"] == 0
        writer.transport.resume_reading()
        while not data.endswith(b"}"):
            data += await reader.read(65536)
        answer = json.loads(data.partition(b"\r\n\r\n")[2])
        assert answer["choices"][0]["text"] == " world" * 16_000
        await until(lambda: puppet.board["clients_congested"] == 0, "nobody is congested")

    run(scenario, default_model, slow_client_seconds=0.8)


def test_the_death_of_the_worker_is_told_behind_all_the_text_to_a_paused_client(default_model):
    async def scenario(puppet):
        reader, writer, req_id, count = await congest(puppet, on_slow_client="block")
        taken = await until(puppet.take, "a PAUSE")
        assert [(kind, each) for kind, each, _ in taken] == [(SubmitKind.PAUSE, req_id)]
        puppet.put(tokens_record(req_id, [DOG], count))  # it was on its way
        await until(lambda: puppet.board["mailbox_bytes"], "it waits")
        puppet.link.close("signal 9")
        writer.transport.resume_reading()
        _, body = await read_answer(reader)
        events = events_of(body)
        assert text_of(events) == " world" * count + " dog"
        assert events[-2]["error"]["code"] == "worker_died" and events[-1] == "[DONE]"

    run(scenario, default_model)


def test_a_paused_stream_whose_time_is_up_ends_as_any_other(default_model):
    async def scenario(puppet):
        reader, writer, req_id, count = await congest(puppet, on_slow_client="block")
        puppet.put(finish_record(req_id, FinishReason.TIMEOUT, completion_tokens=count))
        await until(lambda: not puppet.client.in_flight, "FINISH")
        writer.transport.resume_reading()
        events = events_of((await read_answer(reader))[1])
        assert text_of(events) == " world" * count
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert [k for k, *_ in puppet.take()] == [SubmitKind.PAUSE]  # nobody resumes what is over

    run(scenario, default_model)


def test_the_error_of_a_cut_stream_has_a_bound_on_its_time_too(default_model):
    """Cut by the bound on bytes, and then neither read nor left: the connection is not kept for ever."""

    async def scenario(puppet):
        _, _, req_id, count = await congest(puppet, slow_client_bytes=1024)
        puppet.put(*(tokens_record(req_id, [WORLD] * 8, count + 8 * i) for i in range(100)))
        await until(lambda: puppet.board["num_slow_clients"] == 1, "it is cut")
        assert puppet.board["mailbox_bytes"] == 0 and puppet.board["clients_congested"] == 1
        await until(lambda: not puppet._runner.server.connections, "it is closed")
        assert puppet.board["num_slow_clients"] == 1, "counted once"
        assert puppet.board["clients_congested"] == 0

    run(scenario, default_model, slow_client_seconds=0.4)


def test_a_cut_stream_that_is_read_on_and_on_slowly_ends_in_time(default_model):
    """It waits with 100 KB in its transport, cut; what it reads makes it no stuck one, and does not keep it for ever."""

    async def scenario(puppet):
        _, writer, req_id, count = await congest(puppet)
        fd = writer.transport.get_extra_info("socket").fileno()
        puppet.put(*(tokens_record(req_id, [WORLD] * 8, count + 8 * i) for i in range(2400)))
        data = b""
        while puppet.board["num_congestions"] < 2:  # what waited became one frame, and did not fit
            with contextlib.suppress(BlockingIOError):
                data += os.read(fd, 4096)
            await asyncio.sleep(0.002)
        puppet.put(*(tokens_record(req_id, [WORLD] * 8, count + 8 * i) for i in range(3000)))
        await until(lambda: puppet.board["num_slow_clients"] == 1, "it is cut")
        while puppet._runner.server.connections:
            with contextlib.suppress(BlockingIOError):
                data += os.read(fd, 1000)
            await asyncio.sleep(0.05)
        assert b"slow_client" not in data
        assert puppet.board["num_slow_clients"] == 1 and puppet.board["clients_congested"] == 0

    run(scenario, default_model, slow_client_seconds=0.6, slow_client_bytes=200_000)


def test_the_backlog_warning_names_request_and_depth_and_comes_once(
    default_model, caplog, monkeypatch
):
    async def scenario(puppet):
        _, _, req_id, _ = await congest(puppet)
        _, _, other, _ = await congest(puppet)
        monkeypatch.setattr(slow_client, "WARN_AFTER_S", 0.05)  # not before there are two
        await until(lambda: warnings(), "a warning")
        await asyncio.sleep(0.5)  # several looks
        (line,) = warnings()
        assert f"request {req_id:016x}" in line or f"request {other:016x}" in line
        depth = int(line.partition("keep up: ")[2].split()[0])
        assert 1000 < depth <= puppet.board["client_backlog_high_water_bytes"]
        assert "policy coalesce" in line and "2 clients are congested" in line

    def warnings():
        return [r.getMessage() for r in caplog.records if "does not keep up" in r.getMessage()]

    with caplog.at_level(logging.WARNING):
        run(scenario, default_model, slow_client_seconds=1.0)


def test_nobody_is_looked_at_while_all_keep_up(default_model):
    async def scenario(puppet):
        assert puppet.front.slow_clients._timer is None
        reader, writer, req_id, _ = await congest(puppet)
        assert puppet.front.slow_clients._timer is not None
        writer.transport.resume_reading()
        puppet.put(finish_record(req_id))
        await read_answer(reader)
        await until(lambda: puppet.front.slow_clients._timer is None, "the timer is gone")

    run(scenario, default_model)


def test_what_waits_for_a_client_with_logprobs_counts_them(default_model):
    async def scenario(puppet):
        _, _, req_id, count = await congest(puppet, logprobs=3)
        before = puppet.board["mailbox_bytes"]
        puppet.put(tokens_record(req_id, [WORLD] * 4, count))
        await until(lambda: puppet.board["mailbox_bytes"] > before, "they wait")
        assert puppet.board["mailbox_bytes"] - before > 4 * 100

    run(scenario, default_model)


def intervals(puppet):
    """(all intervals on the wire, those above 200 ms)"""
    puppet.link.fold_times()
    reader = BoardReader.attach(puppet.board.segment.name)
    reading = reader.histograms()["itl_wire_us"]
    reader.close()
    return reading.count, sum(reading.counts[reading.bounds.index(200_000) + 1 :])


def test_the_interval_before_text_that_waited_is_that_of_its_first_token(default_model):
    """A client that was stuck for 0.3 s: one interval says so, the others that came with that event are none."""

    async def scenario(puppet):
        reader, writer, req_id, count = await congest(puppet)
        before, held = intervals(puppet), puppet.board["num_client_coalesced_tokens"]
        await asyncio.sleep(0.3)
        puppet.put(*(tokens_record(req_id, [WORLD], count + i) for i in range(30)))
        await until(
            lambda: puppet.board["num_client_coalesced_tokens"] == held + 30, "all of them wait"
        )
        writer.transport.resume_reading()
        puppet.put(finish_record(req_id))
        await read_answer(reader)
        after = intervals(puppet)
        assert after[1] - before[1] == 1 and after[0] - before[0] == held + 30

    run(scenario, default_model)
