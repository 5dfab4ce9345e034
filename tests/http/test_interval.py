"""stream_interval: fewer events, the same text, tokens and end; nothing is held past the end."""

import pytest
from serving import Asker

from shmserve.http.interval import spaced


def texts(objects):
    return [chunk["choices"][0]["text"] for chunk in objects]


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("script", ["dabelske", "emoji", "twenty_at_once", "one_two_three_four"])
def test_text_and_end_are_those_of_the_plain_answer(asker: Asker, seed_of, interval, script):
    fields = {"seed": seed_of(script), "max_tokens": 18, "stream_interval": interval}
    plain = asker.complete(**fields)["choices"][0]
    objects = asker.stream(**fields).objects()
    assert "".join(texts(objects)) == plain["text"]
    ends = [c["choices"][0]["finish_reason"] for c in objects if c["choices"][0]["finish_reason"]]
    assert ends == [plain["finish_reason"]]


def test_first_token_goes_at_once_and_then_every_third(asker, force):
    fields = {"max_tokens": 10, "stream_interval": 3, **force(2767)}
    got = [text for text in texts(asker.stream(**fields).objects()) if text]
    assert got == [" dog", " dog" * 3, " dog" * 3, " dog" * 3]


def test_generate_has_it_in_its_sampling_params(asker, force):
    params = {"max_new_tokens": 7, "stream_interval": 3, **force(2767)}
    frames = asker.stream("/generate", text="Hi", sampling_params=params).objects()
    assert [len(frame["output_ids"]) for frame in frames] == [1, 4, 7, 7]


@pytest.mark.slow
def test_servers_interval_is_the_least(start_server, force):
    server = start_server("--step-ms=1", "--stream-interval=4")
    got = [t for t in texts(server.stream(max_tokens=9, **force(2767)).objects()) if t]
    assert got == [" dog", " dog" * 4, " dog" * 4]


@pytest.mark.parametrize("value", [0, -1, "x", 1.5])
def test_bad_interval_is_refused_by_name(asker, value):
    answer = asker.post("/v1/completions", {"prompt": "Hi", "stream_interval": value})
    assert answer.status == 400 and answer.error()["param"] == "stream_interval"


def test_interval_of_one_changes_nothing():
    marker = object()
    assert spaced(marker, None, 1) is marker
    assert spaced(marker, 1, 1) is marker
