"""Workers beside one another, as the supervisor starts them: each on a GPU of its own, or none at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

GPUS = {"CUDA_VISIBLE_DEVICES": "4,7"}


def seen_by(pid: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (found,) = [word for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return found.partition(b"=")[2].decode()


@pytest.mark.slow
def test_each_worker_sees_its_own_gpu_and_so_does_the_next_in_its_place(
    start: Any, until: Any
) -> None:
    server = start(config={"num_workers": 2}, extra_environ=GPUS)
    server.wait_ready()
    first = server.pids("worker")
    assert [seen_by(pid) for pid in first] == ["4", "7"]
    assert [seen_by(pid) for pid in server.pids("http")] == ["4,7"]
    (victim,) = [pid for pid in first if seen_by(pid) == "7"]
    os.kill(victim, signal.SIGKILL)
    until(lambda: server.status()["children"][2]["pid"] not in (0, victim), "worker 1")
    assert seen_by(server.pids("worker")[1]) == "7"


def test_more_workers_than_gpus_are_refused_before_anything_is_started(start: Any) -> None:
    server = start(config={"num_workers": 3}, extra_environ=GPUS)
    assert server.process.wait(30) == 1
    assert "--workers 3 needs 3 GPUs, and 2 can be seen (CUDA_VISIBLE_DEVICES)" in server.output()
    assert server.leftovers() == []


@pytest.mark.slow
def test_on_the_cpu_gpus_do_not_count(start: Any) -> None:
    server = start(config={"num_workers": 3, "worker": {"runner": "cpu"}}, extra_environ=GPUS)
    server.wait_ready()
    assert len(server.pids("worker")) == 3
