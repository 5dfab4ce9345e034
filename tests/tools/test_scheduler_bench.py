"""The step of bench_scheduler.py runs the real engine, and its bars are those of the parts that were measured."""

import pytest
import scheduler_run
from bench_scheduler import bars_of
from scheduler_run import Pace


@pytest.mark.parametrize("pace", [Pace("back_to_back", 0, 30, 1), Pace("back_to_back", 0, 20, 3)])
def test_every_token_comes_through_the_ring_and_its_cost_is_counted(pace):
    figures = scheduler_run.measure(3, pace)  # raises if the consumer did not get each token
    assert figures["step_us"] > figures["runner_us"] > 0
    assert figures["encode_ratio"] > 0
    assert figures["build_encode_ratio"] > 0


def test_parts_that_were_not_measured_have_no_bar():
    assert bars_of([]) == []
    assert bars_of([{"part": "step", "batch": 32, "pace": "paced"}]) == []


def test_bars_fail_beyond_their_limits():
    rows = [
        {"part": "prefix", "speedup": 7.9},
        {"part": "start", "ready_s": 6.1},
        {"part": "chunks", "prefill": "chunked", "itl_p99_ms": 30.0},
        {"part": "chunks", "prefill": "whole", "itl_p99_ms": 20.0},
    ]
    assert [bar.holds for bar in bars_of(rows)] == [False] * 3
