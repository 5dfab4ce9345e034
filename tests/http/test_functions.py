"""OpenAI's old form of tools: asked in it, answered in it, over HTTP."""

import pytest

from shmserve.http.openai.choice import message_of
from shmserve.http.openai.functions import with_tool_calls

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
QUESTION = {"messages": [{"role": "user", "content": "Weather?"}], "functions": [WEATHER]}


def asked(asker, **fields):
    """(message, finish reason), the same plain and streamed."""
    answer = asker.post("/v1/chat/completions", QUESTION | fields)
    assert answer.status == 200, answer.body
    choice = answer.json()["choices"][0]
    chunks = asker.stream("/v1/chat/completions", **(QUESTION | fields)).objects()
    choices = [chunk["choices"][0] for chunk in chunks]
    assert message_of(each["delta"] for each in choices) == choice["message"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("script", ["weather_call", "two_weather_calls"])
def test_a_call_is_told_in_the_old_form_and_only_one(asker, seed_of, script):
    message, reason = asked(asker, seed=seed_of(script))
    call = {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
    assert message == {"role": "assistant", "content": None, "function_call": call}
    assert reason == "function_call"


def test_text_is_text_and_none_means_no_call(asker, seed_of):
    message, reason = asked(asker, seed=seed_of("dog_then_eos"))
    assert (message["content"], reason) == (" dog", "stop")
    message, reason = asked(asker, seed=seed_of("weather_call"), function_call="none")
    assert (message["content"], reason) == (CALL, "stop")


def test_the_prompt_is_that_of_the_same_tools(asker):
    told = {"tools": [{"type": "function", "function": WEATHER}], "functions": None}
    counts = set()
    for more in ({}, told, {"function_call": "auto"}):
        answer = asker.post("/v1/chat/completions", QUESTION | {"max_tokens": 1} | more)
        counts.add(answer.json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


def test_a_named_function_is_called(asker):
    fields = {"function_call": {"name": "get_weather"}, "max_tokens": 60}
    answer = asker.post("/v1/chat/completions", QUESTION | fields).json()
    message = answer["choices"][0]["message"]
    assert message["function_call"]["name"] == "get_weather"


def test_calls_and_results_in_messages_become_those_of_tools():
    call = {"name": "f", "arguments": "{}"}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "4"},
    ]
    mapped = with_tool_calls(messages)
    assert messages[1]["function_call"] == call, "the request's own messages are left alone"
    made = mapped[1]["tool_calls"][0]
    assert made["function"] == call and len(made["id"]) == 9
    assert mapped[2]["role"] == "tool" and mapped[2]["tool_call_id"] == made["id"]
    assert mapped[0] is messages[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions[0]"),
        ({"functions": ["f"]}, "functions[0]"),
        ({"functions": [{"name": "a b"}]}, "tools[0].function.name"),
        ({"functions": "f"}, "functions"),
        ({"function_call": {"name": "other"}}, "function_call"),
        ({"function_call": "sometimes"}, "function_call"),
        ({"functions": [], "function_call": {"name": "f"}}, "function_call"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "functions"),
    ],
)
def test_what_is_no_function_is_refused_by_name(asker, fields, param):
    for more in ({}, {"stream": True}):
        answer = asker.post("/v1/chat/completions", QUESTION | fields | more)
        assert answer.status == 400, answer.body
        assert answer.error()["param"] == param
