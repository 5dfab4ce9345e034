"""Anthropic's Messages API: the same completions as chat, streamed and plain, in its own words."""

import contextlib
import json

import msgspec
import pytest

from shmserve.http.anthropic.formats import _object
from shmserve.http.anthropic.schemas import CountRequest, Message, chat_request

BODY = {"model": None, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {
    "name": "get_weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLING = 2_000_005  # the seed of a call behind a word


def plain(asker, **fields):
    answer = asker.post("/v1/messages", BODY | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def streamed(asker, **fields):
    """The message that the events of a stream add up to; their order is checked on the way."""
    stream = asker.stream("/v1/messages", **(BODY | fields))
    events = [json.loads(data) for data in stream.events()]
    names = [line[7:] for line in stream.raw.decode().split("\n") if line.startswith("event: ")]
    stream.leave()
    assert names == [event["type"] for event in events]
    assert names[0] == "message_start" and names[-1] == "message_stop"
    message, is_open = events[0]["message"], None
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert is_open is None and event["index"] == len(message["content"])
            is_open = event["index"]
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == is_open
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta"
                arguments += delta["partial_json"]
                with contextlib.suppress(ValueError):  # not whole yet
                    block["input"] = json.loads(arguments)
        elif event["type"] == "content_block_stop":
            assert event["index"] == is_open
            is_open = None
        else:
            assert event["type"] == "message_delta" and is_open is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def same(a, b):
    drop = ("id",)
    strip = (
        [{k: v for k, v in block.items() if k != "id"} for block in a["content"]],
        [{k: v for k, v in block.items() if k != "id"} for block in b["content"]],
    )
    assert strip[0] == strip[1]
    for key in a.keys() - {"content", "usage", *drop}:
        assert a[key] == b[key], key
    assert a["usage"]["output_tokens"] == b["usage"]["output_tokens"]


def test_message_has_anthropics_shape(asker, seed_of):
    told = plain(asker, seed=seed_of("dog_then_eos"))
    assert told["id"].startswith("msg_") and told["type"] == "message"
    assert told["role"] == "assistant"
    assert told["content"] == [{"type": "text", "text": " dog"}]
    assert (told["stop_reason"], told["stop_sequence"]) == ("end_turn", None)
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 31
    assert usage["output_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"seed": "dog_then_eos"}, "end_turn", None),
        ({"seed": "one_two_three_four", "max_tokens": 2}, "max_tokens", None),
        ({"seed": "one_two_three_four", "stop_sequences": ["wo th"]}, "stop_sequence", "wo th"),
        ({"seed": "emoji"}, "max_tokens", None),
    ],
)
def test_stream_adds_up_to_the_plain_message(asker, seed_of, fields, reason, sequence):
    fields = fields | {"seed": seed_of(fields["seed"])}
    told = plain(asker, **fields)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    same(told, streamed(asker, **fields))


def test_first_token_that_ends_is_an_empty_text(asker, force):
    told = plain(asker, logit_bias=force(2)["logit_bias"], temperature=0)
    assert told["content"] == [{"type": "text", "text": ""}]
    same(told, streamed(asker, logit_bias=force(2)["logit_bias"], temperature=0))


def test_tool_call_is_a_block_of_its_own(asker):
    told = plain(asker, tools=[TOOL], seed=CALLING, max_tokens=200)
    text, call = told["content"]
    assert text == {"type": "text", "text": "Look."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "Zürich"},
    )
    assert told["stop_reason"] == "tool_use"
    same(told, streamed(asker, tools=[TOOL], seed=CALLING, max_tokens=200))


def test_a_call_that_the_length_cuts_is_told_as_cut(asker):
    """A client that runs it would run half of its arguments."""
    fields = {"tools": [TOOL], "seed": CALLING, "max_tokens": 22}
    told = plain(asker, **fields)
    assert told["content"][-1]["type"] == "tool_use"
    assert "_incomplete" in told["content"][-1]["input"]
    assert told["stop_reason"] == streamed(asker, **fields)["stop_reason"] == "max_tokens"


def test_output_format_holds(asker):
    """What `client.messages.parse(output_format=...)` sends."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    told = plain(asker, output_config=config, seed=3, max_tokens=60)
    assert json.loads(told["content"][0]["text"])["a"] in (1, 2)
    answer = asker.post("/v1/messages", BODY | {"output_config": {"format": {"type": "xml"}}})
    assert answer.status == 400 and "output_config.format" in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud83d"}', '{"a": NaN}', "[" * 5000, '{"a": 1'])
def test_arguments_that_are_no_json_are_given_as_text(arguments):
    told = _object(arguments)
    assert told == {"_incomplete": arguments} and msgspec.json.encode(told)


def test_blocks_system_and_tool_results_reach_the_prompt(asker):
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "B"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [TOOL],
    }
    counted = asker.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    told = plain(asker, **body, ignore_eos=True)
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted > 60


def test_what_was_thought_before_a_call_reaches_the_template():
    """Templates of models that think between calls show it until the user speaks again."""
    blocks = [
        {"type": "thinking", "thinking": "Look it up.", "signature": ""},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
    ]
    parsed = CountRequest(messages=[Message("user", "?"), Message("assistant", blocks)])
    said = chat_request(parsed).messages[1]
    assert said["reasoning_content"] == "Look it up." and said["tool_calls"][0]["id"] == "t1"


def test_last_message_of_the_assistant_is_continued(asker):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Sure, "}]
    both = asker.post("/v1/messages/count_tokens", {"messages": messages}).json()
    one = asker.post("/v1/messages/count_tokens", {"messages": messages[:1]}).json()
    assert both["input_tokens"] == one["input_tokens"] + 3  # "Sure", ",", " "


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_bad_input_is_an_error_in_anthropics_shape(asker, fields, word):
    for stream in (False, True):
        answer = asker.post("/v1/messages", BODY | fields | {"stream": stream})
        assert answer.status == 400
        told = answer.json()
        assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
        assert word in told["error"]["message"]


def test_unknown_model_is_not_found(asker):
    answer = asker.post("/v1/messages", BODY | {"model": "other"})
    assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found_error")
