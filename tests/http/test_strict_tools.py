"""Strict tools: a model that may answer with text, and whose calls are held to their schemas once they begin."""

import json
from collections.abc import Callable

import pytest

from shmserve import grammar
from shmserve.http.errors import ApiError
from shmserve.http.tools import tool_use

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = {"type": "function", "function": {"name": "go", "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "say", "parameters": SCHEMA}}
FORMATS = {
    "hermes": ("<tool_call>", '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{{"name": "{}", "arguments": {}}}]'),
    "llama3": ("<|python_tag|>", '{{"name": "{}", "parameters": {}}}'),
}


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return grammar.tokenizer_of(default_model)


@pytest.fixture(params=FORMATS)
def shape(request) -> tuple[str, str]:
    """(template that teaches a format, a call in it)"""
    return FORMATS[request.param]


@pytest.fixture
def takes(tokenizer, shape) -> Callable[..., bool]:
    """takes(text, *special): whether this may be a whole answer to a request with a strict and a free tool."""
    from llguidance import LLMatcher

    def takes(text: str, special=()) -> bool:
        use = tool_use([STRICT, FREE], "auto", None, shape[0], dict(special).get)
        assert use is not None and use.grammar is not None and not use.is_forced
        lark = grammar.from_ebnf(use.grammar[1])
        grammar.check(lark, tokenizer)
        ids = tokenizer.tokenize_str(text)
        for mark, token_id in special:
            before, found, behind = text.partition(mark)
            assert found
            ids = [*tokenizer.tokenize_str(before), token_id, *tokenizer.tokenize_str(behind)]
        matcher = LLMatcher(tokenizer, lark)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return takes


@pytest.mark.parametrize("text", ["", "Hello.", "1 < 2, [3]: x", "So:\n\n  {x}", "Zürich 😀"])
def test_any_text_may_be_the_answer(takes, text):
    assert takes(text)


def test_a_strict_call_is_held_to_its_schema_and_a_free_one_is_not(takes, shape):
    call = shape[1]
    assert takes(call.format("go", '{"city": "Bern"}'))
    assert not takes(call.format("go", '{"city": "Basel"}'))
    assert not takes(call.format("go", "{}"))
    assert takes(call.format("say", '{"city": "Basel", "more": [1]}'))
    assert not takes(call.format("say", '"text"'))
    assert not takes(call.format("run", '{"city": "Bern"}'))


def test_text_may_stand_before_a_call_where_the_format_has_an_opener(takes, shape):
    call = shape[1].format("go", '{"city": "Bern"}')
    assert takes("Let me look. <\n" + call)
    bad = "Let me look.\n" + shape[1].format("go", "{}")
    # Without an opener, what stands behind text is text.
    assert takes(bad) == (shape[0] == "<|python_tag|>")


def test_several_calls_may_come(takes, shape):
    call = shape[1].format("go", '{"city": "Bern"}')
    if shape[0] == "[TOOL_CALLS]":
        both = call[:-1] + ", " + call.removeprefix("[TOOL_CALLS][")
    else:
        both = call + ("\n" if shape[0] == "<tool_call>" else "; ") + call
    assert takes(both)
    assert not takes(both.replace("Bern", "Basel"))


def test_an_opener_that_is_a_special_token_is_met_by_its_id(takes, shape, default_model):
    mark = shape[0]
    special = [(mark, default_model.special_token_ids[-1])]
    call = shape[1].format("go", '{"city": "Bern"}')
    if mark == "<|python_tag|>":
        call = mark + call
    assert takes(call, special)
    assert not takes(call.replace("Bern", "Basel"), special)


def test_strict_under_python_calls_is_refused_by_name():
    with pytest.raises(ApiError, match="strict tools need calls that are JSON"):
        tool_use([STRICT], None, None, "[func_name1(", {}.get)
    assert tool_use([FREE], None, None, "[func_name1(", {}.get).grammar is None
    assert tool_use([STRICT], "required", None, "[func_name1(", {}.get).is_forced


def test_a_server_refuses_a_strict_schema_that_it_cannot_honour(asker):
    bad = {"name": "f", "parameters": {"type": "wrong"}, "strict": True}
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    for tool, status in (
        (bad, 400),
        (bad | {"strict": "yes"}, 400),
        (bad | {"strict": False}, 200),
    ):
        tools = [{"type": "function", "function": tool}]
        for more in ({}, {"stream": True}):
            answer = asker.post("/v1/chat/completions", body | {"tools": tools} | more)
            assert answer.status == status, answer.body
            if status == 400:
                assert answer.error()["param"].startswith("tools")


def test_the_three_apis_take_strict_tools(asker):
    """A bias that forces text is met by a grammar that lets text be."""
    force = {"max_tokens": 2, "temperature": 0, "logit_bias": {"905": 100}}
    function = STRICT["function"]
    question = [{"role": "user", "content": "?"}]
    schema = {"name": "go", "input_schema": SCHEMA, "strict": True}
    bodies = {
        "/v1/chat/completions": {"messages": question, "tools": [STRICT]} | force,
        "/v1/messages": {"messages": question, "tools": [schema]} | force,
        "/v1/responses": {
            "input": "?",
            "tools": [{"type": "function", **function}],
            "max_output_tokens": 2,
        },
    }
    for path, body in bodies.items():
        answer = asker.post(path, body)
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)
