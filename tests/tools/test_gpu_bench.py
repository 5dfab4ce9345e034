"""The GPU bench in a dry run: every part gives its rows, a wrong operation is found, and the bars can fail."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_cases
import pytest
import torch
from bench_gpu import bars_of, step_ms
from gpu_speed import TOY

from shmserve.worker.cuda.ops import REFERENCE

pytestmark = pytest.mark.slow

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_gpu.py"
CPU = torch.device("cpu")


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dry_run_measures_every_part_and_judges_no_time(tmp_path):
    done = ran("--device", "cpu", "--toy", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    parts = {"ops", "bandwidth", "gap", "sample", "gemv", "step"}
    assert {row["part"] for row in rows} == parts
    ops = {field.name for field in dataclasses.fields(REFERENCE)} - {"name"}
    assert {row["op"] for row in rows if row["part"] == "ops"} == ops
    steps = [row for row in rows if row["part"] == "step"]
    assert [row["batch"] for row in steps] == list(TOY.batches)
    assert all(row["graph_ms"] > 0 and row["step_ms"] > 0 < row["floor_ms"] for row in steps)
    assert (
        "server: left out, no --model" in done.stdout
        and "floor" not in done.stdout.split("PASS")[-1]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_without_a_dry_run_it_says_so():
    done = ran("ops")
    assert done.returncode == 1 and "sees no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr


def wrong_norm(x, residual, weight, out, eps, unit_offset=False):
    REFERENCE.add_rms_norm(x, residual, weight, out, eps, unit_offset)
    out[-1, -1] += 0.5


def unmasked_attention(q, k, v, table, lens, out, scratch, scale, window=0, softcap=0.0):
    REFERENCE.decode_attention(q, k, v, table, lens, out, scratch, scale, 0, softcap)


def not_finite(gate_up, out, gelu=False):
    out.fill_(float("nan"))


def last_of_a_tie(*args):
    REFERENCE.sample(*args)
    args[7][1] = args[0].shape[1] - 1


@pytest.mark.parametrize(
    ("op", "broken"),
    [
        ("add_rms_norm", wrong_norm),
        ("decode_attention", unmasked_attention),
        ("gated_mul", not_finite),
        ("sample", last_of_a_tie),
    ],
)
def test_a_wrong_operation_fails_its_bar_and_no_other(op, broken):
    ops = dataclasses.replace(REFERENCE, **{op: broken})
    rows = gpu_cases.compare(ops, TOY.config, TOY.context, CPU, torch.float32)
    failed = [bar.name for bar in bars_of(rows, has_times=False) if not bar.holds]
    assert failed == [f"{op}, float32: error"]


def test_bars_of_times_fail_beyond_their_limits():
    gemv = {"part": "gemv", "share": 0.9, "gemv_us": 10.0, "mm_us": 9.0}
    rows = [{**gemv, "rows": 1}, {**gemv, "rows": 8}]
    rows += [{"part": "step", "batch": 1, "of_floor": 1.16}, {"part": "step", "batch": 32}]
    assert [bar.holds for bar in bars_of(rows, has_times=True)] == [False] * 3
    good = [{**row, "share": 0.95, "mm_us": 11.0, "of_floor": 1.1} for row in rows]
    assert [bar.holds for bar in bars_of(good, has_times=True)] == [True] * 3


def test_the_step_time_is_taken_where_all_streams_decode(tmp_path):
    def line(step, time_ms, num_rows):
        ids = [f"{n:016x}" for n in range(num_rows)]
        return json.dumps({"step": step, "time_ns": time_ms * 10**6, "req_ids": ids})

    log = tmp_path / "steps"
    told = [(1, 0, 1), (2, 50, 2), (3, 57, 2), (4, 64, 2), (6, 500, 2), (7, 508, 2), (8, 600, 1)]
    log.write_text("".join(line(*each) + "\n" for each in told))
    assert step_ms(log, 2) == 7.0 and step_ms(log, 3) is None
