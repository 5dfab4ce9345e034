"""What the soak does to a server, when, and which ends of requests that excuses.

Owns: the faults, their windows, and the table of excuses. Never: touches a process that is not of the server under test.

A fault's window lasts from just before it until every process is ready again, and `AFTERMATH_S` more. A request that was open in it
may end as EXCUSES says; any other end than a right and whole answer, at any other time, is a finding.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from soak_client import LEAVING_WAYS, Outcome

AFTERMATH_S: Final = 1.0
STOPPED_S: Final = 3.0
HANG_TIMEOUT_S: Final = 12.0
SLOW_CLIENT_S: Final = 4.0
WAITING_TIMEOUT_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`signal` goes to the process at `role`; one that is only stopped is continued after STOPPED_S. No role: it is done to the port."""

    name: str
    role: str = ""
    signal: signal.Signals = signal.SIGCONT
    is_death: bool = False


BURST: Final = Fault("burst")  # of requests
FLOOD: Final = Fault("flood")  # of connections that ask nothing
STOPS: Final = tuple(
    Fault(f"{role} stopped", role, signal.SIGSTOP) for role in ("worker", "http", "supervisor")
)
DEATHS: Final = tuple(
    Fault(f"{role} {word}", role, number, is_death=True)
    for word, number in (
        ("killed", signal.SIGKILL),
        ("faulted", signal.SIGSEGV),
        ("hung", signal.SIGSTOP),  # for good: the supervisor ends it after --hang-timeout
    )
    for role in ("worker", "http")
)

_WORKER_DEATHS: Final = frozenset(f.name for f in DEATHS if f.role == "worker")
_HTTP_DEATHS: Final = frozenset(f.name for f in DEATHS if f.role == "http")
_STANDSTILLS: Final = frozenset({"worker stopped", "http stopped", "worker hung", "http hung"})

EXCUSES: Final[dict[str, frozenset[str]]] = {
    "worker_died": _WORKER_DEATHS,
    "loading": _WORKER_DEATHS,
    "no_worker": _WORKER_DEATHS | {"worker stopped"},
    "submit_ring_full": frozenset({"worker stopped", "worker hung"}),
    "waiting_timeout": _STANDSTILLS | {"burst"},
    # What is held up comes all at once, or keeps its place while nobody can let it go.
    "queue_full": _STANDSTILLS | _HTTP_DEATHS | {"burst"},
    "too_many_connections": frozenset({"flood"}),
    "broken": _HTTP_DEATHS,
}
"""By the code of an error, or "broken" for a connection that ended before the answer: the faults that may cause it."""

NEVER_AFTER_200: Final = frozenset(EXCUSES) - {"worker_died", "broken"}
"""A refusal is a status, never an event of a stream."""


@dataclass(slots=True)
class Window:
    """When a fault could be felt; `end_s` is infinite while it lasts."""

    fault: Fault
    begin_s: float
    end_s: float = float("inf")


class Windows:
    """All faults so far."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    def open(self, fault: Fault) -> Window:
        window = Window(fault, time.monotonic())
        self._windows.append(window)
        return window

    def close(self, window: Window) -> None:
        window.end_s = time.monotonic() + AFTERMATH_S

    def of(self, outcome: Outcome) -> set[str]:
        """The faults that a request could feel."""
        return {
            window.fault.name
            for window in self._windows
            if window.begin_s <= outcome.end_s and outcome.begin_s <= window.end_s
        }

    def recent_deaths(self, role: str, seconds: float) -> int:
        since = time.monotonic() - seconds
        return sum(
            window.fault.is_death and window.fault.role == role and window.begin_s > since
            for window in self._windows
        )


def finding_of(outcome: Outcome, faults: Iterable[str]) -> str:
    """What is wrong with this end, given the faults that it could feel; "" for nothing."""
    plan = outcome.plan
    what = f"{plan.path} ({plan.way}{', streamed' if plan.is_streamed else ''}): {outcome.end}"
    felt = set(faults)
    about = f" {outcome.status} {outcome.code} {outcome.fault}; faults: {sorted(felt) or 'none'}"
    is_late_refusal = outcome.end == "error" and outcome.code in NEVER_AFTER_200
    if outcome.end in ("late", "wrong") or is_late_refusal:
        return what + about
    if plan.expected_code and outcome.code != plan.expected_code:
        is_excused = bool(felt & EXCUSES.get(outcome.code or outcome.end, frozenset()))
        return "" if is_excused else f"{what}{about}, not {plan.expected_code}"
    if outcome.end == "left":
        return ""
    if outcome.end == "whole":
        is_in_time = outcome.stop_reason != "timeout" or "timeout_ms" in plan.body
        return "" if is_in_time else what + about
    reason = outcome.code or outcome.end
    if reason == plan.expected_code or reason in _own_doing(outcome):
        return ""
    return "" if felt & EXCUSES.get(reason, frozenset()) else what + about


def _own_doing(outcome: Outcome) -> set[str]:
    """The ends that the client itself brought about."""
    plan = outcome.plan
    found = set()
    if "timeout_ms" in plan.body:
        found.add("deadline_exceeded")
    if plan.aborted_after_s:
        found.add("aborted")
    if plan.way == "stuck":
        found.add("slow_client")
        if plan.stuck_s >= SLOW_CLIENT_S:
            found.add("broken")
    if plan.way in LEAVING_WAYS:
        found.add("broken")
    return found
