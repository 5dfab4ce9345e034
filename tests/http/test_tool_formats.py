"""Tool calls and reasoning come out of the text the same, however the text is cut; what is no call stays text."""

import ast
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.http.detokenizer import Pieces
from shmserve.http.openai.choice import message_of
from shmserve.http.reasoning import ContentOnly, ReasoningSplitter
from shmserve.http.tool_formats import FORMATS, ToolSplitter, format_of

NAMES = frozenset({"get_weather", "add"})
ARGS = {"city": "Zürich 😀", "days": [1, 2], "deep": {"a": None, "b": 'q"}]</tool_call>'}}


def written(name, calls):
    """The calls as a model of this format writes them."""
    if name == "hermes":
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>"
            for n, a in calls
        )
    if name == "mistral":
        return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])
    if name == "llama3":
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    return "[" + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls) + "]"  # fmt: skip


def cut(text, places):
    ends = sorted({min(p, len(text)) for p in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def run(splitter, pieces):
    deltas = []
    for piece in pieces:
        deltas += splitter.feed(piece)
    return deltas + splitter.finish()


def message(fmt, text, places=(), **options):
    return message_of(run(ToolSplitter(FORMATS[fmt], NAMES, **options), cut(text, places)))


def told(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


cuts = st.lists(st.integers(0, 400), max_size=60)


@pytest.mark.parametrize("fmt", FORMATS)
@given(places=cuts, count=st.integers(1, 3))
def test_calls_are_found_wherever_the_text_is_cut(fmt, places, count):
    calls = [("get_weather", ARGS), ("add", {}), ("add", {"a": 1.5, "b": True})][:count]
    got = message(fmt, written(fmt, calls), places)
    assert told(got) == calls
    assert got["content"] is None
    ids = [call["id"] for call in got["tool_calls"]]
    assert len(set(ids)) == count


@pytest.mark.parametrize("fmt", ["hermes", "mistral"])
@given(places=cuts)
def test_text_before_a_call_is_content_without_the_blanks_next_to_it(fmt, places):
    got = message(fmt, "Let me see.\n\n" + written(fmt, [("add", {"a": 1})]), places)
    assert (got["content"], told(got)) == ("Let me see.", [("add", {"a": 1})])


@pytest.mark.parametrize("fmt", FORMATS)
@given(
    places=cuts,
    text=st.sampled_from(
        [
            "Just an answer.",
            "  two blanks first, and <tool_call",
            "[1, 2, 3]",
            '{"name": "unknown", "parameters": {}}',
            '{"a": 1} is an object',
            "<tool_call>not json</tool_call> and more",
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            "[TOOL_CALLS] nothing",
            "[other(a=1)]",
            "[add(1)]",
            "",
            " ",
        ]
    ),
)
def test_what_is_no_call_is_text_to_the_last_character(fmt, places, text):
    got = message(fmt, text, places)
    assert "tool_calls" not in got
    assert got["content"] == text


@given(places=cuts, text=st.text(alphabet='<tool_ca>/{}[]":, nameT\n', max_size=60))
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_cut_never_changes_the_message(fmt, places, text):
    whole, parts = message(fmt, text), message(fmt, text, places)
    assert whole["content"] == parts["content"]
    assert [c["function"] for c in whole.get("tool_calls", ())] == [
        c["function"] for c in parts.get("tool_calls", ())
    ]


def test_arguments_go_out_before_they_are_complete():
    splitter = ToolSplitter(FORMATS["hermes"], NAMES)
    deltas = splitter.feed('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert [list(delta) for delta in deltas] == [["tool_calls"]]
    (call,) = deltas[0]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1'}
    (more,) = splitter.feed(', "b"')
    assert more["tool_calls"][0] == {"index": 0, "function": {"arguments": ', "b"'}}


def test_call_cut_by_the_length_keeps_what_it_has():
    got = message("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1')
    assert got["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1'}


def test_only_one_call_where_parallel_calls_are_off():
    for fmt in FORMATS:
        calls = [("add", {"a": 1}), ("add", {"a": 2})]
        assert told(message(fmt, written(fmt, calls), only_one=True)) == calls[:1]


def test_mistral_ids_have_nine_characters_and_others_begin_with_call():
    (call,) = message("mistral", written("mistral", [("add", {})]))["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    (call,) = message("hermes", written("hermes", [("add", {})]))["tool_calls"]
    assert call["id"].startswith("call_")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <tool_call> ...", "hermes"),
        ("... <|python_tag|> ...", "llama3"),
        ("... [func_name1(params)] ...", "pythonic"),
        ("plain", "hermes"),
    ],
)
def test_format_is_the_one_that_the_template_teaches(template, name):
    assert format_of(template).name == name


@pytest.mark.parametrize("name", ["hermes", "mistral"])
@pytest.mark.parametrize(
    "behind", ["so 1 <", "so [", "a\n<tool_c", "a [TOOL_", "a <tool_call>", "a \n"]
)
@given(places=cuts)
def test_text_behind_a_call_is_text_to_the_last_character(name, behind, places):
    got = message_of(
        run(
            ToolSplitter(FORMATS[name], NAMES),
            cut(written(name, [("add", {"a": 1})]) + behind, places),
        )
    )
    assert told(got) == [("add", {"a": 1})] and got["content"] == behind.rstrip()


@given(places=cuts)
@pytest.mark.parametrize("value", ["b'x'", "{1}", "...", "1e999", "1j", "{(1, 2): 3}"])
def test_a_python_value_that_json_has_not_makes_no_call_and_no_failure(places, value):
    text = f"[add(a={value})]"
    got = message("pythonic", text, places)
    assert "tool_calls" not in got and got["content"] == text


def test_half_a_surrogate_pair_is_no_failure():
    """Python's own spelling of an emoji as JSON does it is two halves; half of one in JSON is no text."""
    got = message("pythonic", r"[add(a='\ud83d\ude00')]")
    assert told(got) == [("add", {"a": "\N{GRINNING FACE}"})]
    got = message("hermes", r'<tool_call>{"name": "add", "arguments": "\ud83d"}</tool_call>')
    assert got["tool_calls"][0]["function"]["arguments"] == "?"


def test_a_list_that_is_no_list_of_calls_is_parsed_once_however_many_brackets_it_has(monkeypatch):
    """At every bracket anew it stopped the event loop for minutes."""
    parsed = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *a, **k: parsed.append(a) or real(*a, **k))
    text = "[" + "[1, ']'], " * 300
    got = message("pythonic", text, range(len(text)))
    assert got["content"] == text and len(parsed) == 1
    got = message("pythonic", text + "]. So much", range(2 * len(text)))
    assert got["content"] == text + "]. So much" and len(parsed) == 2


# -- reasoning ------------------------------------------------------------------------------------------------------------


def reason(text, places=(), **options):
    options = {"is_inside": False} | options
    return message_of(run(ReasoningSplitter(ContentOnly(), **options), cut(text, places)))


@given(places=cuts, streaming=st.booleans())
def test_reasoning_and_answer_are_told_apart_wherever_the_text_is_cut(places, streaming):
    text = "<think>\nFirst, 1 < 2 </thin.\n</think>\n\nThe answer."
    got = reason(text, places, is_streaming=streaming)
    assert got["reasoning_content"] == "First, 1 < 2 </thin."
    assert got["content"] == "The answer."


@given(places=cuts)
def test_reasoning_that_the_prompt_opened_needs_no_opener(places):
    got = reason("Hm.\n</think>\nYes.", places, is_inside=True)
    assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")


@given(places=cuts)
def test_answer_without_reasoning_is_content_as_it_stands(places):
    for text in ("  plain <think> later", "<thinking> is another word", "", "<thi"):
        got = reason(text, places)
        assert "reasoning_content" not in got and got["content"] == text


def test_reasoning_that_never_ends_is_reasoning():
    got = reason("<think>on and on", [9])
    assert (got["reasoning_content"], got["content"]) == ("on and on", "")


@given(places=cuts)
def test_calls_behind_the_reasoning_are_found(places):
    splitter = ReasoningSplitter(ToolSplitter(FORMATS["hermes"], NAMES), is_inside=False)
    text = "<think>use add</think>\n" + written("hermes", [("add", {"a": 1})])
    got = message_of(run(splitter, cut(text, places)))
    assert got["reasoning_content"] == "use add" and told(got) == [("add", {"a": 1})]


# -- what passes ----------------------------------------------------------------------------------------------------------

SPLITTERS = {
    "thinking": lambda: ReasoningSplitter(ContentOnly(), is_inside=True),
    "may think": lambda: ReasoningSplitter(ContentOnly(), is_inside=False),
    "thinks in secret": lambda: ReasoningSplitter(ContentOnly(), is_inside=True, is_shown=False),
    "thinking, with tools": lambda: ReasoningSplitter(
        ToolSplitter(FORMATS["hermes"], NAMES), is_inside=True
    ),
    **{name: lambda fmt=fmt: ToolSplitter(fmt, NAMES) for name, fmt in FORMATS.items()},
}
PARTS = ["a", " word", " ", "x ", "\n\n", "\u00a0", "<", "</", "think", ">", "<think>", "</think>"]
PARTS += ["tool_call>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "{", "}", "[add(a=1)]"]
PARTS += [
    "<|python_tag|>",
    '{"name": "add", "arguments": {"a": 1}}',
    "a</think>b",
    "b\n<tool_call>",
]


@pytest.mark.parametrize("name", SPLITTERS)
@given(texts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=12))
def test_what_a_splitter_lets_pass_is_what_it_would_have_made_of_it(name, texts):
    splitter = SPLITTERS[name]()
    for text in texts:
        passing, was_reasoning = splitter.passing, splitter.is_reasoning
        deltas = splitter.feed(text)
        if passing is not None and Pieces([text.encode()], frozenset()).clear_of(passing.marks)[0]:
            assert deltas == [{passing.key: text}]
            assert (splitter.passing, splitter.is_reasoning) == (passing, was_reasoning)
