"""The Responses API: items and events of the same completions as chat; the official client reads both."""

import json

import openai
import pytest

from shmserve.http.openai.responses import ResponsesRequest, chat_request

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLING = 2_000_005  # the seed of a call behind a word


def client_of(server):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
    )


def plain(asker, **fields):
    answer = asker.post("/v1/responses", {"input": "Hi"} | fields)
    assert answer.status == 200, answer.body
    return answer.json()


def streamed(asker, **fields):
    """The response of the last event; the order of the events and what the deltas add up to are checked on the way."""
    stream = asker.stream("/v1/responses", **({"input": "Hi"} | fields))
    events = [json.loads(data) for data in stream.events()]
    names = [line[7:] for line in stream.raw.decode().split("\n") if line.startswith("event: ")]
    stream.leave()
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[:2] == ["response.created", "response.in_progress"]
    texts = {}
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind == "response.output_item.done":
            item = event["item"]
            whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]  # fmt: skip
            assert texts.get(item["id"], "") == whole
    return events[-1]["response"]


def same(a, b):
    def bare(response):
        items = [
            {k: v for k, v in item.items() if k not in ("id", "call_id")}
            for item in response["output"]
        ]
        keys = ("status", "incomplete_details", "model", "object", "store")
        return items, {key: response[key] for key in keys}, response["usage"]["output_tokens"]

    assert bare(a) == bare(b)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"seed": "dog_then_eos"}, "completed"),
        ({"seed": "one_two_three_four", "max_output_tokens": 2}, "incomplete"),
        ({"seed": "emoji", "max_output_tokens": 9}, "completed"),
        ({"seed": "one_two_three_four", "stop": ["wo th"]}, "completed"),
    ],
)
def test_stream_adds_up_to_the_plain_response(asker, seed_of, fields, status):
    fields = fields | {"seed": seed_of(fields["seed"])}
    told = plain(asker, **fields)
    assert told["status"] == status
    assert (told["incomplete_details"] is None) == (status == "completed")
    same(told, streamed(asker, **fields))


def test_usage_and_shape(asker, seed_of):
    told = plain(asker, seed=seed_of("dog_then_eos"), metadata={"a": "b"}, store=True)
    assert told["id"].startswith("resp_") and told["object"] == "response"
    (item,) = told["output"]
    assert item["content"] == [{"type": "output_text", "text": " dog", "annotations": []}]
    usage = told["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (31, 2, 33)
    assert (told["metadata"], told["store"]) == ({"a": "b"}, False)


def test_function_call_is_an_item_of_its_own(asker):
    fields = {"tools": [TOOL], "seed": CALLING, "max_output_tokens": 200}
    told = plain(asker, **fields)
    message, call = told["output"]
    assert message["content"][0]["text"] == "Look."
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert json.loads(call["arguments"]) == {"city": "Zürich"} and call["call_id"]
    same(told, streamed(asker, **fields))


def test_conversation_with_calls_reaches_the_prompt(asker):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    told = plain(asker, input=items, tools=[TOOL], max_output_tokens=2, ignore_eos=True)
    assert told["usage"]["input_tokens"] > 80


def test_text_and_calls_of_one_turn_are_one_message():
    """As chat completions tell them: templates want user and assistant to take turns."""
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    _, said, result, again = chat_request(ResponsesRequest(input=items)).messages
    assert said["content"] == "Look." and [c["id"] for c in said["tool_calls"]] == ["a", "b"]
    assert result["role"] == "tool" and [c["id"] for c in again["tool_calls"]] == ["c"]


def test_what_was_thought_stands_in_the_message_that_it_led_to():
    def thought(text):
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}  # fmt: skip

    items = [
        {"role": "user", "content": "Weather?"},
        thought("Look it up."),
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        thought("Easy."),
        {"role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "So?"},
    ]
    _, call, _, said, last = chat_request(ResponsesRequest(input=items)).messages
    assert call["reasoning_content"] == "Look it up." and call["tool_calls"][0]["id"] == "a"
    assert (said["reasoning_content"], said["content"]) == ("Easy.", "One.")
    assert last["role"] == "user"


def test_schema_holds(asker):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    told = plain(asker, text=form, seed=3)
    assert json.loads(told["output"][0]["content"][0]["text"])["a"] in (1, 2)


def test_official_client_reads_response_stream_and_helper(asker, seed_of):
    with client_of(asker) as client:
        extra = {"seed": seed_of("one_two_three_four")}
        response = client.responses.create(
            model=asker.get("/v1/models").json()["data"][0]["id"],
            input="Hi",
            max_output_tokens=4,
            extra_body=extra,
        )
        assert response.output_text == "one two three four"
        with client.responses.stream(
            model=response.model, input="Hi", max_output_tokens=9, extra_body=extra
        ) as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            final = stream.get_final_response() if text else None
    assert text == "one two three four"
    assert final is not None and final.output_text == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(asker, fields, param):
    for stream in (False, True):
        answer = asker.post("/v1/responses", {"input": "Hi"} | fields | {"stream": stream})
        assert answer.status == 400
        assert answer.error()["param"] == param
