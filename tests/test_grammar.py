"""Every way to ask for a form becomes a grammar that the model's vocabulary can follow, or an error that says why not."""

import json

import pytest

from shmserve import grammar as g


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return g.tokenizer_of(default_model)


def accepts(tokenizer, grammar, text):
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("make", "value", "good", "bad"),
    [
        (g.from_json_schema, {"type": "integer"}, "17", "1.5"),
        (g.from_json_schema, '{"type": "boolean"}', "true", "yes"),
        (g.from_json_schema, True, '{"a": [1, null]}', "{"),
        (g.from_json_schema, {"enum": ["é", "b"]}, '"é"', '"c"'),
        (g.from_regex, r"\d{3}-\d+", "123-4", "12-4"),
        (g.from_choice, ["yes", 'n"o\n'], 'n"o\n', "no"),
        (g.from_ebnf, 'root ::= "a" [0-9]+ | "b" root', "bba12", "b"),
        (g.from_ebnf, 'start: "x" /a+/', "xaa", "x"),
        (
            g.from_structural_tag,
            {
                "triggers": ["<f="],
                "structures": [{"begin": "<f=go>", "schema": {"type": "object"}, "end": "</f>"}],
            },
            'well <f=go>{"a": 1}</f>',
            "well <f=go>1</f>",
        ),
    ],
)
def test_a_form_accepts_what_it_describes_and_nothing_else(tokenizer, make, value, good, bad):
    grammar = make(value)
    g.check(grammar, tokenizer)
    assert accepts(tokenizer, grammar, good)
    assert not accepts(tokenizer, grammar, bad)


def test_json_object_takes_objects_only(tokenizer):
    grammar = g.from_json_object()
    assert accepts(tokenizer, grammar, '{"a": {"b": [1.5, "x"]}}')
    assert not accepts(tokenizer, grammar, "[1]")


def test_blanks_between_the_tokens_of_json_are_bounded(tokenizer):
    grammar = g.from_json_object()
    assert accepts(tokenizer, grammar, '{"a":' + " " * 16 + "1}")
    assert not accepts(tokenizer, grammar, '{"a":' + " " * 40 + "1}")


@pytest.mark.parametrize(
    ("make", "value", "word"),
    [
        (g.from_json_schema, {"type": "strin"}, "strin"),
        (g.from_json_schema, {"unevaluatedProperties": False}, "unevaluatedProperties"),
        (g.from_json_schema, {"$ref": "#/x"}, "/x"),
        (g.from_json_schema, {"type": "string", "pattern": "(?=a)b"}, "look"),
        (g.from_json_schema, {"type": "string", "format": "weird"}, "weird"),
        (g.from_json_schema, '{"a', "not valid JSON"),
        (g.from_json_schema, [1], "object"),
        (g.from_regex, "(a", "unclosed"),
        (g.from_regex, 5, "string"),
        (g.from_ebnf, 0, "string"),
        (g.from_choice, "ab", "list"),
        (g.from_choice, 7, "list"),
        (g.from_ebnf, 'root ::= "a', "end of input"),
        (g.from_ebnf, 'strt "x"', "Expected"),
        (g.from_choice, [], "1 to"),
        (g.from_choice, ["a", ""], "empty"),
        (g.from_choice, [1], "strings"),
        (g.from_structural_tag, {"structures": []}, "structures"),
        (g.from_structural_tag, {"structures": [{}], "triggers": ["<"]}, "begin"),
        (
            g.from_structural_tag,
            {"structures": [{"begin": "[x", "schema": {}}], "triggers": ["<"]},
            "trigger",
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_says_why(tokenizer, make, value, word):
    with pytest.raises(g.GrammarError, match=word):
        g.check(make(value), tokenizer)


def test_annotations_of_a_schema_are_no_fault(tokenizer):
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "t",
        "description": "d",
        "type": "object",
        "properties": {"a": {"type": "string", "default": "x", "examples": ["y"]}},
    }
    g.check(g.from_json_schema(schema), tokenizer)


def test_thousands_of_choices_are_followed_to_the_end(tokenizer):
    choices = [f"choice {number} of many" for number in range(6_000)]
    grammar = g.from_choice([*choices, "choice 5"])
    g.check(grammar, tokenizer)
    for choice in (choices[0], choices[-1], "choice 5"):
        assert accepts(tokenizer, grammar, choice)
    assert not accepts(tokenizer, grammar, "choice 6000 of many")
    assert not accepts(tokenizer, grammar, "choice 59")


def test_a_grammar_beyond_the_limit_is_refused_with_both_numbers(tokenizer):
    choices = ["x" * 1000 + str(i) for i in range(300)]
    with pytest.raises(g.GrammarError, match=rf"{g.MOST_GRAMMAR_BYTES}"):
        g.check(g.from_choice(choices), tokenizer)


def test_a_schema_nested_without_end_is_an_error_not_a_crash(tokenizer):
    schema: dict = {}
    for _ in range(5_000):
        schema = {"items": schema}
    with pytest.raises(g.GrammarError):
        g.check(g.from_json_schema(schema), tokenizer)


def test_text_of_a_grammar_crosses_the_ring_unchanged():
    import numpy as np

    from shmserve.request import SamplingParams
    from shmserve.wire.submit import Submit, pack_submit, unpack_submit
    from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES

    text = json.dumps({"é": "x" * 9_000})
    sent = Submit(1, np.array([1], np.int32), SamplingParams(max_tokens=1, grammar=text))
    data, count = pack_submit(sent)
    slots = [data[i * SUBMIT_SLOT_BYTES : (i + 1) * SUBMIT_SLOT_BYTES] for i in range(count)]
    assert unpack_submit(slots).params.grammar == text
