"""Clocks, noise and tables of the benches."""

import json
import os
import subprocess
import sys
import time

import bench_common
import pytest
from bench_common import (
    Bar,
    NoiseWatch,
    children_of,
    median,
    noise_sentence,
    percentile,
    pin,
    print_bars,
    print_table,
    process_cpu_ns,
    write_json,
)

SPIN = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


@pytest.fixture
def spinning():
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    yield process
    process.kill()
    process.wait()


def test_cpu_of_a_process_is_its_own_use_and_nothing_once_it_is_gone(spinning):
    while process_cpu_ns(spinning.pid) < 50_000_000:
        time.sleep(0.01)
    before = process_cpu_ns(os.getpid())
    sum(range(300_000))
    assert process_cpu_ns(os.getpid()) > before
    spinning.kill()
    spinning.wait()
    assert process_cpu_ns(spinning.pid) == 0


def test_children_are_found_with_their_command_lines(spinning):
    assert "while time.monotonic()" in children_of(os.getpid())[spinning.pid]
    assert spinning.pid not in children_of(spinning.pid)


def test_own_children_are_not_noise(spinning, monkeypatch):
    while process_cpu_ns(spinning.pid) < 20_000_000:
        time.sleep(0.01)
    monkeypatch.setattr(bench_common, "_host_idle_s", lambda: (0.0, 2))  # two cores, never idle
    for _ in range(20):
        begin_ns, begin_cpu_ns = time.monotonic_ns(), process_cpu_ns(spinning.pid)
        watch = NoiseWatch()
        began_ns = time.monotonic_ns()
        time.sleep(0.5)
        ends_ns = time.monotonic_ns()
        noise = watch.cores()
        end_ns, end_cpu_ns = time.monotonic_ns(), process_cpu_ns(spinning.pid)
        if (began_ns - begin_ns) + (end_ns - ends_ns) < 10_000_000:
            break  # else we stood still between two readings, and they are of two spans of time
    used = (end_cpu_ns - begin_cpu_ns) / (end_ns - begin_ns)
    assert noise == pytest.approx(2 - used, abs=0.25)


def test_pin_moves_every_thread(spinning):
    core = min(os.sched_getaffinity(0))
    pin(spinning.pid, core)
    assert os.sched_getaffinity(spinning.pid) == {core}


def test_percentile_is_linear_between_ranks():
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)


def test_median_skips_what_is_missing():
    assert median([None, 3.0, 1.0, None, 2.0]) == 2.0
    assert median([None]) is None


def test_noise_above_the_limit_is_said():
    assert noise_sentence([0.1, 0.21]).startswith("NOISY: other processes used up to 0.21 cores")
    assert noise_sentence([0.1]).startswith("quiet")


def test_a_bar_without_a_value_does_not_hold(capsys):
    bars = [Bar("a", 1.0, 1.0), Bar("b", 0.9, 1.0, at_most=False), Bar("c", None, 1.0)]
    assert not print_bars(bars)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "PASS",
        "FAIL",
        "FAIL",
    ]


def test_table_header_is_the_keys_of_the_json_file(capsys, tmp_path):
    rows = [{"batch": 1, "c_us": 7.25, "name": "x"}, {"batch": 256, "c_us": None, "name": "yy"}]
    print_table(rows)
    header, _, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["batch", "c_us", "name"]
    assert first.split() == ["1", "7.25", "x"]
    assert second.split() == ["256", "-", "yy"]
    write_json(str(tmp_path / "rows.json"), rows)
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
