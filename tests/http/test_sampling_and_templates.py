"""Seeds, choices and chat templates, over HTTP."""

from concurrent.futures import ThreadPoolExecutor

import pytest

ONCE = {"prompt": "Once", "temperature": 0.8, "max_tokens": 16, "ignore_eos": True}


def test_a_seeded_request_is_the_same_beside_others_H1(asker):
    alone = asker.text(**ONCE, seed=42)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            told = [
                pool.submit(asker.text, **ONCE, **more) for more in ({"seed": 42}, {}, {"seed": 7})
            ]
            texts = [future.result() for future in told]
            assert texts[0] == alone
            assert len(set(texts)) == 3


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, 2**70])
def test_every_whole_number_is_a_seed(asker, seed):
    assert asker.text(**ONCE, seed=seed) == asker.text(**ONCE, seed=seed)


def test_the_choices_of_a_seed_differ_and_repeat_whatever_stands_beside_them_H3(asker):
    fields = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 12}

    def texts(prompt):
        choices = asker.complete(prompt=prompt, **fields)["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    both = texts(["Once", "Twice"])
    assert len(both) == 8
    assert len(set(both[:4])) == len(set(both[4:])) == 4
    assert texts(["Once", "Twice"]) == both
    assert texts("Twice") == both[4:]


def test_without_a_seed_answers_differ_H4(asker):
    fields = {"prompt": "Once", "temperature": 1, "max_tokens": 24}
    one_by_one = {asker.text(**fields) for _ in range(8)}
    with ThreadPoolExecutor(8) as pool:
        at_once = set(pool.map(lambda _: asker.text(**fields), range(8)))
    assert len(one_by_one) > 1 and len(at_once) > 1
    assert len({c["text"] for c in asker.complete(**fields, n=4)["choices"]}) > 1


def num_prompt_tokens(asker, messages, **fields):
    body = {"messages": messages, "max_tokens": 1} | fields
    answer = asker.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json()["usage"]["prompt_tokens"]


def test_the_beginning_of_text_stands_once_I1(asker):
    assert num_prompt_tokens(asker, [{"role": "user", "content": "Hi"}]) == 31
    assert asker.complete(prompt="Hello world", max_tokens=1)["usage"]["prompt_tokens"] == 2


def test_the_last_message_can_be_continued_I2(asker):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Sure, "}]
    whole = num_prompt_tokens(asker, messages, add_generation_prompt=False)
    continued = num_prompt_tokens(asker, messages, continue_final_message=True)
    assert continued == whole - 2  # <|im_end|> and the line end behind it
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert num_prompt_tokens(asker, messages, **both) == continued
    opened = num_prompt_tokens(asker, messages[:1])
    empty = [messages[0], {"role": "assistant", "content": ""}]
    assert num_prompt_tokens(asker, empty, continue_final_message=True) == opened


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("assistant", {"continue_final_message": True, "add_generation_prompt": True}),
        ("user", {"continue_final_message": True}),
    ],
)
def test_what_cannot_be_continued_is_refused_I2(asker, role, fields):
    body = {"messages": [{"role": role, "content": "x"}]} | fields
    for more in ({}, {"stream": True}):
        answer = asker.post("/v1/chat/completions", body | more)
        assert answer.status == 400
        assert answer.error()["param"] == "continue_final_message"


@pytest.fixture(scope="module")
def templated(start_server, tmp_path_factory):
    """A server whose template takes one message, and has a name that it does not know in one branch."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "{% if messages[0].content == 'undefined' %}{{ nobody.attribute }}{% endif %}"
        "{% if messages[0].content == 'zero' %}{{ 1 // 0 }}{% endif %}"
        "{% if messages[0].content == 'escape' %}{{ messages.__class__.__mro__ }}{% endif %}"
        "{{ messages[0].content }}"
    )
    return start_server("--step-ms=1", f"--chat-template={path}")


def test_what_the_template_raises_is_a_400_with_its_words_I3(templated):
    two = [{"role": "user", "content": "Hi"}] * 2
    for more in ({}, {"stream": True}):
        answer = templated.post("/v1/chat/completions", {"messages": two} | more)
        assert answer.status == 400
        error = answer.error()
        assert "one message only" in error["message"]
        assert error["type"] == "invalid_request_error"
    for content in ("undefined", "zero", "escape"):
        body = {"messages": [{"role": "user", "content": content}]}
        answer = templated.post("/v1/chat/completions", body)
        assert (answer.status, answer.error()["code"]) == (400, "template_error")
    assert num_prompt_tokens(templated, [{"role": "user", "content": "Hello world"}]) == 2


@pytest.mark.slow
def test_without_a_seed_answers_differ_after_a_restart_too_H4(asker, start_server):
    """Numbers drawn at a start must not be the same numbers at every start."""
    fields = {"prompt": "Once", "temperature": 1, "max_tokens": 24}
    lives = [
        {server.text(**fields) for _ in range(3)} for server in (asker, start_server("--step-ms=1"))
    ]
    assert not lives[0] & lives[1]
