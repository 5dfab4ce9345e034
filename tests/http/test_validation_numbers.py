"""Numbers of a request that are none, out of range, or at the edge: named, and refused before any byte of a stream."""

import json

import pytest
from refusals import BODIES, LIMITS, refused, with_sampling

pytestmark = pytest.mark.usefixtures("goes_on")


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in LIMITS.items() for name in names]
)
@pytest.mark.parametrize("value", [0, -5, "10", True, 1.5, [], 10**30])
def test_a_token_limit_that_is_none_is_refused_and_named_D1(asker, path, name, value):
    error = refused(asker, path, with_sampling(path, **{name: value}))
    assert name in error["param"]
    if isinstance(value, int) and not isinstance(value, bool):
        assert str(value) in error["message"]


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in LIMITS.items() for name in names]
)
def test_a_token_limit_of_null_is_the_default_and_a_huge_one_is_cut_D1(asker, path, name):
    body = with_sampling(path, **{name: 10**9}, temperature=0, logit_bias={"2": 100})
    answer = asker.post(path, body)
    assert answer.status == 200  # it ends at the first token: only that it is taken counts
    if path != "/v1/chat/completions":
        body = with_sampling(path, **{name: None})
        answer = asker.post(path, body).json()
        got = (
            answer["meta_info"]["completion_tokens"]
            if path == "/generate"
            else answer["usage"]["completion_tokens"]
        )
        assert got == (128 if path == "/generate" else 16)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("temperature", word)
        for word in (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            '"NaN"',
            "-0.1",
            "true",
            "10000000",
            "[]",
        )
    ]
    + [("top_p", word) for word in ("NaN", "1.5", "-0.1", "1e999", "true")]
    + [("top_k", word) for word in ("-2", "1.5", "99999999999", '"1"')]
    + [("min_p", word) for word in ("-0.1", "1.1", "NaN")]
    + [("presence_penalty", "NaN"), ("presence_penalty", "10"), ("repetition_penalty", "0")]
    + [("frequency_penalty", "-2.1"), ("repetition_penalty", "-1"), ("repetition_penalty", "NaN")]
    + [("seed", "1.5"), ("seed", '"x"'), ("n", "0"), ("n", "-1"), ("n", "1000000"), ("n", "true")],
)
def test_a_number_that_is_none_or_out_of_range_is_refused_D2(asker, path, name, word):
    body = json.dumps(with_sampling(path, **{name: "HOLE"})).replace('"HOLE"', word)
    answer = asker.post(path, body.encode())
    assert answer.status == 400
    answer.error()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e6},
        {"temperature": 1e-12},
        {"temperature": 0},
        {"top_p": 0},
        {"top_k": -1},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 1e-6},
    ],
)
def test_numbers_at_the_edges_are_served_D2(asker, fields):
    assert asker.complete(max_tokens=2, **fields)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "bias",
    ['{"49152":-100}', '{"-1":1}', '{"abc":1}', '{"12":"x"}', '{"12":NaN}', '{"12":101}', '{"12":null}', "[]",
     '{"\uff11\uff12":1}', '{"12":1,"012":2}', '{" 12":1}', '{"":1}'],
)  # fmt: skip
def test_a_bad_logit_bias_is_refused_D4(asker, path, bias):
    body = json.dumps(with_sampling(path, logit_bias="HOLE")).replace('"HOLE"', bias)
    answer = asker.post(path, body.encode())
    assert answer.status == 400
    assert answer.error()["code"] != "internal_error"


def test_a_logit_bias_counts_for_every_choice_and_no_other_request_D4(asker):
    forced = asker.stream(prompt="Hi", n=3, max_tokens=30, logit_bias={"2767": 100})
    free = asker.text(prompt="Hi", max_tokens=30, seed=1)
    texts = ["", "", ""]
    for chunk in forced.objects():
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [" dog" * 30] * 3
    assert free == asker.text(prompt="Hi", max_tokens=30, seed=1)
    assert " dog dog" not in free


def test_logprobs_beyond_the_limit_are_refused_with_both_numbers(asker):
    for path, name, more in (
        ("/v1/completions", "logprobs", {}),
        ("/v1/chat/completions", "top_logprobs", {"logprobs": True}),
        ("/generate", "top_logprobs_num", {"return_logprob": True}),
    ):
        for value in (21, -1):
            error = refused(asker, path, BODIES[path] | more | {name: value})
            assert error["param"] == name
            assert "20" in error["message"] and str(value) in error["message"]


def test_top_logprobs_without_logprobs_is_refused_in_vllms_words(asker):
    error = refused(
        asker, "/v1/chat/completions", BODIES["/v1/chat/completions"] | {"top_logprobs": 2}
    )
    assert error["message"] == "when using `top_logprobs`, `logprobs` must be set to true."
