"""The workload and the bars of bench_affinity.py, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_affinity import END_TOKENS, Workload, bars_of, main
from click.testing import CliRunner

SMALL = Workload(num_prefixes=3, prefix_tokens=40, num_repeats=4, num_clients=2, max_tokens=1)


def test_each_beginning_comes_as_often_as_asked_with_an_end_of_its_own() -> None:
    prompts = SMALL.prompts(1)
    assert len(prompts) == 12 and {len(each) for each in prompts} == {40 + END_TOKENS}
    beginnings = [tuple(each[:40]) for each in prompts]
    assert sorted(beginnings.count(each) for each in set(beginnings)) == [4, 4, 4]
    assert len({tuple(each) for each in prompts}) == 12
    assert beginnings != sorted(beginnings), "they are mixed"


def test_a_round_is_the_same_each_time_and_shares_nothing_with_another() -> None:
    assert SMALL.prompts(1) == SMALL.prompts(1)
    one, other = ({tuple(p[:16]) for p in SMALL.prompts(seed)} for seed in (1, 2))
    assert not one & other


def test_the_bars_compare_with_round_robin() -> None:
    ours = {"routing": "affinity", "hit_rate": 0.8, "ttft_p50_ms": 20.0, "busiest": 1.1}
    theirs = {"routing": "round-robin", "hit_rate": 0.5, "ttft_p50_ms": 50.0, "busiest": 1.0}
    assert [bar.holds for bar in bars_of([theirs, ours])] == [True, True, True]
    ours |= {"hit_rate": 0.5, "ttft_p50_ms": 50.0, "busiest": 2.0}
    assert [bar.holds for bar in bars_of([ours, theirs])] == [False, False, False]


@pytest.mark.slow
@pytest.mark.timeout(180)  # three servers are started
def test_a_small_run_finds_more_hits_with_affinity(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    words = "--prefixes=6 --prefix-tokens=256 --repeats=4 --clients=2 --max-tokens=2 --rounds=1 --budget=64"
    done = CliRunner().invoke(main, [*words.split(), "--step-ms=2", f"--json={path}"])
    assert "affinity" in done.output, (done.output, done.exception)
    rows = {row["routing"]: row for row in json.loads(path.read_text())}
    assert set(rows) == {"affinity", "round-robin", "least-busy"}
    assert rows["affinity"]["hit_rate"] > rows["round-robin"]["hit_rate"]
    assert rows["affinity"]["hit_rate"] <= 256 / (256 + END_TOKENS)
