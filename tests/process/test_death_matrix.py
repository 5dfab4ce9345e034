"""Every process, every kind of death, every phase: what clients get, who comes back, and that nothing is left.

Real processes and real signals over the simulated runner: one server a cell, and one that goes through several deaths. All of it is
`make test-all`'s.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import Ask, metric, status_of
from scene import PHASES, Scene
from strange_worker import SEEDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_model")]

each_phase = pytest.mark.parametrize("phase", PHASES)
each_death = pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSEGV))


@pytest.fixture
def scene(start: Any, until: Any, words_of: Any, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """scene(phase, **config): a server in that phase."""
    scenes: list[Scene] = []

    def begin(phase: str, **config: Any) -> Scene:
        folder = tmp_path / f"strange-{len(scenes)}"
        folder.mkdir()
        scenes.append(Scene(start, folder, until, words_of, phase, **config))
        return scenes[-1].begin()

    yield begin
    for each in scenes:
        each.let_go()
        for ask in each.asks:
            ask.leave()


# --- several deaths of one instance


def test_an_instance_with_32_streams_outlives_every_death_but_the_supervisors(
    scene: Any, is_alive: Any
) -> None:
    s = scene("decode")
    for role in ("http", "worker"):  # theirs to ignore
        s.kill(role, signal.SIGTERM)
    s.kill("http", signal.SIGSEGV)
    assert s.outcomes() == {"broken"}
    s.expect_successor("http")
    s.until(s.is_empty, "the sequences of the dead front end are freed")

    s.fill("decode")
    s.kill("supervisor", signal.SIGSTOP)
    s.kill("worker", signal.SIGKILL)
    s.kill("supervisor", signal.SIGCONT)  # it hears of the death now
    assert s.outcomes() == {"error"}
    assert status_of(s.port, "/health")[0] == 503
    s.expect_successor("worker")
    s.expect_service()
    rows = {row["role"]: row for row in s.server.status()["children"]}
    assert [rows[role]["causes"] for role in ("http", "worker")] == [{"signal": 1}] * 2
    assert "SIGSEGV" in rows["http"]["last_death"]
    assert metric(s.port, 'shmserve_restarts_total{cause="signal",role="worker"}') == 1
    assert metric(s.port, 'shmserve_restarts_total{cause="hung",role="worker"}') == 0

    s.fill("decode")
    s.kill("supervisor", signal.SIGKILL)
    assert s.outcomes() == {"error"}
    s.expect_nothing_left(is_alive)


# --- the matrix


@each_phase
def test_supervisor_told_to_end_drains(scene: Any, phase: str) -> None:
    s = scene(phase)
    s.kill("supervisor", signal.SIGTERM)
    s.until(lambda: "draining" in s.server.output(), "draining")
    if phase == "prefill":
        s.until(lambda: status_of(s.port, "/ready")[0] == 503, "the front end has heard of it")
        s.let_go()
    assert s.outcomes() <= {"done"}
    s.expect_end()


@each_phase
@each_death
def test_supervisor_that_dies_takes_everything_along(
    scene: Any, is_alive: Any, phase: str, number: int
) -> None:
    s = scene(phase)
    s.kill("supervisor", number)
    assert s.outcomes() <= {"error"}
    s.expect_nothing_left(is_alive)


@each_phase
def test_supervisor_that_is_stopped_is_not_missed(scene: Any, phase: str) -> None:
    s = scene(phase)
    s.kill("supervisor", signal.SIGSTOP)
    s.let_go()
    assert s.outcomes() <= {"done"}
    if phase == "loading":  # who is ready is the supervisor's news
        assert status_of(s.port, "/health")[0] == 503
    else:
        assert Ask(s.port, max_tokens=5).outcome() == "done"
    assert status_of(s.port, "/live")[0] == 200
    s.kill("supervisor", signal.SIGCONT)
    s.until(lambda: status_of(s.port, "/ready")[0] == 200, "ready")
    assert s.is_as_before("http", "worker")
    s.expect_good_end()


@each_phase
@pytest.mark.parametrize("role", ["http", "worker"])
def test_children_ignore_what_a_terminal_sends(scene: Any, role: str, phase: str) -> None:
    s = scene(phase)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        s.kill(role, number)
    s.let_go()
    assert s.outcomes() <= {"done"}
    s.server.wait_ready()
    assert s.is_as_before("http", "worker")
    s.expect_good_end()


@each_phase
@each_death
def test_front_end_that_dies_is_followed_and_its_sequences_are_freed(
    scene: Any, phase: str, number: int
) -> None:
    s = scene(phase)
    s.kill("http", number)
    assert status_of(s.port, "/live")[0] in (0, 200)  # refused it never is
    assert s.outcomes() <= {"broken"}
    s.expect_successor("http")
    s.expect_good_end()


@each_phase
def test_front_end_that_is_stopped_is_reported_and_goes_on(scene: Any, phase: str) -> None:
    s = scene(phase)
    s.kill("http", signal.SIGSTOP)
    s.until(lambda: s.server.child("http")["state"] == "stopped", "the news")
    s.let_go()
    s.kill("http", signal.SIGCONT)
    s.until(lambda: s.server.child("http")["state"] == "ready", "the news")
    assert s.outcomes() <= {"done"}
    s.server.wait_ready()
    assert s.is_as_before("http", "worker")
    s.expect_good_end()


@each_phase
@each_death
def test_worker_that_dies_fails_its_requests_well_and_is_followed(
    scene: Any, phase: str, number: int
) -> None:
    s = scene(phase)
    s.kill("worker", number)
    assert s.outcomes() <= {"error"}
    s.until(lambda: s.worker_row()["pid"] != s.pids["worker"], "it is missed")
    found = s.until(lambda: (h := status_of(s.port, "/health"))[0] == 503 and h, "unhealthy")
    assert int(found[1]) > 0
    assert Ask(s.port, max_tokens=5).outcome() == "error"
    s.expect_successor("worker")
    s.expect_good_end()


@each_phase
def test_worker_that_is_stopped_is_unhealthy_and_goes_on(scene: Any, phase: str) -> None:
    s = scene(phase)
    s.kill("worker", signal.SIGSTOP)
    s.until(lambda: s.worker_row()["state"] == "stopped", "the news")
    s.until(lambda: status_of(s.port, "/health")[0] == 503, "unhealthy")
    s.let_go()
    s.kill("worker", signal.SIGCONT)
    s.until(lambda: status_of(s.port, "/health")[0] == 200, "healthy")
    assert s.outcomes() <= {"done"}
    assert s.is_as_before("http", "worker")
    s.expect_good_end()


@each_phase
@pytest.mark.parametrize(("role", "outcome"), [("http", "broken"), ("worker", "error")])
def test_child_that_stays_stopped_is_killed_and_followed(
    scene: Any, role: str, outcome: str, phase: str
) -> None:
    s = scene(phase, hang_timeout_s=1.0)
    s.kill(role, signal.SIGSTOP)
    assert s.outcomes() <= {outcome}
    s.expect_successor(role)
    assert s.server.child(role)["causes"] == {"stopped": 1}
    s.expect_good_end()


@pytest.mark.parametrize("phase", ["idle", "decode"])
def test_stopped_children_do_not_outlive_the_supervisor(
    scene: Any, is_alive: Any, phase: str
) -> None:
    s = scene(phase)
    s.kill("http", signal.SIGSTOP)
    s.kill("worker", signal.SIGSTOP)
    s.kill("supervisor", signal.SIGKILL)
    assert s.outcomes() <= {"error"}
    s.expect_nothing_left(is_alive)


def test_nobody_waits_for_clients_that_do_not_read(scene: Any, is_alive: Any) -> None:
    """The supervisor dies while streams are stuck: their errors cannot be written, and everything ends all the same."""
    s = scene("idle", worker={"step_ms": 1.0})
    s.asks = [Ask(s.port, max_tokens=8_000, receive_buffer=4096) for _ in range(4)]
    s.until(lambda: s.words("http")["mailbox_bytes"] > 0, "one is stuck")
    s.kill("supervisor", signal.SIGKILL)
    s.expect_nothing_left(is_alive)


# --- hangs, and what is none


def hang(s: Scene, how: str) -> Ask:
    return Ask(s.port, seed=SEEDS[how], max_tokens=50)


def test_a_step_that_hangs_is_ended_and_one_that_is_long_is_not(scene: Any) -> None:
    """The long one takes three times the hang timeout, and is the first of its kind: the warm-up has told what a token costs."""
    budget = {"max_num_batched_tokens": 2048}
    s = scene("idle", token_ms=1.5, worker=budget, hang_timeout_s=1.0)
    long_prefill = Ask(s.port, prompt=[19556] * 2000, max_tokens=2)
    assert long_prefill.outcome() == "done"
    assert s.words("worker")["slowest_step_ns"] >= 3e9
    assert s.is_as_before("worker")
    assert hang(s, "hangs").outcome() == "error"
    s.expect_successor("worker")
    row = s.worker_row()
    assert row["causes"] == {"hung": 1}
    assert "one decode step runs for" in row["last_death"]
    s.expect_service()


def test_a_worker_whose_heart_stops_is_unhealthy_at_once_and_then_ended(scene: Any) -> None:
    s = scene("idle", hang_timeout_s=3.0)
    ask = hang(s, "hangs_holding_the_interpreter")
    s.until(lambda: s.worker_row()["state"] == "hung", "the news")
    s.until(lambda: status_of(s.port, "/health")[0] == 503, "unhealthy")
    assert ask.outcome() == "error"
    s.expect_successor("worker")
    assert "no heartbeat for" in s.worker_row()["last_death"]


def test_a_step_that_raises_ends_the_worker_with_its_words(scene: Any) -> None:
    s = scene("idle")
    assert hang(s, "raises").outcome() == "error"
    s.expect_successor("worker")
    row = s.worker_row()
    assert row["causes"] == {"failed": 1}
    assert "RuntimeError: the device is on fire" in row["last_death"]


# --- rings that cannot be believed


@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        ("lies_about_tokens", "worker"),
        ("lies_about_submit_credits", "worker"),
        ("writes_nonsense", "worker"),
        ("is_lied_to", "http"),
    ],
)
def test_who_breaks_a_ring_is_started_anew_on_a_new_channel(
    scene: Any, how: str, culprit: str
) -> None:
    s = scene("idle")
    (before,) = s.server.status()["channels"]
    ask = hang(s, how)
    if how == "lies_about_submit_credits":  # found out when the next request is written
        ask.wait_first()
        many = [Ask(s.port, prompt=[5] * 6000, max_tokens=1) for _ in range(80)]
        assert "error" in {each.outcome() for each in many}
    assert ask.outcome() == ("error" if culprit == "worker" else "broken")
    s.expect_successor(culprit)
    row = s.server.child(culprit)
    assert row["causes"] == {"protocol": 1}
    assert "cannot believe it" in row["last_death"]
    (after,) = s.server.status()["channels"]
    assert after["epoch"] > before["epoch"]
    s.expect_service()
