"""OpenAI's own client, which checks the shapes that it reads."""

from __future__ import annotations

import os
import signal

import openai
import pytest
from serving import until

MODEL = "SmolLM2-135M-Instruct"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=["simulated", "real"])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
    server.wait_idle()


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_and_its_stream_say_the_same(client):
    fields = {"model": MODEL, "messages": HI, "max_tokens": 6, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**fields)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (
        31,
        6,
        37,
    )
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    # The second time the prompt is in the cache, and says so.
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == 37
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_completion_and_its_stream_say_the_same(client):
    fields = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 5,
        "temperature": 0,
        "n": 2,
        "seed": 4,
    }
    whole = client.completions.create(**fields)
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts
    assert whole.usage.completion_tokens == 10


def test_errors_become_the_clients_exceptions(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert refused.value.param == "temperature" and refused.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[19556] * 9000, stream=True)


def test_a_client_that_closes_its_stream_frees_its_sequence(client, server):
    stream = client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_idle()


@pytest.mark.slow
def test_a_stream_whose_worker_dies_raises_and_never_seems_complete_C6(mortal):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{mortal.port}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        reasons, chunks = [], 0
        with pytest.raises(openai.APIError):
            for chunk in client.completions.create(
                model="unknown",
                prompt="Hi",
                max_tokens=5000,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                reasons += [choice.finish_reason for choice in chunk.choices]
                chunks += 1
                if chunks == 3:
                    os.kill(mortal.worker_pid, signal.SIGKILL)
        assert chunks >= 3 and set(reasons) == {None}
    until(lambda: mortal.get("/ready").status == 200, "the next worker")
    assert mortal.text(max_tokens=2)
