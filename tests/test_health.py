"""The rules of health and restarts, on made-up vitals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shmserve.boards import Phase
from shmserve.health import RestartPolicy, Verdict, Vitals, examine

S = 1_000_000_000
NOW = 10_000 * S
HANG_TIMEOUT_S = 60.0
WELL = Vitals(
    heartbeat_ns=NOW - S // 4,
    phase=Phase.DECODE,
    phase_since_ns=NOW - S // 100,
    expected_step_ns=S // 100,
    grace_ns=NOW - 500 * S,
    stopped_ns=0,
    is_ready=True,
)


def verdict(**changes: object) -> Verdict:
    return examine(replace(WELL, **changes), NOW, HANG_TIMEOUT_S)  # type: ignore[arg-type]


def test_beating_heart_is_well() -> None:
    assert verdict() == Verdict("ok")


def test_heartbeat_is_late_after_a_second_and_fatal_after_the_hang_timeout() -> None:
    assert verdict(heartbeat_ns=NOW - S + 1).state == "ok"
    assert verdict(heartbeat_ns=NOW - S) == Verdict(
        "hung", "no heartbeat for 1.0 s", is_silence=True
    )
    assert verdict(heartbeat_ns=NOW - 60 * S).must_end


def test_idle_for_hours_is_well() -> None:
    idle = verdict(phase=Phase.IDLE, phase_since_ns=NOW - 9_000 * S)
    assert idle.state == "ok"


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_step_longer_than_the_hang_timeout_is_fatal(phase: Phase) -> None:
    assert verdict(phase=phase, phase_since_ns=NOW - 59 * S).state == "ok"
    late = verdict(phase=phase, phase_since_ns=NOW - 60 * S)
    assert late.state == "hung"
    assert late.must_end


def test_slow_steps_of_the_past_give_a_long_step_more_time() -> None:
    """A prefill of a minute is no hang where steps of 20 s are known."""
    slow = 20 * S
    assert verdict(expected_step_ns=slow, phase_since_ns=NOW - 199 * S).state == "ok"
    assert verdict(expected_step_ns=slow, phase_since_ns=NOW - 200 * S).must_end


def test_loading_may_hold_the_interpreter_for_seconds_but_not_for_ever() -> None:
    loading = {"is_ready": False, "phase": Phase.LOADING, "phase_since_ns": NOW - 300 * S}
    assert verdict(**loading, heartbeat_ns=NOW - 30 * S).state == "ok"
    silent = verdict(**loading, heartbeat_ns=NOW - 100 * S)
    assert (silent.state, silent.must_end) == ("hung", False)
    assert verdict(**loading | {"phase_since_ns": NOW - 600 * S, "grace_ns": 0}).must_end


def test_child_without_a_first_heartbeat_is_judged_by_its_birth() -> None:
    newborn = {"is_ready": False, "phase": 0, "phase_since_ns": 0, "heartbeat_ns": 0}
    assert verdict(**newborn, grace_ns=NOW - 5 * S).state == "ok"
    assert verdict(**newborn, grace_ns=NOW - 600 * S).must_end


def test_no_age_counts_from_before_the_grace() -> None:
    """Continued just now: its old heartbeat and its old step are no fault."""
    old = {"heartbeat_ns": NOW - 400 * S, "phase_since_ns": NOW - 400 * S}
    assert verdict(**old).must_end
    assert verdict(**old, grace_ns=NOW - S // 10).state == "ok"


def test_stopped_child_is_stopped_and_not_hung_until_its_time_is_up() -> None:
    stopped = verdict(stopped_ns=NOW - 30 * S, heartbeat_ns=NOW - 30 * S)
    assert (stopped.state, stopped.must_end) == ("stopped", False)
    assert verdict(stopped_ns=NOW - 60 * S).must_end


def test_worker_restarts_back_off_and_give_up_at_the_fifth_death() -> None:
    policy = RestartPolicy(first_delay_s=1.0)
    assert [policy.died(float(t)) for t in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_front_end_comes_back_at_once_the_first_time() -> None:
    policy = RestartPolicy(first_delay_s=0.0)
    assert [policy.died(float(t)) for t in range(5)] == [0.0, 1.0, 2.0, 4.0, None]


def test_old_deaths_are_forgotten_but_counted() -> None:
    policy = RestartPolicy(first_delay_s=1.0)
    assert [policy.died(400.0 * t) for t in range(8)] == [1.0] * 8
    assert policy.num_deaths == 8


def test_deaths_at_the_border_of_the_window_give_up_only_inside_it() -> None:
    policy = RestartPolicy(first_delay_s=1.0)
    for at in (0.0, 1.0, 2.0, 3.0):
        policy.died(at)
    assert policy.died(300.0) == 8.0  # the first was 300 s ago
    assert policy.died(300.5) is None
