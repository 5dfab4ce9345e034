"""bench_slow_client.py: what it reads out of a stream, and (slow) the promise itself: 50 that stop reading beside 4 that read."""

import json

import pytest
from bench_slow_client import MOST_BYTES_PER_STUCK, POLICIES, Client, bars_of, run_policy

SLACK = 5  # the machine of a test is not its own; the bench tells the true values


def client_with(*events, came=()):
    client = Client(0, 1, 10, "coalesce")
    client.sock.close()
    frames = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    client.data += b"".join(b"%x\r\n%b\r\n" % (len(f), f) for f in frames) + b"\r\n0\r\n\r\n"
    client.came += came
    return client


def test_text_error_and_intervals_are_those_of_the_wire():
    texts = [{"choices": [{"text": text}]} for text in ("a ", "b")]
    client = client_with(*texts, came=(1.0, 1.5, 1.75))
    assert client.text() == "a b" and client.error() == ""
    assert client.intervals_ms() == [500.0, 250.0]
    cut = client_with(*texts, {"error": {"code": "slow_client"}})
    assert cut.text() == "a b" and cut.error() == "slow_client"


def test_a_policy_that_did_nothing_fails_its_bars():
    row = {"policy": "block", "stuck": 50, "itl_p99_ratio": 1.0, "kib_per_stuck": 20.0}
    row |= {"counter": 0, "num_whole": 50, "num_cut": 0}
    assert [bar.holds for bar in bars_of(row)] == [True, True, False, True]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", POLICIES)
def test_fifty_that_stop_reading_are_bounded_told_and_not_felt_by_those_who_read_F3(
    default_model, policy
):
    row = run_policy(policy, num_stuck=50, num_readers=4, num_tokens=800, step_ms=5.0)
    assert row["itl_p99_ratio"] < 1.5 * SLACK
    assert row["kib_per_stuck"] * 1024 < MOST_BYTES_PER_STUCK
    assert row["counter"] >= 50
    assert row["paused"] == (50 if policy == "block" else 0)
    assert (row["num_cut"] if policy == "drop" else row["num_whole"]) == 50
