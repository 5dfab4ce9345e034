"""plot_tuning.py and its scenarios: what is a token's time, what a row says, and (slow) that each policy does what is drawn of it."""

import asyncio
import json

import pytest
from plot_tuning import PICTURES, draw
from timed_exchange import Exchange
from tuning_run import Seen, Token, error_of, figures_of, longest_gap_ms, token_ring, tokens_of

BEGIN_NS = 1_000_000_000
SENT_NS = BEGIN_NS + 500_000_000


def stream_of(*events):
    """Each event in a read of its own, 10 ms after the one before."""
    exchange = Exchange(SENT_NS)
    exchange.take(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", SENT_NS)
    for i, event in enumerate(events, 1):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        exchange.take(b"%x\r\n%b\r\n" % (len(data), data), SENT_NS + i * 10_000_000)
    exchange.take(b"0\r\n\r\n", SENT_NS)
    return exchange


def timed(**timing):
    return {"choices": [{"timing": timing}]}


def test_a_token_was_made_when_its_frame_says_and_read_with_that_frame():
    exchange = stream_of(
        timed(token_us=[2_000]), timed(token_us=[5_000, 9_000]), timed(stamps_us={}, token_us=[])
    )
    assert tokens_of(exchange, BEGIN_NS) == [
        Token(0.502, 0.51),
        Token(0.505, 0.52),
        Token(0.509, 0.52),
    ]
    assert error_of(exchange) == ""


def test_a_row_counts_the_streams_that_ended_with_an_error_and_names_it():
    broken = stream_of(timed(token_us=[2_000]), {"error": {"code": "engine_error"}})
    whole = stream_of(timed(token_us=[2_000, 4_000]))
    row = figures_of([tokens_of(each, BEGIN_NS) for each in (broken, whole)], [broken, whole])
    assert row["streams"] == 2 and row["whole"] == 1 and row["error"] == "engine_error"
    assert row["tokens_each"] == 1.5 and row["reads"] == 2
    assert row["lag_max_ms"] == pytest.approx(8)
    assert row["made_gap_max_ms"] == pytest.approx(2) and longest_gap_ms([1.0]) == 0


def seen_of(name):
    tokens = [Token(i / 100, i / 90) for i in range(50)]
    row = {"error": "engine_error", "cpu_us_per_token": 10.0, "gap_p50_ms": 4.0, "gap_p99_ms": 9.0}
    return Seen(name, row, [tokens], (0.1, 0.3), [(0.1, 0.2, 200), (0.2, 0.001, 503)])


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_drawn(name, tmp_path):
    path = tmp_path / "x.png"
    draw(path, name, [seen_of("1"), seen_of("2")])
    assert path.read_bytes().startswith(b"\x89PNG") and 5_000 < path.stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "slots", "word"),
    [("coalesce", 256, "coalesced"), ("block", 256, "blocked_seconds"), ("drop", 256, "dropped")],
)
def test_a_small_ring_makes_its_policy_act(policy, slots, word):
    seen = asyncio.run(token_ring(policy, slots))
    row = seen.row
    assert row[word] > 0 and row["high_water"] == slots
    assert row["lag_max_ms"] >= 900  # a second's stop
    begin, end = seen.disturbed_s
    made = sum(begin + 0.3 < token.made_s < end for token in seen.streams[0])
    if policy == "coalesce":
        assert row["whole"] == row["streams"] and made >= 50
    elif policy == "block":
        assert row["whole"] == row["streams"] and row["made_gap_max_ms"] >= 90 and made < 50
    else:
        assert row["whole"] < row["streams"] and row["error"] == "engine_error"
