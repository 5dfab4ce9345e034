"""The supervisor's rounds over children that are only told, by a clock that is only told: who is killed, what is said, when ages count."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve import health_rounds
from shmserve.boards import Phase
from shmserve.children import WORKER
from shmserve.health import RestartPolicy, Vitals
from shmserve.health_rounds import EVERY_S, HealthRounds
from shmserve.posts import Post
from shmserve.progress import Reporter

S = 1_000_000_000


class Child:
    """What the rounds see of one."""

    name, pid, is_ready, grace_ns = "worker 0", 77, True, 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seen = Vitals(clock.now_ns, Phase.IDLE, clock.now_ns, S // 100, 0, 0, True)
        self.kills: list[tuple[str, str]] = []

    def vitals(self) -> Vitals:
        return replace(self.seen, grace_ns=self.grace_ns)

    def kill(self, reason: str, cause: str) -> None:
        self.kills.append((reason, cause))

    def beat(self) -> None:
        self.seen = replace(self.seen, heartbeat_ns=self._clock.now_ns)


class Clock:
    """The time, and the loop's timers."""

    def __init__(self) -> None:
        self.now_ns = 5_000 * S
        self.due: list[tuple[float, Callable[[], None]]] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.due.append((seconds, call))

    def pass_s(self, seconds: float) -> None:
        """So much time is over, and the one timer is served."""
        self.now_ns += int(seconds * S)
        ((wait_s, call),) = self.due
        assert wait_s == EVERY_S
        self.due.clear()
        call()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that serves, and the rounds over it, with a hang timeout of 10 s."""
    clock, said = Clock(), io.StringIO()
    monkeypatch.setattr(health_rounds, "time", clock)
    child: Any = Child(clock)
    post = Post(WORKER, 0, False, RestartPolicy(1.0), child=child, state="ready")

    def set_state(post: Post, state: str, reason: str = "") -> None:
        post.state, post.reason = state, reason

    loop: Any = clock
    rounds = HealthRounds([post], 10.0, loop=loop, reporter=Reporter(said), set_state=set_state)
    rounds.keep_watch()
    return SimpleNamespace(clock=clock, child=child, post=post, rounds=rounds, said=said)


def test_who_is_well_is_looked_at_every_second_and_nothing_is_said(scene: Any) -> None:
    for _ in range(30):
        scene.clock.now_ns += 3 * S // 4
        scene.child.beat()
        scene.clock.pass_s(0.25)
    assert scene.post.state == "ready" and not scene.child.kills
    assert scene.said.getvalue() == ""


def test_a_silence_is_said_once_and_so_is_that_it_is_over(scene: Any) -> None:
    for _ in range(3):
        scene.clock.pass_s(1)
        assert scene.post.state == "hung"
    assert scene.said.getvalue().count("\n") == 1
    assert "worker 0 (pid 77) is hung: no heartbeat for 1.0 s" in scene.said.getvalue()
    scene.child.beat()
    scene.clock.pass_s(0.5)
    assert scene.post.state == "ready" and not scene.child.kills
    assert scene.said.getvalue().endswith("worker 0 (pid 77) goes on\n")


def test_whose_time_is_up_is_killed_with_the_reason_and_its_cause(scene: Any) -> None:
    for _ in range(9):
        scene.clock.pass_s(1)
    assert not scene.child.kills
    scene.clock.pass_s(1)
    assert scene.child.kills == [("no heartbeat for 10.0 s", "hung")]


def test_a_stop_is_seen_when_the_kernel_tells_and_not_only_a_second_later(scene: Any) -> None:
    scene.child.seen = replace(scene.child.seen, stopped_ns=scene.clock.now_ns)
    scene.rounds.judge(scene.post, scene.child)
    assert (scene.post.state, scene.post.reason) == ("stopped", "stopped by a signal for 0.0 s")


@pytest.mark.parametrize("is_overslept", [False, True])
def test_a_supervisor_that_was_stopped_itself_blames_nobody(scene: Any, is_overslept: bool) -> None:
    """All of an instance was stopped for a minute, as by Ctrl-Z: nobody could beat. One second later everybody can have."""
    if is_overslept:
        scene.clock.pass_s(60)
    else:
        for _ in range(60):
            scene.clock.pass_s(1)
    assert bool(scene.child.kills) is not is_overslept
    assert scene.post.state == ("ready" if is_overslept else "hung")


def test_an_empty_post_is_passed_over(scene: Any) -> None:
    scene.post.child, scene.post.state = None, "dead"
    scene.clock.pass_s(60)
    assert scene.post.state == "dead"
