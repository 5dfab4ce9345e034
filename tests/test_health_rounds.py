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
from shmserve.health_rounds import AGAIN_S, EVERY_S, HealthRounds
from shmserve.posts import Post
from shmserve.progress import Reporter

S = 1_000_000_000


class Child:
    """What the rounds see of one."""

    name, pid, is_ready, grace_ns, silent_since_ns = "worker 0", 77, True, 0, 0

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
        self.due: list[tuple[int, Callable[[], None]]] = []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.due.append((self.now_ns + int(seconds * S), call))

    def pass_s(self, seconds: float) -> None:
        """So much time passes, and every timer is served when it is due."""
        end_ns = self.now_ns + int(seconds * S)
        while self.due and min(at for at, _ in self.due) <= end_ns:
            first = min(self.due, key=lambda timer: timer[0])
            self.due.remove(first)
            self.now_ns = first[0]
            first[1]()
        self.now_ns = end_ns

    def stand_still_s(self, seconds: float) -> None:
        """So much time passes in which nobody runs; then all timers that are due are served."""
        self.now_ns += int(seconds * S)
        for timer in [timer for timer in self.due if timer[0] <= self.now_ns]:
            self.due.remove(timer)
            timer[1]()


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
    for _ in range(60):
        scene.clock.pass_s(0.5)
        scene.child.beat()
    assert scene.post.state == "ready" and not scene.child.kills
    assert scene.said.getvalue() == ""


def test_a_silence_is_said_once_and_so_is_that_it_is_over(scene: Any) -> None:
    scene.clock.pass_s(EVERY_S + AGAIN_S)
    for _ in range(3):
        assert scene.post.state == "hung"
        scene.clock.pass_s(1)
    assert scene.said.getvalue().count("\n") == 1
    assert "worker 0 (pid 77) is hung: no heartbeat for 1.6 s" in scene.said.getvalue()
    scene.child.beat()
    scene.clock.pass_s(1)
    assert scene.post.state == "ready" and not scene.child.kills
    assert scene.said.getvalue().endswith("worker 0 (pid 77) goes on\n")


def test_whose_time_is_up_is_killed_with_the_reason_and_its_cause(scene: Any) -> None:
    scene.clock.pass_s(9)
    assert not scene.child.kills
    scene.clock.pass_s(1)
    assert scene.child.kills == [("no heartbeat for 10.0 s", "hung")]


@pytest.mark.parametrize("hang_timeout_s", [1.0, 10.0])
@pytest.mark.parametrize("seconds", [1.0, 1.7, 2.9])
def test_a_machine_that_stood_still_for_seconds_makes_nobody_hung(
    scene: Any, seconds: float, hang_timeout_s: float
) -> None:
    """As all do whose virtual machine is moved: the last heartbeats are old, and the next come within half a second."""
    scene.rounds._hang_timeout_s = hang_timeout_s
    for _ in range(5):
        scene.clock.stand_still_s(seconds)
        scene.clock.pass_s(0.5)
        scene.child.beat()
        scene.clock.pass_s(0.4)
        scene.child.beat()
        assert scene.post.state == "ready"
    assert not scene.child.kills and scene.said.getvalue() == ""


def test_who_died_silent_is_not_looked_at_again(scene: Any) -> None:
    scene.clock.pass_s(EVERY_S)
    scene.post.child, scene.post.state = None, "dead"
    scene.clock.pass_s(AGAIN_S)
    assert scene.post.state == "dead"


def test_a_stop_is_seen_when_the_kernel_tells_and_not_only_a_second_later(scene: Any) -> None:
    scene.child.seen = replace(scene.child.seen, stopped_ns=scene.clock.now_ns)
    scene.rounds.judge(scene.post, scene.child)
    assert (scene.post.state, scene.post.reason) == ("stopped", "stopped by a signal for 0.0 s")


@pytest.mark.parametrize("is_overslept", [False, True])
def test_a_supervisor_that_was_stopped_itself_blames_nobody(scene: Any, is_overslept: bool) -> None:
    """All of an instance was stopped for a minute, as by Ctrl-Z: nobody could beat. One second later everybody can have."""
    if is_overslept:
        scene.clock.stand_still_s(60)
    else:
        scene.clock.pass_s(60)
    assert bool(scene.child.kills) is not is_overslept
    assert scene.post.state == ("ready" if is_overslept else "hung")


def test_an_empty_post_is_passed_over(scene: Any) -> None:
    scene.post.child, scene.post.state = None, "dead"
    scene.clock.pass_s(60)
    assert scene.post.state == "dead"
