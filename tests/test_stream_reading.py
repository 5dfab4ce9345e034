"""What is read out of a stream's events."""

import json

import pytest

from shmserve.stream_reading import NOTHING, Reading, message_of, one_line


def chunk(**choice):
    return json.dumps({"choices": [choice]}).encode()


def test_reasoning_is_told_apart_from_content_and_both_are_arrivals():
    reading = Reading()
    assert reading.take(chunk(delta={"reasoning_content": "hm"}), 5) == ("", "hm")
    assert reading.take(chunk(delta={"content": "so"}, finish_reason=None), 7) == ("so", "")
    assert reading.take(chunk(delta={}, finish_reason="stop"), 9) is NOTHING
    assert reading.arrivals_ns == [5, 7]
    assert reading.finish_reason == "stop"


def test_lag_is_reading_since_sending_less_making_since_arrival():
    reading = Reading()
    at_ns = reading.sent_ns + 9_000_000
    reading.take(chunk(delta={"content": "ab"}, timing={"token_us": [4000, 8500]}), at_ns)
    assert [at for at, _ in reading.lags] == [at_ns, at_ns]
    assert [lag for _, lag in reading.lags] == pytest.approx([5.0, 0.5])


def test_the_summary_of_times_at_the_end_is_no_token():
    reading = Reading()
    reading.take(chunk(delta={}, finish_reason="length", timing={"queue_us": 3}), reading.sent_ns)
    assert reading.lags == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"message": "no\nroom", "code": "queue_full"}}, "no room"),
        ({"error": {"code": "queue_full"}}, "queue_full"),
        ({"error": "plain"}, "plain"),
        ({"detail": "not found"}, "not found"),
        ("text", "text"),
    ],
)
def test_a_message_is_found_in_every_form_of_error(answer, message):
    assert message_of(answer) == message


def test_a_refusal_that_is_no_json_is_its_own_message():
    reading = Reading()
    reading.status = 502
    reading.refused(b"<html>\x1b[31mBad\r\nGateway</html>")
    assert reading.message == "<html> [31mBad Gateway</html>"
    assert reading.error() == "502"


def test_one_line_is_cut_and_says_so():
    assert one_line("x" * 400, 10) == "x" * 9 + "\N{HORIZONTAL ELLIPSIS}"
