"""Structured output over HTTP: what is asked for is what comes, in every way to ask; what cannot be honoured is refused first."""

import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def text_of(asker, path, **fields):
    """The text, asked for plain and streamed, which must be the same."""
    fields = {"seed": 5, "max_tokens": 300} | fields
    if path == "/generate":
        params = {"max_new_tokens": fields.pop("max_tokens"), **fields}
        body = {"text": "Hi", "sampling_params": params}
        answer = asker.post(path, body)
        assert answer.status == 200, answer.body
        told = answer.json()
        *_, last = asker.stream(path, **body).objects()
        assert last["text"] == told["text"]
        return told["text"], told["meta_info"]["finish_reason"]["type"]
    body = (CHAT if "chat" in path else {"prompt": "Hi"}) | fields
    answer = asker.post(path, body)
    assert answer.status == 200, answer.body
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    chunks = [chunk["choices"][0] for chunk in asker.stream(path, **body).objects()]
    parts = [c["delta"].get("content", "") if "chat" in path else c["text"] for c in chunks]
    assert "".join(parts) == text
    return text, choice["finish_reason"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    "fields", [{"json_schema": json.dumps(SCHEMA)}, {"regex": r"\d{3}-[a-c]{2}"}, {"ebnf": 'root ::= "x" [0-9] "y"'}]
)  # fmt: skip
def test_sglangs_fields_hold_in_every_endpoint(asker, path, fields):
    text, finish = text_of(asker, path, **fields)
    assert finish == "stop"
    if "json_schema" in fields:
        value = json.loads(text)
        assert value["name"] in ("Ann", "Bob") and isinstance(value["age"], int)
    elif "regex" in fields:
        assert len(text) == 6 and text[:3].isdigit() and text[3] == "-"
    else:
        assert text[0] == "x" and text[2:] == "y"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},  # llama.cpp's
    ],
)  # fmt: skip
def test_every_way_to_give_a_schema_means_the_same(asker, fields):
    text, finish = text_of(asker, "/v1/chat/completions", **fields)
    assert set(json.loads(text)) == {"name", "age"} and finish == "stop"


@pytest.mark.parametrize("seed", range(5))
def test_choice_gives_one_of_them(asker, seed):
    for fields in (
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        assert text_of(asker, "/v1/completions", **fields, seed=seed)[0] in ("yes", "no")


def test_many_at_once_each_follow_their_own(asker):
    answer = asker.complete(prompt=["a"] * 12, regex=r"[a-z]{8}", max_tokens=50, n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(texts) == 24 and all(len(t) == 8 and t.isalpha() for t in texts)
    assert len(set(texts)) > 12


def test_length_cuts_what_does_not_end(asker):
    text, finish = text_of(asker, "/v1/completions", regex="a{500}", max_tokens=3)
    assert finish == "length" and set(text) == {"a"}


def test_stop_string_wins_over_the_grammar(asker):
    text, finish = text_of(asker, "/v1/completions", regex="xyz+", stop="y")
    assert (text, finish) == ("x", "stop")


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be provided"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"json_schema": {"type": "wrong"}}, "json_schema", "wrong"),
        ({"json_schema": {"unevaluatedProperties": False}}, "json_schema", "unevaluated"),
        ({"regex": "(a"}, "regex", "unclosed"),
        ({"regex": "a", "ebnf": "root ::= 'a'"}, "ebnf", "only one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "exactly one"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_any_byte(asker, fields, param, word):
    for stream in (False, True):
        answer = asker.post("/v1/chat/completions", CHAT | fields | {"stream": stream})
        assert answer.status == 400
        error = answer.error()
        assert error["param"] == param and word in error["message"]


def test_formats_that_ask_for_nothing_are_plain(asker, force):
    for form in ({"type": "text"}, {"type": "text", "json_schema": None}):
        fields = {"response_format": form, "max_tokens": 2, **force(2767)}
        assert text_of(asker, "/v1/chat/completions", **fields)[0] == " dog dog"


def test_llama_cpps_grammar_holds(asker):
    text, finish = text_of(asker, "/v1/chat/completions", grammar='root ::= "x" [0-9] "y"')
    assert text[0] == "x" and text[2:] == "y" and finish == "stop"


def test_a_grammar_that_is_too_long_is_refused_before_it_is_translated(asker, monkeypatch):
    from llguidance import gbnf_to_lark

    from shmserve import grammar

    monkeypatch.setattr(gbnf_to_lark, "gbnf_to_lark", None)
    with pytest.raises(grammar.GrammarError, match="at most"):
        grammar.from_ebnf("root ::= " + '"x" ' * grammar.MOST_GRAMMAR_BYTES)


@pytest.mark.parametrize("name", ["json_schema", "structural_tag"])
def test_a_schema_in_a_string_that_nests_too_deeply_is_refused_D5(asker, name):
    nest = "[" * 20_000 + "]" * 20_000
    answer = asker.post("/v1/chat/completions", CHAT | {name: nest})
    assert answer.status == 400 and answer.error()["param"] == name


def test_client_that_leaves_while_its_grammar_compiles_leaves_nothing(asker):
    hard = "|".join(f"a{{{i}}}b{{{i}}}" for i in range(1, 40))
    for i in range(5):
        stream = asker.connect()
        body = json.dumps({"prompt": "Hi", "regex": f"{hard}|{i}", "stream": True}).encode()
        stream.request("POST", "/v1/completions", body)
        stream.close()
    asker.wait_idle()
