"""Prompts that cannot be computed: ids, contents, messages and lengths; and where an answer is cut."""

import pytest
from refusals import CHAT, VOCAB, refused

pytestmark = pytest.mark.usefixtures("goes_on")


@pytest.fixture(scope="module")
def start_short(start_server):
    """A server with a context of 64 tokens."""
    return start_server("--step-ms=1", "--max-model-len=64")


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([19556, VOCAB], "49152"),
        ([-1], "-1"),
        ([5279552648203111001], "5279552648203111001"),
        ([19556 + 2**32], str(19556 + 2**32)),
        ([10**25], ""),
        ([True], ""),
        ([1.5], ""),
        ([[19556], [VOCAB]], "49152"),
        ([], ""),
        ([[]], ""),
        (["Hi", [1]], None),
        ([1, "Hi"], ""),
        (7, ""),
        ({}, ""),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_and_named_D3(asker, prompt, named):
    bodies = [("/v1/completions", "prompt", {"prompt": prompt, "max_tokens": 2})]
    bodies.append(
        ("/generate", "input_ids", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}})
    )
    for path, name, body in bodies:
        if named is None:
            assert asker.post(path, body).status in (200, 400)  # strings and ids in one list
            continue
        error = refused(asker, path, body)
        assert error["param"].startswith(name)
        assert named in error["message"]


def test_the_last_id_of_the_vocabulary_is_one_D3(asker):
    assert asker.complete(prompt=[19556, VOCAB - 1], max_tokens=1)["usage"]["prompt_tokens"] == 2


def test_content_may_be_a_list_of_text_parts_D7(asker):
    def tokens(content, role="user"):
        messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
        answer = asker.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status == 200, answer.body
        return answer.json()["usage"]["prompt_tokens"]

    parts = [{"type": "text", "text": "Hello wor"}, {"type": "text", "text": "ld and more"}]
    for role in ("system", "user", "assistant"):
        assert tokens(parts, role) == tokens("Hello world and more", role)


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "text"}],
        ["x"],
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"type": "text", "text": 1}],
        7,
        {"text": "x"},
    ],
)
def test_content_that_is_no_text_is_refused_and_named_D7(asker, content):
    error = refused(
        asker, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
    )
    assert error["param"].startswith("messages[0].content")


@pytest.mark.parametrize(
    "messages", [[{}], [{"content": "Hi"}], [{"role": 1, "content": "Hi"}], ["Hi"], "Hi", {}]
)
def test_messages_of_another_shape_are_refused(asker, messages):
    assert "messages" in refused(asker, "/v1/chat/completions", {"messages": messages})["param"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": [""]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ["Hi", ""]}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {}),
        ("/generate", {"text": ""}),
        ("/generate", {"text": [""]}),
        ("/generate", {"input_ids": []}),
        ("/generate", {}),
        ("/generate", {"text": "Hi", "input_ids": [1]}),
    ],
)
def test_an_empty_prompt_is_refused_D8(asker, path, body):
    refused(asker, path, body)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers_D9(asker):
    for path, body in (
        ("/v1/completions", {"prompt": [19556] * 9000}),
        ("/generate", {"input_ids": [19556] * 9000}),
    ):
        error = refused(asker, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "9000" in error["message"] and "8192" in error["message"]
    assert refused(asker, "/v1/completions", {"prompt": [19556] * 8192})["code"] == (
        "context_length_exceeded"
    )


def test_an_answer_is_cut_where_the_context_ends_D9(start_short):
    answer = start_short.complete(prompt=[19556] * 60, max_tokens=500)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    assert start_short.complete(prompt=[19556] * 63)["usage"]["completion_tokens"] == 1


def test_a_chat_without_a_limit_runs_to_the_contexts_end_D1(start_short):
    answer = start_short.post("/v1/chat/completions", CHAT).json()
    assert answer["usage"]["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"
