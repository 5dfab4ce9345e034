"""Every token is in the histograms of its hops once, whichever way it takes; records put in by hand."""

import asyncio
import json
import struct
import time

import pytest
from puppet import finish_record, read_answer, started_record, tokens_record, until
from stuck import DOG, WORLD, run, stick

from shmserve.http.made_send import MadePath
from shmserve.rings.board import BoardReader
from shmserve.wire.logprobs import pack_top_logprobs
from shmserve.wire.tokens import TokenKind, fold_tokens

EMOJI = (10813, 242, 218)  # parts of one character
HOPS = ("hop_publish_us", "hop_pop_us", "hop_frame_us", "hop_write_us")


def readings(puppet):
    puppet.link.fold_times()
    reader = BoardReader.attach(puppet.board.segment.name)
    try:
        return reader.histograms()
    finally:
        reader.close()


def counts(puppet, *names):
    found = readings(puppet)
    return [found[name].count for name in names]


async def stream_of(puppet, groups, **fields):
    """Stream groups of token ids, a record each, one after the other."""
    reader, _ = await puppet.ask(stream=True, max_tokens=64, **fields)
    req_id = (await puppet.submitted()).req_id
    index = 0
    for group in groups:
        seen = puppet.board["tokens"]
        puppet.put(tokens_record(req_id, group, index))
        index += len(group)
        await until(lambda seen=seen: puppet.board["tokens"] > seen, "it was read")
        for _ in range(20):  # turns and no time: a loop that stood still must take them, too
            await asyncio.sleep(0)
    puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=index))
    status, body = await read_answer(reader)
    assert status == 200 and body.endswith(b"[DONE]\n\n")
    return index


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, [[WORLD]] * 6),
        ({"stop": ["zzz"]}, [[WORLD]] * 6),
        ({"stream_options": {"include_timing": True}}, [[WORLD]] * 6),
        ({"return_token_ids": True}, [[WORLD], [WORLD, DOG], [DOG]]),
    ],
    ids=["plain", "stop-string", "timed", "several-in-a-record"],
)
def test_every_token_of_a_stream_is_published_and_popped_once_and_framed_with_its_event(
    default_model, fields, groups
):
    async def scenario(puppet):
        num_tokens = await stream_of(puppet, groups, **fields)
        assert counts(puppet, *HOPS) == [num_tokens, num_tokens, len(groups), len(groups)]
        assert counts(puppet, "itl_wire_us", "ttft_us") == [num_tokens - 1, 1]

    run(scenario, default_model)


def test_parts_of_a_character_are_popped_one_by_one_and_framed_with_the_last(default_model):
    async def scenario(puppet):
        await stream_of(puppet, [[WORLD], *([i] for i in EMOJI), [WORLD]])
        publish, pop, frame, write = counts(puppet, *HOPS)
        assert (publish, pop) == (5, 5)
        assert frame == write == 3
        assert counts(puppet, "itl_wire_us") == [4]  # no time between the parts

    run(scenario, default_model)


def test_tokens_of_a_plain_answer_are_counted_and_its_first_is_a_ttft(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(max_tokens=4)
        req_id = (await puppet.submitted()).req_id
        await asyncio.sleep(0.05)
        puppet.put(started_record(req_id), tokens_record(req_id, [WORLD]))
        await until(lambda: puppet.board["tokens"] == 1, "it was read")
        await asyncio.sleep(0.3)  # the rest of the answer is not its first token
        puppet.put(
            tokens_record(req_id, [WORLD, DOG], 1), finish_record(req_id, completion_tokens=3)
        )
        status, _ = await read_answer(reader)
        assert status == 200
        found = readings(puppet)
        assert [found[name].count for name in HOPS] == [3, 3, 0, 0]
        assert found["ttft_us"].count == 1
        assert 50_000 <= found["ttft_us"].sum < found["e2e_us"].sum - 250_000

    run(scenario, default_model)


def test_the_ttft_of_a_stream_whose_headers_went_first_is_its_first_tokens(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(stream=True, max_tokens=4)
        req_id = (await puppet.submitted()).req_id
        puppet.put(started_record(req_id))
        await reader.readuntil(b"\r\n\r\n")
        assert counts(puppet, "ttft_us") == [0]
        await asyncio.sleep(0.2)
        for i in range(2):
            puppet.put(tokens_record(req_id, [WORLD], i))
            await reader.readuntil(b" world")
        found = readings(puppet)["ttft_us"]
        assert found.count == 1 and found.sum >= 200_000
        puppet.put(finish_record(req_id, completion_tokens=2))
        await reader.readuntil(b"[DONE]")

    run(scenario, default_model, headers_after_s=0.05)


def test_merged_tokens_are_observed_with_their_own_times(default_model):
    """Three tokens 100 ms apart that were published together 300 ms after the first."""

    async def scenario(puppet):
        reader, _ = await puppet.ask(max_tokens=4)
        req_id = (await puppet.submitted()).req_id
        await asyncio.sleep(0.31)
        begin_ns = time.monotonic_ns() - 300_000_000
        slot = bytearray(tokens_record(req_id, [WORLD]))
        struct.pack_into("<Q", slot, 8, begin_ns)
        for i in (1, 2):
            more = bytearray(tokens_record(req_id, [WORLD], i))
            struct.pack_into("<Q", more, 8, begin_ns + i * 100_000_000)
            assert fold_tokens(slot, memoryview(more))
        struct.pack_into("<I", slot, 64, 300_000)
        puppet.put(bytes(slot), finish_record(req_id, completion_tokens=3))
        assert (await read_answer(reader))[0] == 200
        found = readings(puppet)["hop_publish_us"]
        assert (found.count, found.sum) == (3, 600_000)  # 300 + 200 + 100 ms

    run(scenario, default_model)


def test_records_that_are_no_tokens_are_in_no_histogram(default_model):
    async def scenario(puppet):
        reader, _ = await puppet.ask(max_tokens=4, logprobs=1)
        request = await puppet.submitted()
        np_ids, np_logprobs = request.prompt_ids[:1], request.prompt_ids[:1].astype("f4") * 0 - 1
        top = pack_top_logprobs(request.req_id, 0, np_ids, np_logprobs, 1)
        assert top[20] == TokenKind.TOP_LOGPROBS
        puppet.put(
            top,
            tokens_record(request.req_id, [WORLD]),
            finish_record(request.req_id, completion_tokens=1),
        )
        status, body = await read_answer(reader)
        assert status == 200 and json.loads(body)["choices"][0]["text"] == " world"
        assert counts(puppet, *HOPS) == [1, 1, 0, 0]

    run(scenario, default_model)


@pytest.mark.parametrize("policy", ["coalesce", "block"])
def test_each_token_that_waited_for_a_slow_client_has_its_wait_in_the_last_hop(
    default_model, policy
):
    """A client that was stuck for 0.3 s: what waited came in one event, and as long as all of it waited is what the sum grows by."""

    async def scenario(puppet):
        reader, writer, req_id, count = await stick(puppet, max_tokens=4000, on_slow_client=policy)
        before = readings(puppet)["hop_write_us"]
        await asyncio.sleep(0.3)
        num_early = puppet.board["num_client_coalesced_tokens"]
        puppet.put(tokens_record(req_id, [WORLD], count))
        await until(
            lambda: puppet.board["num_client_coalesced_tokens"] > num_early, "the last one waits"
        )
        writer.transport.resume_reading()
        puppet.put(finish_record(req_id, completion_tokens=count + 1))
        await read_answer(reader)
        after = readings(puppet)["hop_write_us"]
        assert after.count - before.count == num_early + 1
        grown_us = after.sum - before.sum
        assert grown_us >= 300_000
        # All but the last came before the wait; they are placed evenly between the first and the last.
        assert grown_us >= 0.45 * num_early * 300_000

    run(scenario, default_model)


def test_who_asks_for_times_has_them_kept_and_nobody_else_does(default_model):
    async def scenario(puppet):
        for fields, is_timed in (({}, False), ({"include_timing": True}, True)):
            reader, _ = await puppet.ask(stream=True, max_tokens=4, **fields)
            req_id = (await puppet.submitted()).req_id
            puppet.put(tokens_record(req_id, [WORLD]))
            await reader.readuntil(b" world")
            for _ in range(20):  # the handler goes on behind its write
                await asyncio.sleep(0)
            entry = puppet.client.in_flight[req_id]
            assert isinstance(entry.direct, MadePath if is_timed else tuple)
            assert (entry.timing is not None) == is_timed
            puppet.put(finish_record(req_id, completion_tokens=1))
            await reader.readuntil(b"[DONE]")

    run(scenario, default_model)
