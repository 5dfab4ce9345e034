"""From bytes to a validated schema, and the ranges that all endpoints share."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.http import fields
from shmserve.http.errors import ApiError
from shmserve.http.native import GenerateRequest
from shmserve.http.openai.schemas import ChatRequest, CompletionRequest, Shared
from shmserve.request import SamplingParams


def refusal(call, *args, **more):
    with pytest.raises(ApiError) as refused:
        call(*args, **more)
    assert refused.value.status == 400
    assert refused.value.type == "invalid_request_error"
    return refused.value


def decode(body, schema, unsupported=None):
    return fields.decode(body, schema, unsupported or {})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"a":1,}', b"[]", b'"x"', b"null", b"1", b"\xff\xfe", b'{"a":NaN}', b'{"a":Infinity}',
     b'{"prompt":"\\ud800"}', b'{"prompt":"\xed\xa0\x80"}', b"{'a':1}", b'{"a":1}x'],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_D10(body):
    assert refusal(decode, body, CompletionRequest).code == "invalid_json"


@pytest.mark.parametrize("depth", [200_000, 20_000])
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
def test_deep_nesting_is_refused_and_recursion_is_no_crash_D5(depth, brackets):
    opening, closing = brackets
    body = '{"prompt":"x","y":' + opening * depth + "1" + closing * depth + "}"
    assert refusal(decode, body.encode(), CompletionRequest).code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "1"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"logit_bias": []}, "logit_bias"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": 1}, "stream"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_a_wrong_type_is_refused_and_its_place_named(body, param):
    error = refusal(decode, json.dumps(body).encode(), CompletionRequest)
    assert (error.param, error.code) == (param, "invalid_type")
    assert param in error.message


def test_the_place_inside_a_list_of_messages_is_named():
    error = refusal(decode, b'{"messages":[{"role":"user"},3]}', ChatRequest)
    assert error.param == "messages[1]"


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest, GenerateRequest])
def test_null_is_taken_for_every_field_that_has_a_default(schema):
    names = [name for name in schema.__struct_fields__ if name != "messages"]
    parsed, ignored = decode(json.dumps(dict.fromkeys(names)).encode(), schema)
    assert not ignored
    assert all(getattr(parsed, name) is None for name in names)


def test_what_generate_shares_with_v1_is_declared_alike():
    """It cannot be declared once: a struct has one base."""
    ours, theirs = (
        {f.name: f for f in msgspec.structs.fields(s)} for s in (GenerateRequest, Shared)
    )
    both = ours.keys() & theirs.keys()
    routing, slow = {"priority", "timeout_ms", "data_parallel_rank", "cache_salt"}, "slow_client"
    assert both == routing | {f"on_{slow}", f"{slow}_bytes", f"{slow}_seconds"}
    for name in both:
        assert (ours[name].type, ours[name].default) == (theirs[name].type, theirs[name].default)


def test_unknown_fields_are_named_in_order_and_do_not_matter():
    parsed, ignored = decode(b'{"zebra":1,"prompt":"x","aard":{}}', CompletionRequest)
    assert (parsed.prompt, ignored) == ("x", ["aard", "zebra"])


def test_of_a_key_that_stands_twice_the_last_wins_D10():
    parsed, _ = decode(b'{"max_tokens":"x","max_tokens":2}', CompletionRequest)
    assert parsed.max_tokens == 2
    refusal(decode, b'{"max_tokens":2,"max_tokens":"x"}', CompletionRequest)


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_a_value_in_range_is_itself_and_zero_is_a_value(value):
    assert fields.in_range("x", value, 0, 1, 7) == value


def test_null_is_the_default():
    assert fields.in_range("x", None, 0, 1, 7) == 7


@pytest.mark.parametrize("value", [-0.1, 1.1, float("inf"), float("-inf"), float("nan"), 10**400])
def test_outside_the_range_is_refused_whatever_it_is_D2(value):
    error = refusal(fields.in_range, "x", value, 0, 1, 7)
    assert error.param == "x" and "0" in error.message


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((1, 2**63 - 1), "x must be 1 or more, got 0.5"),
        ((1, 2**31 - 1), "x must be 1 to 2147483647, got 0.5"),
        ((1e-6, 0.25), "x must be 1e-06 to 0.25, got 0.5"),
    ],
)
def test_a_refusal_names_the_bounds_as_people_write_them(bounds, words):
    with pytest.raises(ApiError) as caught:
        fields.in_range("x", 0.5, *bounds, None)
    assert caught.value.message == words


def test_stop_strings_are_bytes_each_once_in_order():
    assert fields.stop_strings("stop", None) == ()
    assert fields.stop_strings("stop", []) == ()
    assert fields.stop_strings("stop", "é") == fields.stop_strings("stop", ["é"]) == ("é".encode(),)
    assert fields.stop_strings("stop", ["b", "a", "b"]) == (b"b", b"a")


@pytest.mark.parametrize("value", ["", [""], ["x", ""], ["x"] * 33, "x" * 1025, "é" * 600])
def test_stop_strings_have_bounds_B6(value):
    assert refusal(fields.stop_strings, "stop", value).param == "stop"


@pytest.mark.parametrize("token_id", [-1, 100, 2**32, 2**64, -(2**63)])
def test_an_id_outside_the_vocabulary_is_named_D3(token_id):
    assert str(token_id) in refusal(fields.token_ids, "x", [1, token_id], 100).message


def test_the_bias_is_a_pair_for_each_id():
    assert fields.logit_bias({"5": 1, "99": -100}, 100) == ((5, 1.0), (99, -100.0))
    assert fields.logit_bias(None, 100) == fields.logit_bias({}, 100) == ()


@pytest.mark.parametrize(
    "value",
    [{"100": 1}, {"-1": 1}, {"x": 1}, {"1.0": 1}, {" 1": 1}, {"1": 101}, {"1": float("nan")}, {"": 1},
     {"1": 1, "01": 1}, {"1" * 5000: 1}, {"\uff11": 1}],
)  # fmt: skip
def test_a_bad_bias_is_refused_D4(value):
    assert refusal(fields.logit_bias, value, 100).param.startswith("logit_bias")


@given(seed=st.integers(-(2**70), 2**70), n=st.integers(1, 20))
def test_seeds_of_choices_are_64_bits_distinct_and_repeat(seed, n):
    seeds = fields.seeds(seed, n)
    assert seeds == fields.seeds(seed, n)
    assert len(set(seeds)) == n
    assert all(0 <= each < 2**64 for each in seeds)
    assert fields.seeds(seed, n + 1)[:n] == seeds


def test_without_a_seed_they_are_random_H4():
    assert len({fields.seeds(None, 1)[0] for _ in range(20)}) == 20


def params(**more):
    names = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
             "include_stop", "skip_special_tokens")  # fmt: skip
    whole = dict.fromkeys(names) | {
        "max_tokens": 5,
        "stop": (),
        "bias": (),
        "seed": 3,
        "vocab_size": 100,
    }
    return fields.sampling_params(**whole | more)


def test_defaults_are_those_of_the_apis():
    assert params() == SamplingParams(max_tokens=5, seed=3)
    assert params(top_k=-1).top_k == 0


def test_a_tiny_temperature_is_greedy_and_zero_is_not_the_default_H2():
    assert params(temperature=0).temperature == params(temperature=1e-12).temperature == 0.0
    assert params(temperature=None).temperature == 1.0
    assert params(top_p=0).top_p == 0 and params(min_tokens=0).min_tokens == 0


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1}, {"temperature": float("inf")}, {"top_p": 1.01}, {"top_k": -2}, {"min_p": 2},
     {"min_tokens": -1}, {"stop_token_ids": [100]}, {"stop_token_ids": [1] * 129}],
)  # fmt: skip
def test_sampling_outside_its_ranges_is_refused_and_named(bad):
    assert refusal(params, **bad).param == next(iter(bad))


class Named(msgspec.Struct):
    logprobs: int | bool | None = None
    stop: list[str] | None = None


def test_a_value_that_asks_for_something_is_refused_by_type_too():
    allowed = {"logprobs": (None, False), "stop": (None, [])}
    decode(b'{"logprobs":false,"stop":[]}', Named, allowed)
    decode(b'{"logprobs":null}', Named, allowed)
    for body, name in ((b'{"logprobs":0}', "logprobs"), (b'{"stop":["x"]}', "stop")):
        error = refusal(decode, body, Named, allowed)
        assert (error.param, error.code) == (name, "unsupported_parameter")


def test_penalties_reach_the_worker_and_nothing_said_is_neutral():
    common = dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
            *("stop_token_ids", "include_stop", "skip_special_tokens"),
        )
    )
    common |= {"max_tokens": 4, "stop": (), "bias": (), "seed": 1, "vocab_size": 9}
    said = fields.sampling_params(
        **common, frequency_penalty=-2, presence_penalty=0.5, repetition_penalty=1.25
    )
    assert (said.frequency_penalty, said.presence_penalty, said.repetition_penalty) == (
        -2,
        0.5,
        1.25,
    )
    silent = fields.sampling_params(**common)
    assert (silent.frequency_penalty, silent.presence_penalty, silent.repetition_penalty) == (
        0,
        0,
        1,
    )
