"""Fields of sampling mean the same to /v1/chat/completions, /v1/messages and /v1/responses, and are refused alike."""

import pytest

from shmserve.http.anthropic.schemas import MessagesRequest
from shmserve.http.openai.responses import ResponsesRequest
from shmserve.http.openai.sampling import take_sampling
from shmserve.http.openai.schemas import Beyond, ChatRequest, Sampling

QUESTION = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 12},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 12},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 12},
}


def text_of(answer):
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return "".join(part["text"] for part in parts)


def test_every_field_of_chat_that_others_may_use_is_one_of_theirs():
    names = set(Beyond.__struct_fields__)
    assert names <= set(ChatRequest.__struct_fields__)
    missing = set(Sampling.__struct_fields__) - names
    assert not missing & {"seed", "min_p", "bad_words", "allowed_token_ids", "min_tokens"}
    for schema in (MessagesRequest, ResponsesRequest):
        assert names <= set(schema.__struct_fields__)


def test_each_field_arrives_under_its_own_name():
    values = {name: object() for name in Beyond.__struct_fields__}
    parsed = ResponsesRequest(input="x", temperature=0.25, **values)
    chat = take_sampling(ChatRequest(), parsed)
    assert {name: getattr(chat, name) for name in values} == values
    assert chat.temperature == 0.25


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 5},
        {"seed": 5, "allowed_token_ids": [537, 827, 1296], "ignore_eos": True},
        {"seed": 5, "logit_bias": {"905": 100}},
        {"seed": 5, "stop_regex": "[aeiou]", "min_tokens": 3},
    ],
)
def test_the_same_request_gives_the_same_text_everywhere(asker, fields):
    texts = []
    for path, body in BODIES.items():
        answer = asker.post(path, body | fields)
        assert answer.status == 200, answer.body
        texts.append(text_of(answer.json()))
    assert texts[0] and len(set(texts)) == 1, texts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 2),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("stop_token_ids", [-1]),
        ("stop_regex", "("),
        ("logit_bias", {"x": 1}),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("min_tokens", -1),
        ("num_speculative_tokens", 16),
        ("priority", 2**40),
        ("cache_salt", "x" * 200),
        ("temperature", -1),
        ("top_k", -2),
    ],
)
def test_what_is_out_of_range_is_refused_alike(asker, name, value):
    messages = set()
    for path, body in BODIES.items():
        answer = asker.post(path, body | {name: value})
        assert answer.status == 400, (path, answer.body)
        error = answer.json()["error"]  # Anthropic's shape has no param
        assert error.get("param", name) == name or error["param"].startswith(name)
        messages.add(error["message"])
    assert len(messages) == 1 and name in next(iter(messages))
