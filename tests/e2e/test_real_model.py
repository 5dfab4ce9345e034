"""What only the real model can show: known next tokens, greedy and seeded repeats, ends, and freed places. Few and short."""

from __future__ import annotations

import pytest
from serving import every_way, until

FRANCE = "The capital of France is"


@pytest.fixture
def asker(real):
    yield real
    real.wait_idle()


def chat(asker, **fields):
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0} | fields
    answer = asker.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json()


def test_the_capital_of_france_is_paris_H2(asker):
    body = {"text": FRANCE, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    answer = asker.post("/generate", body).json()
    assert (answer["output_ids"], answer["text"]) == ([7042], " Paris")
    assert asker.text(prompt=FRANCE, temperature=0, max_tokens=1) == " Paris"
    assert asker.text(prompt=[504, 3575, 282, 4649, 314], temperature=0, max_tokens=1) == " Paris"


def test_the_chat_begins_with_hello_I1(asker):
    answer = chat(asker, max_tokens=1)
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["usage"]["prompt_tokens"] == 31


def test_temperature_zero_repeats_whatever_else_is_asked_H2(asker):
    first = asker.text(prompt=FRANCE, temperature=0, max_tokens=6)
    for more in (
        {},
        {"temperature": 0.0},
        {"top_p": 0.1},
        {"seed": 5},
        {"top_k": 1, "temperature": 1},
    ):
        assert asker.text(**{"prompt": FRANCE, "temperature": 0, "max_tokens": 6} | more) == first


def test_a_seed_repeats_beside_others_and_without_one_answers_differ_H1(asker):
    fields = {"prompt": "Once", "temperature": 0.8, "max_tokens": 8, "ignore_eos": True}
    alone = asker.text(**fields, seed=42)
    beside = asker.stream(**fields, n=3)
    assert asker.text(**fields, seed=42) == alone
    texts = ["", "", ""]
    for chunk in beside.objects():
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert len(set(texts)) > 1


def test_a_question_is_answered_to_its_end_K5(asker):
    answer = chat(asker, max_tokens=60)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 2)
    assert "<|im_end|>" not in choice["message"]["content"]
    shown = chat(asker, max_tokens=60, skip_special_tokens=False)
    assert shown["choices"][0]["message"]["content"] == choice["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "text", "finish", "matched"),
    [
        ({"stop": ["og d"], "max_tokens": 5}, " d", "stop", "og d"),
        ({"stop": ["gX"], "max_tokens": 3}, " dog dog dog", "length", None),
    ],
)
def test_stop_strings_work_on_forced_tokens_in_every_way_B1_B2(
    asker, force, fields, text, finish, matched
):
    told = every_way(asker, **fields, **force(2767))
    assert (told.text, told.finish, told.matched) == (text, finish, matched)


@pytest.mark.parametrize(
    ("token_id", "fields", "text", "finish", "num_tokens"),
    [
        (10813, {"max_tokens": 3}, "\ufffd" * 3, "length", 3),
        (40303, {"max_tokens": 1}, " \ufffd", "length", 1),
        (2, {"max_tokens": 5}, "", "stop", 1),
        (2, {"max_tokens": 3, "ignore_eos": True}, "", "length", 3),
    ],
    ids=["A3", "A7", "B9", "K5"],
)
def test_forced_tokens_tell_the_same_in_every_way(
    asker, force, token_id, fields, text, finish, num_tokens
):
    told = every_way(asker, **fields, **force(token_id))
    assert (told.text, told.finish, told.num_tokens) == (text, finish, num_tokens)


def test_the_next_text_of_a_continued_message_is_new_only_I2(asker):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    messages.append({"role": "assistant", "content": "The capital of France is"})
    answer = chat(asker, messages=messages, continue_final_message=True, max_tokens=1)
    assert answer["choices"][0]["message"]["content"] == " Paris"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place_E1_E2(asker, wire, is_stream):
    gone = wire(asker)
    gone.send(
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": is_stream},
    )
    until(lambda: asker.words("worker")["running"] == 1, "it runs")
    gone.close()
    asker.wait_idle()
    assert asker.text(prompt=FRANCE, temperature=0, max_tokens=1) == " Paris"
