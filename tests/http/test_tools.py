"""Tool calls over HTTP: told to the model, found in its answer, the same streamed and plain."""

import json

import pytest

from shmserve.http.errors import ApiError
from shmserve.http.openai.choice import message_of
from shmserve.http.tools import told_in_words, tool_use, with_calls_as_objects

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL, TWO_CALLS, TEXT, OTHER_CALL = range(2_000_001, 2_000_005)  # seeds of `texts`
QUESTION = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]}


def plain(asker, **fields):
    answer = asker.post("/v1/chat/completions", QUESTION | fields)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]


def streamed(asker, **fields):
    chunks = asker.stream("/v1/chat/completions", **(QUESTION | fields)).objects()
    choices = [chunk["choices"][0] for chunk in chunks]
    return message_of(choice["delta"] for choice in choices), choices


def calls_of(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


@pytest.mark.parametrize("seed", [CALL, TWO_CALLS, TEXT, OTHER_CALL])
def test_stream_adds_up_to_the_plain_answer(asker, seed):
    choice = plain(asker, seed=seed)
    message, choices = streamed(asker, seed=seed)
    assert message["content"] == choice["message"]["content"]
    assert calls_of(message) == calls_of(choice["message"])
    ends = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    assert ends == [choice["finish_reason"]]


def test_call_is_told_with_its_arguments_and_the_finish_says_so(asker):
    choice = plain(asker, seed=CALL)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert calls_of(choice["message"]) == [("get_weather", {"city": "Zürich 😀"})]


def test_parallel_calls_are_all_told_unless_they_are_off(asker):
    assert len(calls_of(plain(asker, seed=TWO_CALLS)["message"])) == 2
    assert len(calls_of(plain(asker, seed=TWO_CALLS, parallel_tool_calls=False)["message"])) == 1


def test_text_and_calls_of_unknown_functions_are_content(asker, texts):
    choice = plain(asker, seed=TEXT)
    assert (choice["message"]["content"], choice["finish_reason"]) == (texts[TEXT], "stop")
    assert plain(asker, seed=OTHER_CALL)["message"]["content"] == texts[OTHER_CALL]


def test_without_tools_or_with_choice_none_a_call_is_text(asker, texts):
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        assert plain(asker, seed=CALL, **fields)["message"]["content"] == texts[CALL]


def test_arguments_are_streamed_in_pieces(asker):
    _, choices = streamed(asker, seed=CALL)
    pieces = [c["delta"] for c in choices if c["delta"].get("tool_calls")]
    assert len(pieces) > 3
    assert pieces[0]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ""}


def test_logprobs_of_every_token_are_there_though_the_text_is_split(asker):
    choice = plain(asker, seed=CALL, logprobs=True)
    _, choices = streamed(asker, seed=CALL, logprobs=True)
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert entries == choice["logprobs"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [WEATHER] * 129}, "tools"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(asker, fields, param):
    answer = asker.post("/v1/chat/completions", QUESTION | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


def test_schema_of_a_forced_call_that_cannot_be_honoured_is_refused_before_the_answer(asker):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}
    for stream in (False, True):
        answer = asker.post(
            "/v1/chat/completions",
            QUESTION | {"tools": [tool], "tool_choice": "required", "stream": stream},
        )
        assert answer.status == 400 and "wrong" in answer.error()["message"]


def test_a_conversation_with_calls_and_results_is_taken(asker, texts):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "B"}'},
    }
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert plain(asker, seed=TEXT, messages=messages)["message"]["content"] == texts[TEXT]


def test_a_template_that_knows_no_tools_is_told_in_words():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        with_calls_as_objects(2, {"role": "assistant", "content": "", "tool_calls": [call]}),
        {"role": "tool", "content": "7"},
    ]
    system, user, assistant, result = told_in_words(messages, [WEATHER])
    assert system["content"].startswith("Be brief.\n\n")
    assert "get_weather" in system["content"] and "<tool_call>" in system["content"]
    assert user == messages[1]
    assert json.loads(assistant["content"].split("\n")[1]) == {"name": "f", "arguments": {"a": 1}}
    assert result == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}
    (first, *_) = told_in_words([{"role": "user", "content": "x"}], [WEATHER])
    assert first["role"] == "system"


@pytest.mark.parametrize(
    ("template", "special", "good"),
    [
        ("<tool_call>", {}, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>'),
        ("<|python_tag|>", {}, '{"name": "get_weather", "parameters": {"city": "x"}}'),
        ("[func_name1(", {}, '{"name": "get_weather", "parameters": {"city": "x"}}'),
        ("[TOOL_CALLS]", {}, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "x"}}]'),
    ],
)  # fmt: skip
def test_forced_grammar_takes_the_formats_own_call_only(default_model, template, special, good):
    from llguidance import LLMatcher

    from shmserve import grammar

    use = tool_use([WEATHER], "required", None, template, special.get)
    tokenizer = grammar.tokenizer_of(default_model)
    text = grammar.from_ebnf(use.grammar[1])
    grammar.check(text, tokenizer)
    matcher = LLMatcher(tokenizer, text)
    ids = tokenizer.tokenize_str(good)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    assert LLMatcher(tokenizer, text).try_consume_tokens(tokenizer.tokenize_str("Hello")) == 0


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}])
def test_a_forced_calls_arguments_are_an_object_though_the_schema_does_not_say_so(
    default_model, parameters
):
    from llguidance import LLMatcher

    from shmserve import grammar

    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    use = tool_use([tool], "required", None, "<tool_call>", {}.get)
    tokenizer = grammar.tokenizer_of(default_model)
    text = grammar.from_lark(use.grammar[1])
    for arguments, is_taken in (('{"a": 1}', True), ("{}", True), ("5", False), ('"x"', False)):
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        ids = tokenizer.tokenize_str(call)
        assert (LLMatcher(tokenizer, text).try_consume_tokens(ids) == len(ids)) == is_taken


def test_a_forced_schema_may_speak_of_grammars(asker):
    """A "::=" in a description made the call's own grammar one of another kind."""
    function = WEATHER["function"] | {"description": "x"}
    properties = {"city": {"type": "string", "description": "expr ::= term"}}
    function["parameters"] = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": function}
    choice = plain(asker, tools=[tool], tool_choice="required", max_tokens=100, seed=1)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_special_token_that_opens_calls_is_named_by_its_id():
    use = tool_use([WEATHER], "required", False, "[TOOL_CALLS]", {"[TOOL_CALLS]": 5}.get)
    assert use.grammar[1].startswith('start: <[5]> "[" call "]"')


def test_more_tools_than_the_limit_name_both_numbers():
    with pytest.raises(ApiError, match="128, got 129"):
        tool_use([WEATHER] * 129, None, None, "", {}.get)
