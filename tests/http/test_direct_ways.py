"""Streams with stop strings, logprobs, numbers or splitters: the pump writes their tokens by itself, and their text is what the slow way
gives."""

import json

import numpy as np
import pytest
from puppet import events_of, finish_record, read_answer, text_of, tokens_record, until
from stuck import DOG, WORLD, run

from shmserve.http.step_send import StepSender
from shmserve.http.uring import SendRing
from shmserve.request import FinishReason
from shmserve.wire.logprobs import pack_top_logprobs


@pytest.mark.parametrize(("included", "text"), [(False, " world" * 3 + " d"), (True, " world" * 3 + " dog d")])  # fmt: skip
def test_a_stop_string_is_found_behind_tokens_that_went_past_the_scan(
    default_model, included, text
):
    async def scenario(puppet):
        reader, _ = await puppet.ask(
            stream=True, max_tokens=9, stop=["og d"], include_stop_str_in_output=included
        )
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        entry = await until(lambda: puppet.client.in_flight.get(req_id), "it is in flight")
        await until(lambda: entry.direct is not None, "nothing is held")
        entry.on_tokens = None  # the pump alone
        puppet.put(tokens_record(req_id, [WORLD], 1), tokens_record(req_id, [WORLD], 2))
        await until(lambda: puppet.board["tokens"] == 3, "they are read")
        assert entry.token_ids == []
        puppet.put(tokens_record(req_id, [DOG], 3))
        await until(lambda: entry.token_ids == [DOG], "a token that may begin it is left to others")
        puppet.put(
            tokens_record(req_id, [DOG], 4),
            finish_record(
                req_id,
                FinishReason.STOP_STRING,
                prompt_tokens=1,
                completion_tokens=5,
                matched_stop=0,
                keep_bytes=len(text),
            ),
        )
        _, body = await read_answer(reader)
        events = events_of(body)
        assert text_of(events) == text
        last = events[-2]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", "og d")

    run(scenario, default_model)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_with_logprobs_are_written_by_the_pump(default_model, path, version):
    async def scenario(puppet):
        fields = {"logprobs": 2}
        if "chat" in path:
            fields = {"logprobs": True, "top_logprobs": 2, "prompt": None}
            fields["messages"] = [{"role": "user", "content": "Hi"}]
        reader, _ = await puppet.ask(path, stream=True, max_tokens=9, version=version, **fields)
        req_id = (await puppet.submitted()).req_id

        def token(index):
            ids, values = np.array([WORLD, DOG], np.int32), np.array([-0.5, -1], np.float32)
            top = pack_top_logprobs(req_id, index, ids, values, 1)
            slot = bytearray(tokens_record(req_id, [WORLD], index))
            slot[96:100] = np.float32(-0.5).tobytes()
            return top + bytes(slot)

        puppet.put(token(0))
        entry = await until(lambda: puppet.client.in_flight.get(req_id), "it is in flight")
        await until(lambda: entry.direct is not None, "its first token is written")
        entry.on_tokens = None
        puppet.put(token(1), token(2))
        await until(lambda: puppet.board["tokens"] == 3, "they are read")
        assert entry.token_ids == []
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=3))
        status, body = await read_answer(reader)
        assert status == 200
        choices = [event["choices"][0] for event in events_of(body) if event != "[DONE]"]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        assert len(told) == 3
        if "chat" in path:
            assert told[1:] == [told[0]] * 2
            assert [top["token"] for top in told[0]["content"][0]["top_logprobs"]] == [
                " world",
                " dog",
            ]
        else:
            assert [part.pop("text_offset") for part in told] == [[0], [6], [12]]
            assert (
                told
                == [
                    {
                        "tokens": [" world"],
                        "token_logprobs": [-0.5],
                        "top_logprobs": [{" world": -0.5, " dog": -1.0}],
                    }
                ]
                * 3
            )

    run(scenario, default_model)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}
THINKS = {"chat_template": "{{ messages[0].content }}<think>"}
ASKED = {
    "chat": ("/v1/chat/completions", CHAT),
    "usage at the end": ("/v1/completions", {"stream_options": {"include_usage": True}}),
    "usage all along": (
        "/v1/completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "times": ("/v1/completions", {"include_timing": True}),
    "token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    "every third": ("/v1/completions", {"stream_interval": 3}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "functions": ("/v1/chat/completions", CHAT | {"functions": [TOOL["function"]]}),
    "thinking": ("/v1/chat/completions", CHAT | THINKS),
    "thinking, with ids": ("/v1/chat/completions", CHAT | THINKS | {"return_token_ids": True}),
    "message": ("/v1/messages", CHAT),
    "response": ("/v1/responses", {"prompt": None, "input": "Hi"}),
    "native": ("/generate", {"prompt": None, "text": "Hi"}),
    "native, new text only": ("/generate", {"prompt": None, "text": "Hi", "incremental": True}),
}


def said(event):
    """The new text of any API's event."""
    if not isinstance(event, dict):
        return ""
    if "meta_info" in event:
        return event["text"]
    if event.get("type") in ("response.output_text.delta", "content_block_delta"):
        delta = event["delta"]
        return delta if isinstance(delta, str) else delta["text"]
    choices = event.get("choices", ())
    deltas = [choice.get("delta", choice) for choice in choices]
    names = ("text", "content", "reasoning_content")
    return "".join(delta.get(name) or "" for delta in deltas for name in names)


def test_whatever_is_asked_for_plain_words_are_written_by_the_pump(default_model):
    async def ask_for(puppet, path, fields):
        reader, _ = await puppet.ask(path, stream=True, **{"max_tokens": 90, **fields})
        req_id = (await puppet.submitted()).req_id
        puppet.put(tokens_record(req_id, [WORLD]))
        entry = await until(lambda: puppet.client.in_flight.get(req_id), "it is in flight")
        await until(lambda: entry.direct is not None, "its first token is written")
        entry.on_tokens = None  # the pump alone
        before = puppet.board["tokens"]
        puppet.put(*(tokens_record(req_id, [WORLD], i) for i in range(1, 7)))
        await until(lambda: puppet.board["tokens"] == before + 6, "they are read")
        assert entry.token_ids == []
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=7))
        status, body = await read_answer(reader)
        lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
        return status, [json.loads(line) for line in lines if line != b"[DONE]"]

    async def scenario(puppet):
        for name, (path, fields) in ASKED.items():
            status, events = await ask_for(puppet, path, fields)
            assert status == 200
            texts = [text for event in events if (text := said(event))]
            if name == "native":
                assert texts == [" world" * count for count in (1, 2, 3, 4, 5, 6, 7, 7)]
                assert events[5]["output_ids"] == [WORLD] * 6
            elif name == "every third":
                assert texts == [" world", " world" * 3, " world" * 3]
            else:
                assert "".join(texts).lstrip() == (" world" * 7).lstrip(), name
                assert len(texts) == 7
            if name == "usage all along":
                counts = [event["usage"]["completion_tokens"] for event in events]
                assert counts == [1, 2, 3, 4, 5, 6, 7, 7, 7]
            if name == "times":
                told = [event["choices"][0]["timing"] for event in events]
                assert [len(each["token_us"]) for each in told[:7]] == [1] * 7
                assert told[7]["num_tokens"] == 7 and told[7]["last_token_us"]["written"] > 0

    run(scenario, default_model, trust_request_chat_template=True)


def test_what_a_model_thinks_is_counted_though_the_pump_wrote_it(default_model):
    """Its mark comes in the ordinary tokens that spell it: those and the words behind it are not the pump's until it is clear what they are."""
    ids = default_model.tokenizer().encode("</think>", add_special_tokens=False).ids

    async def scenario(puppet):
        fields = CHAT | THINKS | {"stream_options": {"include_usage": True}}
        reader, _ = await puppet.ask("/v1/chat/completions", stream=True, max_tokens=90, **fields)
        req_id = (await puppet.submitted()).req_id
        all_ids = [WORLD] * 20 + ids + [DOG] * 20
        for index, token_id in enumerate(all_ids):
            puppet.put(tokens_record(req_id, [token_id], index))
            await until(lambda: puppet.board["tokens"] == index + 1, "it is read")  # noqa: B023
        puppet.put(finish_record(req_id, prompt_tokens=1, completion_tokens=len(all_ids)))
        _, body = await read_answer(reader)
        *events, told, _ = events_of(body)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == (" world" * 20).lstrip()
        assert "".join(d.get("content", "") for d in deltas) == (" dog" * 20).lstrip()
        counted = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted == 20 + len(ids) - 1

    run(scenario, default_model, trust_request_chat_template=True)


def test_streams_whose_pieces_differ_in_special_tokens_only_go_together(default_model):
    try:
        ring = SendRing()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")

    async def scenario(puppet):
        client, pieces = puppet.client, puppet.front.tokenizer.pieces
        client.step_sender = StepSender(ring, client.table, client.times, pieces.direct)
        for fields in ({}, {"skip_special_tokens": False}, {"stop": ["never"]}):
            reader, _ = await puppet.ask(stream=True, max_tokens=9, **fields)
            req_id = (await puppet.submitted()).req_id
            puppet.put(tokens_record(req_id, [WORLD]))
            entry = await until(lambda: client.in_flight.get(req_id), "it is in flight")  # noqa: B023
            await until(lambda: entry.direct is not None, "its first token is written")  # noqa: B023
            assert client.table.rows["fd"][entry.place] >= 0
            puppet.put(finish_record(req_id, completion_tokens=1))
            await reader.readuntil(b"[DONE]")

    run(scenario, default_model)
    ring.close()
