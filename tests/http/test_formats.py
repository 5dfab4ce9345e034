"""OpenAI's objects: above all that the two ways to write a delta give the same bytes."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.http.detokenizer import escape
from shmserve.http.errors import ApiError
from shmserve.http.openai.choice import OpenAIChoice
from shmserve.http.openai.formats import (
    Envelope,
    OpenAIStream,
    event,
    finish_word,
    stop_details,
    usage,
)
from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.finish import pack_finish, unpack_finish
from shmserve.wire.tokens import TokenKind

PARAMS = SamplingParams(max_tokens=5, stop=(b"a", "é".encode()), stop_token_ids=(7,))
any_text = st.text(
    st.one_of(
        st.characters(blacklist_categories=["Cs"]),
        st.sampled_from("\u2028\u2029\u0085\n\r\"\\\x00\x1a\x7f"),
    )
)  # fmt: skip


def ended(reason, **more):
    record = pack_finish(TokenKind.FINISH, 1, time_ns=1, step=1, finish=reason, **more)
    return SimpleNamespace(
        finish=unpack_finish(record),
        req_id=0xAB,
        error=None,
        matched_stop=lambda stops: stops[more["matched_stop"]].decode(),
    )


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("model", ["m", 'q"\\\u2028', "\x1a", "\\u001a"])
@given(text=any_text.filter(bool))
def test_what_stands_around_the_text_and_the_event_of_the_text_are_the_same_bytes(
    kind, model, text
):
    choice = OpenAIChoice(Envelope(kind, "id-1", model, 5), 3, PARAMS, [2])
    before, after = choice.way
    direct = before + escape(text) + after
    assert direct == choice.delta(text, [1])
    assert direct.endswith(b"\n\n") and direct.count(b"\n") == 2 and b"\r" not in direct
    parsed = json.loads(direct.removeprefix(b"data: "))
    (inner,) = parsed["choices"]
    assert (inner["delta"]["content"] if kind == "chat" else inner["text"]) == text
    assert (parsed["model"], inner["index"], inner["finish_reason"]) == (model, 3, None)


@given(text=any_text)
def test_an_event_is_one_line_that_every_client_reads_as_one_C5(text):
    data = event({"text": text})
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    assert not any(raw in data for raw in (b"\r", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85"))
    assert json.loads(data[6:]) == {"text": text}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_no_text_is_no_event(kind):
    assert OpenAIChoice(Envelope(kind, "i", "m", 5), 0, PARAMS, [2]).delta("", [1]) == b""


@pytest.mark.parametrize(
    ("reason", "word"),
    [(FinishReason.STOP_STRING, "stop"), (FinishReason.STOP_TOKEN, "stop"), (FinishReason.LENGTH, "length"),
     (FinishReason.TIMEOUT, "length"), (FinishReason.GRAMMAR, "stop")],
)  # fmt: skip
def test_finish_reasons_are_openais_words(reason, word):
    assert finish_word(ended(reason)) == word


def test_an_abort_is_no_finish_reason():
    with pytest.raises(ApiError) as refused:
        finish_word(ended(FinishReason.ABORT))
    assert (refused.value.status, refused.value.code) == (503, "aborted")


@pytest.mark.parametrize(
    ("finish", "reason", "matched"),
    [
        (ended(FinishReason.STOP_STRING, matched_stop=1), "é", "é"),
        (ended(FinishReason.STOP_TOKEN, matched_token=2), None, 2),
        (ended(FinishReason.STOP_TOKEN, matched_token=7), 7, 7),
        (ended(FinishReason.LENGTH), None, None),
    ],
)
def test_the_detail_of_a_stop_is_in_two_names(finish, reason, matched):
    assert stop_details(finish, PARAMS, [2]) == {"stop_reason": reason, "matched_stop": matched}


def test_usage_counts_each_prompt_once_and_tokens_over_all_choices_G5():
    counts = {"prompt_tokens": 3, "cached_tokens": 1}
    entries = [ended(FinishReason.LENGTH, completion_tokens=i, **counts) for i in (1, 2, 3, 4)]
    assert usage(entries, 2) == {
        "prompt_tokens": 6,
        "completion_tokens": 10,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_closing_sends_held_text_and_the_end(kind):
    choice = OpenAIChoice(Envelope(kind, "i", "m", 5), 0, PARAMS, [2])
    data = choice.closing("held", (), ended(FinishReason.LENGTH))
    events = [json.loads(part[6:]) for part in data.split(b"\n\n") if part]
    ends = [e["choices"][0]["finish_reason"] for e in events]
    assert ends == ([None, "length"] if kind == "chat" else ["length"])
    if kind == "chat":
        assert events[0]["choices"][0]["delta"] == {"content": "held"}
        assert events[1]["choices"][0]["delta"] == {}
    else:
        assert events[0]["choices"][0]["text"] == "held"


def test_the_usage_event_stands_before_done_and_only_if_asked_for_C2():
    envelope = Envelope("chat", "i", "m", 5)
    entries = [ended(FinishReason.LENGTH, prompt_tokens=2, completion_tokens=3)]
    assert OpenAIStream(envelope, 1, False).ending(entries) == b"data: [DONE]\n\n"
    first, rest = OpenAIStream(envelope, 1, True).ending(entries).split(b"\n\n", 1)
    assert json.loads(first[6:])["choices"] == [] and rest == b"data: [DONE]\n\n"
