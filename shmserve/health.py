"""Is a child alive, stopped or hung, and is its time up? And when may one that died be started again?

Owns: the rules, as pure functions of what the boards and the kernel say. Never: looks at a clock, a board or a process.

    stopped    the kernel said so (WSTOPPED)                        killed after hang_timeout
    hung       no heartbeat for 1 s, at two looks                   killed after hang_timeout
               one step longer than 10 times what the slowest of    killed at once
               its kind took (worker/step_times.py), and than
               hang_timeout
    loading    nothing is hung before hang_timeout: an import may hold the interpreter for seconds;
               killed when it gets no further for 600 s
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from shmserve.boards import Phase

HEARTBEAT_LATE_S: Final = 1.0
LOADING_TIMEOUT_S: Final = 600.0
SLOWEST_FACTOR: Final = 10
_STEPPING: Final = (Phase.PREFILL, Phase.DECODE)
_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Vitals:
    """What is known of a child. Times are CLOCK_MONOTONIC ns; 0 where there is none yet.

    grace_ns is when it was started, continued, or the supervisor itself woke from a stop: no age counts from before it.
    """

    heartbeat_ns: int
    phase: int
    phase_since_ns: int
    expected_step_ns: int
    grace_ns: int
    stopped_ns: int
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """state: "ok", "stopped" or "hung", with a reason for the last two. must_end: its time is up. is_silence: it is "hung" because nothing
    was heard of it, which is to be confirmed by a second look: after a standstill of the whole machine everybody looks so."""

    state: str
    reason: str = ""
    must_end: bool = False
    is_silence: bool = False


def examine(vitals: Vitals, now_ns: int, hang_timeout_s: float) -> Verdict:
    """The verdict on one child at `now_ns`."""
    if vitals.stopped_ns:
        age = (now_ns - max(vitals.stopped_ns, vitals.grace_ns)) / _NS
        return Verdict("stopped", f"stopped by a signal for {age:.1f} s", age >= hang_timeout_s)
    silence = (now_ns - max(vitals.heartbeat_ns, vitals.grace_ns)) / _NS
    phase_age = (now_ns - max(vitals.phase_since_ns, vitals.grace_ns)) / _NS
    if not vitals.is_ready:
        if silence >= LOADING_TIMEOUT_S or phase_age >= LOADING_TIMEOUT_S:
            age = max(silence, phase_age)
            return Verdict("hung", f"it got no further for {age:.0f} s while it loads", True)
        if silence >= hang_timeout_s:
            return Verdict(
                "hung", f"no heartbeat for {silence:.1f} s while it loads", is_silence=True
            )
        return Verdict("ok")
    if silence >= HEARTBEAT_LATE_S:
        must_end = silence >= hang_timeout_s
        return Verdict("hung", f"no heartbeat for {silence:.1f} s", must_end, is_silence=True)
    limit = max(hang_timeout_s, SLOWEST_FACTOR * vitals.expected_step_ns / _NS)
    if vitals.phase in _STEPPING and phase_age >= limit:
        what = Phase(vitals.phase).label
        return Verdict("hung", f"one {what} step runs for {phase_age:.0f} s", True)
    return Verdict("ok")


class RestartPolicy:
    """How long to wait after each death, and when to give up: at the fifth in five minutes."""

    MOST_DEATHS: Final = 5
    WINDOW_S: Final = 300.0
    LONGEST_DELAY_S: Final = 30.0

    def __init__(self, first_delay_s: float) -> None:
        """first_delay_s: 1 for what is expensive to load; 0 for what must be back at once."""
        self._first_delay_s = first_delay_s
        self._deaths: deque[float] = deque(maxlen=self.MOST_DEATHS)
        self.num_deaths = 0

    def died(self, now_s: float) -> float | None:
        """Note a death; seconds until the next start, or None to give up."""
        self.num_deaths += 1
        self._deaths.append(now_s)
        recent = [at for at in self._deaths if now_s - at < self.WINDOW_S]
        if len(recent) >= self.MOST_DEATHS:
            return None
        delay = self._first_delay_s
        for _ in recent[1:]:
            delay = max(1.0, 2 * delay)
        return min(delay, self.LONGEST_DELAY_S)
