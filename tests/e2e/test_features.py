"""What only a real model shows: grammars, forced calls, logprobs and penalties over real logits, through the official client."""

from __future__ import annotations

import json

import openai
import pytest

pytestmark = pytest.mark.slow
"""The smoke run of the real model is tests/process/test_real_life.py's."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(real):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{real.port}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def ask(client, text, **fields):
    fields = {"max_tokens": 120, "temperature": 0} | fields
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="unknown", messages=messages, **fields).choices[0]


def test_schema_holds_on_real_logits_streamed_and_plain(client):
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    choice = ask(client, "A person named Bob, aged 5.", response_format=form)
    person = json.loads(choice.message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)
    assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(
        model="unknown",
        messages=[{"role": "user", "content": "A person named Bob, aged 5."}],
        response_format=form,
        max_tokens=120,
        temperature=0,
        stream=True,
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_forced_call_is_a_call_with_arguments_of_the_schema(client, choice):
    answer = ask(
        client,
        "What is the weather in Paris?",
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.finish_reason == "tool_calls"


def test_logprobs_are_those_of_the_model_K1(client):
    answer = client.completions.create(
        model="unknown", prompt="The capital of France is", logprobs=3, max_tokens=1, temperature=0
    ).choices[0]
    assert answer.text == " Paris"
    assert answer.logprobs.token_logprobs[0] == pytest.approx(-0.258, abs=0.15)
    assert max(answer.logprobs.top_logprobs[0].values()) == answer.logprobs.token_logprobs[0]


@pytest.mark.parametrize(
    ("text", "token", "logprob"), [("Hi", "Hello", -0.531), ("1, 2, 3, 4, 5, 6,", " ", -0.053)]
)
def test_next_tokens_of_the_tied_head_are_the_models_own_K3(client, text, token, logprob):
    """The file has no output layer of its own: a wrong one would give other tokens."""
    if text == "Hi":
        (entry,) = ask(client, text, max_tokens=1, logprobs=True).logprobs.content
        told = (entry.token, entry.logprob)
    else:
        fields = {"model": "unknown", "max_tokens": 1, "temperature": 0, "logprobs": 0}
        logprobs = client.completions.create(prompt=text, **fields).choices[0].logprobs
        told = (logprobs.tokens[0], logprobs.token_logprobs[0])
    assert told == (token, pytest.approx(logprob, abs=0.15))


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1, "top_k": 1}, {"temperature": 1, "top_k": 1, "echo": True}, {"top_p": 1e-6}],
    ids=str,
)
def test_tokens_that_sampling_left_out_have_finite_logprobs_G4(real, fields):
    choice = real.complete(prompt="The capital of France is", logprobs=5, max_tokens=4, **fields)
    logprobs = choice["choices"][0]["logprobs"]
    generated = list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[-4:]
    for value, top in generated:
        assert len(top) in (5, 6) and value in top.values()
        assert all(-10_000 < other <= 0 for other in top.values())
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 5, "logit_bias": {"2767": 100}}
    answer = real.post("/v1/chat/completions", body).json()
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry["token"] == " dog"
        assert (
            len(entry["top_logprobs"]) == 5
        )  # the model's own order, which the bias does not change
        assert all(-10_000 < top["logprob"] <= 0 for top in [entry, *entry["top_logprobs"]])


def test_prompt_is_scored_as_its_continuation_would_be(client):
    """The logprob of a prompt's token is the one that it would have had as the next token of what stands before it."""
    fields = {"model": "unknown", "max_tokens": 1, "temperature": 0, "logprobs": 0}
    echoed = client.completions.create(
        prompt="The capital of France is Paris", echo=True, **fields
    ).choices[0]
    next_token = client.completions.create(prompt="The capital of France is", **fields).choices[0]
    assert echoed.logprobs.tokens[5] == " Paris" == next_token.logprobs.tokens[0]
    assert echoed.logprobs.token_logprobs[5] == next_token.logprobs.token_logprobs[0]


def test_penalties_end_a_repetition_that_greedy_goes_on_with(client):
    fields = {"model": "unknown", "prompt": "a b a b a b a b a b", "max_tokens": 24}
    plain = client.completions.create(temperature=0, **fields).choices[0].text
    assert plain.startswith(" a b a b")
    for penalty in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"extra_body": {"repetition_penalty": 1.8}},
    ):
        text = client.completions.create(temperature=0, **fields, **penalty).choices[0].text
        assert text.count(" a b") < plain.count(" a b"), penalty


def test_speculation_changes_no_token(client):
    fields = {"model": "unknown", "prompt": "1, 2, 3, 1, 2, 3, 1, 2, 3, 1,", "max_tokens": 40}
    for temperature in (0, 0.8):
        texts = {
            client.completions.create(
                temperature=temperature,
                seed=11,
                extra_body={"num_speculative_tokens": count},
                **fields,
            )
            .choices[0]
            .text
            for count in (0, 3, 7, 15)
        }
        assert len(texts) == 1
