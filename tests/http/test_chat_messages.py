"""Messages as clients send them: with nulls, with roles that a template does not know, with calls of earlier turns; and what a model that
thinks answers where its answer is held to a format."""

import json

import pytest

from shmserve.http.errors import ApiError
from shmserve.http.tools import told_in_words, with_calls_as_objects

USER = {"role": "user", "content": "Hi"}
SHOWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if 'tool_calls' in m %}<call>{% endif %}{% endfor %}"
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}  # fmt: skip


def prompt_of(asker, **fields):
    answer = asker.post("/tokenize", fields)
    assert answer.status == 200, answer.body
    return asker.post("/detokenize", {"tokens": answer.json()["tokens"]}).json()["text"]


def chat(asker, **fields):
    """The choice, the same plain and streamed."""
    body = {"messages": [USER], "max_tokens": 100, "seed": 3} | fields
    answer = asker.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    choice = answer.json()["choices"][0]
    deltas = [c["choices"][0]["delta"] for c in asker.stream("/v1/chat/completions", **body).objects()]  # fmt: skip
    for key in ("content", "reasoning_content"):
        text = "".join(delta.get(key) or "" for delta in deltas)
        assert text == (choice["message"].get(key) or "")
    return choice


@pytest.mark.parametrize("nothing", [None, []])
def test_what_is_null_in_a_message_is_not_there_for_the_template(asker, nothing):
    """As the official client's `message.model_dump()` has it. Llama 3's template asks `'tool_calls' in message`."""
    answer = {"role": "assistant", "content": "Yo", "refusal": None, "audio": None}
    answer |= {"function_call": None, "tool_calls": nothing}
    messages = [USER, answer, USER]
    assert prompt_of(asker, messages=messages, chat_template=SHOWN) == "<user>Hi<assistant>Yo<user>Hi"  # fmt: skip


def test_a_developer_is_the_system_where_the_template_knows_none(asker):
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    as_system = [{"role": "system", "content": "Be brief."}, USER]
    assert prompt_of(asker, messages=messages) == prompt_of(asker, messages=as_system)
    knows = SHOWN + "{# developer #}"
    assert prompt_of(asker, messages=messages, chat_template=knows) == "<developer>Be brief.<user>Hi"  # fmt: skip


def test_reasoning_goes_by_both_of_its_names(asker):
    template = "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}"
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "a", name: "because"}
        assert prompt_of(asker, messages=[message], chat_template=template) == "because"


def test_calls_of_earlier_turns_are_told_in_words_though_no_tools_come_with_the_request():
    call = with_calls_as_objects(1, {"role": "assistant", "content": "", "tool_calls": [CALL]})
    user, said, result = told_in_words([USER, call, {"role": "tool", "content": "7"}], ())
    assert user is USER and '"name": "f"' in said["content"] and "tool_calls" not in said
    assert result == {"role": "user", "content": "<tool_response>\n7\n</tool_response>"}


def test_calls_of_earlier_turns_are_left_to_a_template_that_shows_them(asker):
    """DeepSeek-R1's does, and knows no tools."""
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "7"})
    assert prompt_of(asker, messages=messages, chat_template=SHOWN) == "<user>Hi<assistant><call><tool>7"  # fmt: skip


def test_calls_of_earlier_turns_reach_the_prompt_of_the_last_one(asker):
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "7"})
    text = prompt_of(asker, messages=messages)
    assert '{"name": "f", "arguments": {"a": 1}}' in text and "<tool_response>" in text


def test_arguments_that_nest_too_deeply_are_refused_by_name_D5():
    call = {"function": {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}}
    with pytest.raises(ApiError) as refused:
        with_calls_as_objects(0, {"role": "assistant", "tool_calls": [call]})
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"


def test_half_a_surrogate_pair_in_a_calls_arguments_is_no_failure(asker):
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '{"a": "?"}' in prompt_of(asker, messages=messages)


# -- a format, and a prompt that has opened the reasoning ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        {"regex": r'\{"a":[12]\}'},
    ],
)  # fmt: skip
def test_an_answer_that_is_held_to_a_format_is_content_though_the_prompt_opened_reasoning(asker, fields):  # fmt: skip
    message = chat(asker, chat_template=THINKS, **fields)["message"]
    assert json.loads(message["content"])["a"] in (1, 2)
    assert "reasoning_content" not in message


def test_a_forced_call_is_a_call_though_the_prompt_opened_reasoning(asker):
    fields = {"tools": [TOOL], "tool_choice": "required", "chat_template": THINKS + "{# tools #}"}
    choice = chat(asker, parallel_tool_calls=False, **fields)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_an_answer_that_goes_on_with_reasoning_is_reasoning_to_its_end(asker):
    """As clients do that lengthen what a model thinks. Its text begins where the last message's ended: blanks are its own."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}"
    said = [USER, {"role": "assistant", "content": "<think>\nOkay,"}]
    fields = {"messages": said, "continue_final_message": True, "chat_template": template}
    ended = {"seed": 2_000_006, "max_tokens": 40}
    message = chat(asker, **fields, **ended)["message"]
    assert message["reasoning_content"] == " so be it." and message["content"] == "Yes."
    said[-1] = {"role": "assistant", "content": "<think>\nOkay.</think>"}
    message = chat(asker, **fields, **ended)["message"]
    assert message["content"] == " so be it.</think>\nYes."


def test_a_grammar_that_ends_the_reasoning_itself_is_split_at_its_end(asker):
    message = chat(asker, chat_template=THINKS, regex="[ab]{3}</think>[cd]{2}")["message"]
    assert set(message["reasoning_content"]) <= set("ab") and set(message["content"]) <= set("cd")
