"""The supervisor over fake children: who dies, is stopped or hangs, who is told, and who comes back."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.rings.observe import RingView

Start = Callable[..., Any]


def test_killed_worker_is_told_and_replaced_on_a_new_channel(start: Start, until: Any) -> None:
    server = start()
    before = server.wait_ready()
    http, worker = server.pids()
    os.kill(worker, signal.SIGKILL)
    until(lambda: "dead" in server.told()["states"], "the news")
    until(lambda: server.told()["states"][-1] == "ready", "a new worker")
    old = before["channels"][0]["epoch"]
    until(lambda: server.told()["channels"]["0-0"] > old, "a new channel")
    assert server.pids("worker")[0] not in (0, worker)
    told = server.told()
    assert server.pids("http") == [http]
    since_death = told["states"][told["states"].index("dead") :]
    assert [state for state, _ in itertools.groupby(since_death)] == ["dead", "loading", "ready"]
    assert told["closed"] == [before["channels"][0]["epoch"]]
    assert told["channels"]["0-0"] > told["closed"][0]
    after = server.status()
    assert not set(server.segments()) & {before["channels"][0][k] for k in ("submit", "tokens")}
    assert after["children"][1]["deaths"] == 1
    assert "killed by SIGKILL" in server.output()
    ring = RingView(after["channels"][0]["submit"])
    until(
        lambda: (ring.stats().has_producer, ring.stats().has_consumer) == (True, True), "its ends"
    )
    ring.close()


def test_killed_front_end_is_replaced_and_the_port_never_refuses(start: Start, until: Any) -> None:
    server = start()
    before = server.wait_ready()
    http, worker = server.pids()
    os.kill(http, signal.SIGKILL)
    told = server.told()  # waits in the backlog: it is never refused
    assert told["pid"] != http
    until(lambda: server.status()["state"] == "ready", "ready again")
    after = server.status()
    assert server.pids("worker") == [worker]
    assert after["channels"][0]["epoch"] > before["channels"][0]["epoch"]
    until(
        lambda: server.told()["workers"].get("0", {}).get("state") == "ready",
        "the news of the worker",
    )


def test_supervisor_killed_leaves_no_process_and_the_next_start_works(
    start: Start, is_alive: Any, until: Any, free_port: int
) -> None:
    server = start(config={"http": {"port": free_port}})
    server.wait_ready()
    pids = server.pids()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    second = start(config={"http": {"port": free_port}}, name=server.name)
    status = second.wait_ready()
    until(lambda: not any(is_alive(pid) for pid in pids), "the first one's children end")
    assert len(second.segments()) == 5  # two rings and three boards: one set
    assert status["channels"][0]["epoch"] > 1  # no name of the former run comes again


@pytest.mark.slow
def test_segments_of_a_living_instance_survive_another_start(start: Start) -> None:
    first = start()
    first.wait_ready()
    segments = first.segments()
    second = start()
    second.wait_ready()
    assert first.segments() == segments
    assert first.status()["state"] == "ready"


@pytest.mark.slow
def test_killed_all_at_once_leaves_one_set_after_the_next_start(start: Start) -> None:
    name = f"test-{os.getpid()}-again"
    for _ in range(3):
        server = start(name=name)
        server.wait_ready()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    last = start(name=name)
    last.wait_ready()
    assert len(last.segments()) == 5


def test_stopped_worker_is_reported_at_once_and_again_when_it_goes_on(
    start: Start, until: Any
) -> None:
    server = start()
    server.wait_ready()
    (worker,) = server.pids("worker")
    os.kill(worker, signal.SIGSTOP)
    until(lambda: server.told()["workers"]["0"]["state"] == "stopped", "stopped")
    assert server.status()["state"] == "degraded"
    os.kill(worker, signal.SIGCONT)
    until(lambda: server.told()["workers"]["0"]["state"] == "ready", "ready again")
    assert server.status()["state"] == "ready"
    assert server.pids("worker") == [worker]
    assert "hung" not in server.told()["states"]


@pytest.mark.slow
def test_worker_stopped_for_too_long_is_killed_and_replaced(start: Start, until: Any) -> None:
    server = start(config={"hang_timeout_s": 1.0})
    server.wait_ready()
    (worker,) = server.pids("worker")
    os.kill(worker, signal.SIGSTOP)
    until(lambda: server.pids("worker")[0] not in (0, worker), "a new worker")
    assert "stopped by a signal" in server.output()


@pytest.mark.slow
def test_instance_stopped_as_a_whole_goes_on_without_a_death(start: Start, until: Any) -> None:
    server = start(config={"hang_timeout_s": 1.0})
    server.wait_ready()
    pids = server.pids()
    os.killpg(server.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError):
        server.status(timeout_s=4.0)  # nobody answers: and 4 s is more than the hang timeout
    os.killpg(server.pid, signal.SIGCONT)
    until(lambda: server.status()["state"] == "ready", "ready again")
    assert server.pids() == pids


@pytest.mark.slow
def test_worker_that_dies_five_times_ends_the_instance_with_the_reason(start: Start) -> None:
    server = start(modes={"http": "crashes"})
    assert server.wait() == 1
    (line,) = [line for line in server.output().splitlines() if "error:" in line]
    assert "exited with code 3" in line
    assert server.output().count("died") == 5
    assert server.leftovers() == []


@pytest.mark.slow
def test_restarts_that_do_not_help_end_the_instance_with_the_reason(start: Start) -> None:
    """With three deaths and short delays, so that it does not take long: the loop of restarts is guarded."""
    server = start(
        modes={"worker": "crashes_when_ready"},
        restarts={"MOST_DEATHS": 3, "LONGEST_DELAY_S": 0.1},
    )
    assert server.wait() == 1
    (line,) = [line for line in server.output().splitlines() if "error:" in line]
    assert "worker 0" in line and "exited with code 5" in line
    assert "3 deaths in 300 s are too many" in line
    assert server.output().count("the next one starts in 0.1 s") == 2
    assert server.leftovers() == []


@pytest.mark.slow
def test_child_that_leaves_its_link_is_a_death_with_its_exit_code(start: Start, until: Any) -> None:
    server = start(modes={"worker": "crashes_when_ready"})
    until(lambda: "worker 0" in server.output() and "died" in server.output(), "a death")
    assert "exited with code 5" in server.output()


@pytest.mark.slow
def test_worker_dying_in_a_drain_does_not_come_back(start: Start, until: Any) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    http, worker = server.pids()
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: server.told()["draining"], "draining")
    os.kill(worker, signal.SIGKILL)
    until(lambda: server.told()["closed"], "the channel is closed")
    os.kill(http, signal.SIGUSR1)
    assert server.wait() == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_two_front_ends_and_two_workers_are_all_pairs(start: Start, until: Any) -> None:
    server = start(config={"num_http": 2, "num_workers": 2})
    status = server.wait_ready()
    pairs = [(channel["http"], channel["worker"]) for channel in status["channels"]]
    assert sorted(pairs) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    victim = status["children"][3]
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: server.status()["children"][3]["pid"] not in (0, victim["pid"]), "worker 1")
    until(lambda: server.status()["state"] == "ready", "ready again")
    assert len(server.status()["channels"]) == 4
    assert len(server.segments()) == 8 + 5


@pytest.mark.slow
def test_a_successor_that_cannot_be_started_is_tried_again_and_the_others_serve_on(
    start: Start, until: Any, tmp_path: Path
) -> None:
    """No room for a process, or for its board; or the interpreter is being replaced by an upgrade."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    server = start(
        interpreter=str(interpreter), restarts={"MOST_DEATHS": 1000, "LONGEST_DELAY_S": 1.0}
    )
    server.wait_ready()
    http, worker = server.pids()
    away = interpreter.rename(tmp_path / "away")
    os.kill(worker, signal.SIGKILL)
    until(lambda: "cannot start worker 0: " in server.output(), "the failure")
    assert server.told()["workers"]["0"]["state"] == "dead"
    away.rename(interpreter)
    until(lambda: server.status()["state"] == "ready", "ready again")
    assert server.pids("http") == [http]
    causes = server.child("worker")["causes"]
    assert causes["signal"] == 1 and causes["failed"] >= 1
