"""An object read character by character gives its name early and its arguments raw, whatever stands in them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from shmserve.http.json_scan import ObjectScanner

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=12,
)


def scan(text):
    scanner = ObjectScanner(("arguments", "parameters"))
    pieces = []
    for i, char in enumerate(text):
        scanner.feed(char)
        pieces.append(scanner.take())
        if scanner.is_done:
            assert i == len(text) - 1
    return scanner, "".join(pieces)


@given(st.text(), st.dictionaries(st.text(), values), st.sampled_from(["arguments", "parameters"]))
def test_name_and_arguments_of_any_call_are_found(name, arguments, key):
    for indent in (None, 1):
        call = {"id": [1, {"name": "x"}], "name": name, key: arguments, "more": {"arguments": 1}}
        scanner, raw = scan(json.dumps(call, indent=indent))
        assert scanner.is_done and not scanner.is_broken
        assert scanner.name == name
        assert json.loads(raw) == arguments


@given(st.dictionaries(st.text(), values))
def test_arguments_before_the_name_are_found_too(arguments):
    scanner, raw = scan(json.dumps({"arguments": arguments, "name": "f"}))
    assert scanner.name == "f" and json.loads(raw) == arguments


def test_arguments_come_as_they_are_written():
    scanner = ObjectScanner(("arguments",))
    got = []
    for char in '{"name": "f", "arguments": {"a": [1,  2]}}':
        scanner.feed(char)
        if piece := scanner.take():
            got.append(piece)
    assert "".join(got) == '{"a": [1,  2]}' and len(got) > 5


def test_arguments_written_as_a_string_are_decoded():
    scanner, raw = scan(json.dumps({"name": "f", "arguments": '{"a": "b"}'}))
    assert raw == '{"a": "b"}' and scanner.has_arguments


def test_object_without_arguments_says_so():
    scanner, raw = scan('{"name": "f"}')
    assert (scanner.name, raw, scanner.has_arguments) == ("f", "", False)


def test_what_is_no_json_is_told():
    for text in ('{name: "f"}', '{"name" "f"}', '{"name": f}', "[1]"):
        scanner, _ = scan(text)
        assert scanner.is_broken, text


@given(st.text(alphabet='{}[]":,\\ an1', max_size=40))
def test_no_text_makes_it_raise(text):
    scanner = ObjectScanner(("arguments",))
    scanner.feed("{")
    for char in text:
        if scanner.is_done:
            break
        scanner.feed(char)
        scanner.take()
