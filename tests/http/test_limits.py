"""allowed_token_ids and bad_words over HTTP, with vLLM's meaning."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.http.openai.limits import MOST_BAD_WORDS, limits_of
from shmserve.http.openai.schemas import CompletionRequest
from shmserve.http.tokenizer import Tokenizer

LONG = {"prompt": "Once", "max_tokens": 40, "temperature": 1, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(default_model):
    tokenizer = Tokenizer(default_model, 1)
    yield tokenizer
    tokenizer.close()


def spelled(tokenizer, *words):
    """The ids of bad words, from the coroutine that has nothing to wait for."""
    waiting = limits_of(tokenizer, CompletionRequest(bad_words=list(words)))
    try:
        waiting.send(None)
    except StopIteration as done:
        return [list(word) for word in done.value.bad_words]
    raise AssertionError("short words were not encoded at once")


def ids(tokenizer, text):
    return tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(st.text(st.sampled_from("abehlos XYZ,é😀"), min_size=1, max_size=9))
def test_a_word_is_forbidden_bare_and_behind_a_blank_where_that_is_another_token(tokenizer, word):
    if not word.strip():
        return
    bare, behind = ids(tokenizer, word.lstrip()), ids(tokenizer, " " + word.lstrip())
    expected = [bare]
    if len(bare) == len(behind) and bare[0] != behind[0]:
        expected.append(behind)
    assert spelled(tokenizer, word) == expected


def test_only_allowed_ids_come_and_all_of_them(asker):
    allowed = [537, 827, 1296]
    body = LONG | {"max_tokens": 64, "allowed_token_ids": allowed, "return_token_ids": True}
    choice = asker.complete(**body)["choices"][0]
    assert set(choice["token_ids"]) == set(allowed)
    beside = asker.complete(**(body | {"prompt": ["Once", "Twice"]}))["choices"]
    assert beside[0]["token_ids"] == choice["token_ids"]


def test_allowed_ids_and_a_grammar_hold_together(asker, tokenizer):
    yes, no = ids(tokenizer, "yes")[0], ids(tokenizer, "no")[0]
    body = {"prompt": "Once", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
    for wanted, text in ((yes, "yes"), (no, "no")):
        assert asker.complete(**body, allowed_token_ids=[wanted, 2])["choices"][0]["text"] == text


def test_a_bad_word_never_comes_and_what_stands_before_it_may(asker):
    body = LONG | {"return_token_ids": True}
    plain = asker.complete(**body)["choices"][0]["token_ids"]
    # A word of two tokens as the model says them: found by its text, if that has these ids.
    for at in range(len(plain) - 1):
        text = asker.post("/detokenize", {"tokens": plain[at : at + 2]}).json()["text"]
        found = asker.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
        if found["tokens"] == plain[at : at + 2]:
            break
    else:
        pytest.fail("no two neighbours are cut as their text is")
    forbidden = asker.complete(**body, bad_words=[text])["choices"][0]["token_ids"]
    assert forbidden[: at + 1] == plain[: at + 1]
    assert forbidden[at + 1] != plain[at + 1]
    pairs = list(itertools.pairwise(forbidden))
    assert tuple(plain[at : at + 2]) not in pairs


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"allowed_token_ids": []}, "empty"),
        ({"allowed_token_ids": [49152]}, "49152"),
        ({"allowed_token_ids": [3, -1]}, "-1"),
        ({"allowed_token_ids": ["3"]}, "int"),
        ({"bad_words": [""]}, "empty"),
        ({"bad_words": [" "]}, "empty"),
        ({"bad_words": ["x"] * (MOST_BAD_WORDS + 1)}, str(MOST_BAD_WORDS)),
        ({"bad_words": ["x" * 2000]}, "1024 bytes"),
        ({"bad_words": "x"}, "array"),
    ],
)
def test_what_cannot_be_a_limit_is_refused_by_name(asker, path, fields, says):
    start = (
        {"prompt": "Hi"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    for more in ({}, {"stream": True}):
        answer = asker.post(path, start | fields | more)
        assert answer.status == 400, answer.body
        error = answer.error()
        assert error["param"].startswith(next(iter(fields)))
        assert says in error["message"]
