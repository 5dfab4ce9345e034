"""Whole answers, plain and streamed, from a worker whose records are damaged on their way: each is well-formed and has an end."""

import asyncio
import logging
import random

import pytest
from puppet import (
    Puppet,
    events_of,
    finish_record,
    read_answer,
    started_record,
    tokens_record,
    until,
)

from shmserve.config import RingConfig
from shmserve.request import FinishReason
from shmserve.wire.finish import pack_message
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TokenKind

ASKED = (
    ("/v1/completions", {"prompt": "Hi", "stop": ["zq"]}),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/generate", {"text": "Hi"}),
)
HELLO, WORLD = 19556, 905


def records_of(rng, req_id, vocab_size):
    """A short completion as a worker would write it, with none, one or two of its records damaged."""
    whole = [
        started_record(req_id),
        tokens_record(req_id, [HELLO]),
        tokens_record(req_id, [WORLD], 1),
        tokens_record(req_id, [WORLD, WORLD, HELLO], 2),
        tokens_record(req_id, [HELLO], 5),
    ]
    if rng.random() < 0.3:
        pairs = bytearray(tokens_record(req_id, [1] * 8))
        pairs[20] = rng.choice([TokenKind.TOP_LOGPROBS, TokenKind.PROMPT_LOGPROBS])
        whole.insert(2, bytes(pairs))
    reason = rng.choice([FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.ERROR])
    if reason is FinishReason.ERROR:
        whole.append(pack_message(req_id, "it could not go on", time_ns=1))
    whole.append(finish_record(req_id, reason, matched_token=2))
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(whole))
        record = bytearray(whole[at])
        for _ in range(rng.choice([1, 1, 4, 40])):
            record[rng.randrange(8, TOKEN_SLOT_BYTES)] = rng.randrange(256)
        whole[at] = bytes(record)
    return whole


def check(path, status, body, is_stream):
    """It is what a client can read: JSON, or events up to [DONE] (or to an error that says so)."""
    if status == 200 and is_stream:
        events = events_of(body)
        assert events and events[-1] == "[DONE]", body[-300:]
    else:
        assert status in (200, 500, 503), (path, status, body)
        assert body.startswith(b"{"), body


@pytest.mark.parametrize("rounds", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_answers_are_well_formed_and_end_whatever_is_damaged(default_model, rounds):
    rng = random.Random(f"damage {rounds}")
    complaints = []

    async def scenario():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context))
        rings = RingConfig(token_slots=256, submit_slots=64)
        async with Puppet(default_model, rings=rings) as puppet:
            vocab_size = puppet.client.vocab_size = puppet.front.tokenizer.vocab_size
            puppet.link.close("made anew with a vocabulary")
            puppet.connect()
            for _ in range(rounds):
                if puppet.link.channel is None:
                    puppet.connect()  # too many bad records: a new life of the worker
                asked = []
                for path, fields in rng.sample(ASKED, 3):
                    is_stream = rng.random() < 0.6
                    reader, writer = await puppet.ask(path, **(fields | {"stream": is_stream}))
                    request = await puppet.submitted()
                    asked.append((path, is_stream, reader, writer, request.req_id))
                queue = [(each[4], records_of(rng, each[4], vocab_size)) for each in asked]
                while any(records for _, records in queue):
                    _, records = rng.choice(queue)
                    count = rng.randint(0, 3)
                    batch, records[:] = records[:count], records[count:]
                    if batch and puppet.link.channel is not None:
                        puppet.put(*batch)
                    if rng.random() < 0.7:
                        await asyncio.sleep(0)
                # What was damaged may have been the end: an aborted request is answered as a worker does.
                for path, is_stream, reader, writer, req_id in asked:
                    if puppet.link.channel is not None:
                        await asyncio.sleep(0.002)
                        puppet.put(finish_record(req_id, FinishReason.ABORT))
                    async with asyncio.timeout(20):
                        check(path, *await read_answer(reader), is_stream)
                    writer.close()
                if puppet.link.channel is not None:
                    puppet.take()
                await until(lambda: not puppet.client.in_flight, "every place is free")
                assert complaints == []
            assert puppet.board["num_bad_records"] > rounds // 2, "the damage was felt"

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(scenario())
    finally:
        logging.disable(logging.NOTSET)
