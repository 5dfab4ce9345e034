"""Numbers that hurt: whatever stands in a field, the answer is 200 or a 400 that comes before any stream; and no answer holds what
JSON has no word for."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from puppet import Puppet, events_of, finish_record, read_answer
from serving import GENERATING, Stream, native_fields

from shmserve.config import HttpConfig, RingConfig
from shmserve.http.logprobs import FLOOR
from shmserve.wire.logprobs import pack_prompt_logprobs, pack_top_logprobs
from shmserve.wire.tokens import TOKENS_DTYPE, TokenKind

DOG, WORLD = 2767, 905
NAMES = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
         "seed", "min_tokens", "max_tokens", "n", "stop_token_ids", "logit_bias", "stop"]  # fmt: skip
NEAR = st.sampled_from(
    [-2, -1, -0.0, 0, 1e-45, 1e-12, 0.5, 1, 2, 20, 100, 101, 128, 1e6, 49151, 49152]
)
HUGE = st.sampled_from(
    [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**40, 1e38, 1e39, 1e308]
)
WORDS = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0", "1E400", "0e0", "1e-400"]
)
NUMBERS = st.one_of(
    NEAR, HUGE, st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)
)
JSON_WORDS = st.one_of(NUMBERS.map(json.dumps), HUGE.map(lambda number: f"-{number}"), WORDS)
VALUES = st.one_of(
    JSON_WORDS,
    JSON_WORDS,
    st.lists(JSON_WORDS, max_size=3).map(lambda words: f"[{','.join(words)}]"),
    st.tuples(JSON_WORDS, JSON_WORDS).map(lambda pair: f'{{"{pair[0]}":{pair[1]}}}'),
    st.sampled_from(["true", "false", "null", '"1"', '"NaN"', "{}"]),
)


def body_of(path, fields, *, is_stream):
    """The body as text: `fields` are words of JSON, or words that JSON has not."""
    more = {"stop": '"zzz"', "max_tokens": "2"} | fields
    if path == "/generate":
        more = native_fields(more)
    inside = ",".join(f"{json.dumps(name)}:{word}" for name, word in more.items())
    stream = ',"stream":true' if is_stream else ""
    if path == "/generate":
        return f'{{"text":"Hi","sampling_params":{{{inside}}}{stream}}}'
    prompt = (
        '"prompt":"Hi"'
        if path == "/v1/completions"
        else '"messages":[{"role":"user","content":"Hi"}]'
    )
    return f"{{{prompt},{inside}{stream}}}"


def is_endless(fields):
    """An answer to the end of the context: right, and too slow for a test that asks hundreds of times."""
    words = [fields.get(name, "2") for name in ("max_tokens", "min_tokens")]
    try:
        return any(word == "null" or float(word) > 256 for word in words)
    except ValueError:
        return False


@settings(
    max_examples=settings.default.max_examples * 3 // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(GENERATING),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
)
def test_no_number_kills_the_worker_and_a_refusal_comes_before_the_200_D2(server, path, fields):
    if is_endless(fields):
        fields["max_tokens"] = "3"
        fields.pop("min_tokens", None)
    plain = server.post(path, body_of(path, fields, is_stream=False).encode())
    assert plain.status in (200, 400), plain.body
    connection = server.connect()
    connection.request("POST", path, body_of(path, fields, is_stream=True).encode())
    if plain.status == 200:
        plain.json()
        assert Stream(connection).objects()
    else:
        response = connection.getresponse()
        assert response.status == 400
        assert json.loads(response.read())["error"] == plain.error()
        connection.close()
    assert server.words("worker")["pid"] == server.worker_pid
    assert server.text(max_tokens=1, seed=1)


def masked_records(req_id, count):
    """A prompt of two and `count` tokens of which the second of each pair was masked: minus infinity, as the worker says it."""
    ids = np.array([[19556, WORLD], [WORLD, DOG]], np.int32)
    low = np.array([[0.0, -np.inf], [-np.inf, -0.5]], np.float32)
    out = pack_prompt_logprobs(req_id, 0, ids, low, 1)
    for index in range(count):
        values = np.array([0.0, -np.inf], np.float32)
        out += pack_top_logprobs(req_id, index, np.array([DOG, WORLD], np.int32), values, 1)
        record = np.zeros(1, TOKENS_DTYPE)
        record["req_id"], record["index"], record["kind"], record["count"] = (
            req_id,
            index,
            TokenKind.TOKENS,
            1,
        )
        record["token_ids"][0, 0] = DOG
        record["logprobs"][0, 0] = -np.inf if index % 2 else 0.0
        out += record.tobytes()
    return out


def strict(word):
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"logprobs": 2, "echo": True, "prompt": "Hello world"}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "prompt": None,
                                  "messages": [{"role": "user", "content": "Hi"}]}),
        ("/generate", {"text": "Hello world", "prompt": None, "return_logprob": True, "top_logprobs_num": 2,
                       "logprob_start_len": 0}),
    ],
)  # fmt: skip
def test_minus_infinity_becomes_the_floor_and_json_stays_json_G4(
    default_model, path, fields, is_stream
):
    async def scenario():
        rings = RingConfig(token_slots=256, submit_slots=16)
        async with Puppet(default_model, HttpConfig(), rings) as puppet, asyncio.timeout(40):
            reader, _ = await puppet.ask(path, stream=is_stream, **fields)
            req_id = (await puppet.submitted()).req_id
            puppet.put(
                masked_records(req_id, 4),
                finish_record(req_id, prompt_tokens=2, completion_tokens=4),
            )
            return await read_answer(reader)

    status, body = asyncio.run(scenario())
    assert status == 200, body
    if is_stream:
        assert events_of(body)[-1] == "[DONE]"
        texts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if b"{" in part]
    else:
        texts = [body]
    for text in texts:
        json.loads(text, parse_constant=strict)
    assert str(FLOOR).encode() in body
