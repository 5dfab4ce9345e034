"""How long a request may take: its client's own deadline, and the operator's bound on waiting.

Owns: the reading of `timeout_ms` and X-Request-Timeout-Ms, the refusals of requests whose time was over before they ran, and the timer
that holds where the worker does not. The worker ends what is overdue, in the queue and while it runs; a worker that is stopped, or in
the middle of a long step, does not, and then the request gets its answer from here, `LATE_S` later (a little more while records are
unread: its end may be among them). Event loop's thread only.

    waits, its own deadline comes     504, code deadline_exceeded
    waits for --waiting-timeout       503, code waiting_timeout
    runs, either bound comes          what it has, finish_reason "length", stop_reason "timeout"
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from aiohttp import web

from shmserve.http.errors import ApiError, bad_field

if TYPE_CHECKING:
    from shmserve.http.admission import Admission
    from shmserve.http.client import WorkerClient
    from shmserve.http.in_flight import InFlight

ARRIVAL: Final[web.RequestKey[int]] = web.RequestKey("arrival_ns", int)
PARSED: Final[web.RequestKey[int]] = web.RequestKey("parsed_ns", int)
"""When its body was read and checked."""
DEADLINE: Final[web.RequestKey[int]] = web.RequestKey("deadline_ns", int)

HEADER: Final = "X-Request-Timeout-Ms"
MOST_TIMEOUT_MS: Final = 86_400_000
LATE_S: Final = 0.25
BEHIND_S: Final = 0.05
MOST_TIMES_BEHIND: Final = 5
"""How often the timer waits for so long while records are unread: this process stood still, and the request's end may be among them."""
WAITED: Final = "Request waiting timeout reached."  # SGLang's words


def deadline_of(request: web.Request, timeout_ms: int | None) -> int:
    """When the request's own time is over, counted from its arrival; 0: never. The body and the header may both say it: the less counts."""
    asked: list[int] = []
    if timeout_ms is not None:
        asked.append(_checked("timeout_ms", timeout_ms))
    text = request.headers.get(HEADER)
    if text is not None:
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise bad_field(HEADER, f"{HEADER} must be whole milliseconds, got {text[:40]!r}")
        asked.append(_checked(HEADER, int(text)))
    return request[ARRIVAL] + min(asked) * 1_000_000 if asked else 0


def _checked(name: str, timeout_ms: int) -> int:
    if not 1 <= timeout_ms <= MOST_TIMEOUT_MS:
        raise bad_field(name, f"{name} must be 1 to {MOST_TIMEOUT_MS}, got {timeout_ms}")
    return timeout_ms


def deadline_exceeded(where: str) -> ApiError:
    """504: its client wanted no answer that late."""
    return ApiError(
        504,
        f"The request's deadline passed {where} (timeout_ms or {HEADER}).",
        type="timeout_error",
        code="deadline_exceeded",
    )


def waited_too_long(retry_after_s: int) -> ApiError:
    """503: the operator's bound on waiting."""
    return ApiError(
        503,
        WAITED,
        type="overloaded_error",
        code="waiting_timeout",
        retry_after_s=retry_after_s,
    )


def failure_of(entries: Sequence[InFlight]) -> ApiError | None:
    """What the request of `entries` has to be answered with instead of completions, as far as that is known."""
    for entry in entries:
        if entry.error is not None:
            return entry.error
    if entries and all(entry.expiry is not None for entry in entries):
        return entries[0].expiry
    return None


class Overdue:
    """The timer of one request that has a bound in time. `stop` it at the request's end."""

    def __init__(
        self,
        client: WorkerClient,
        admission: Admission,
        entries: Sequence[InFlight],
        deadline_ns: int,
        waiting_until_ns: int,
    ) -> None:
        self._client = client
        self._admission = admission
        self._entries = entries
        self._deadline_ns = deadline_ns
        self._due = sorted(at for at in (deadline_ns, waiting_until_ns) if at)
        self._timer: asyncio.TimerHandle | None = None
        self._num_times_behind = 0
        self._arm()

    def _arm(self) -> None:
        if self._due:
            left_s = (self._due.pop(0) - time.monotonic_ns()) / 1e9 + LATE_S
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _look(self) -> None:
        if self._client.is_behind() and self._num_times_behind < MOST_TIMES_BEHIND:
            self._num_times_behind += 1
            self._timer = asyncio.get_running_loop().call_later(BEHIND_S, self._look)
            return
        self._num_times_behind = 0
        is_deadline = 0 < self._deadline_ns <= time.monotonic_ns()
        for entry in self._entries:
            if entry.is_over:
                continue
            if is_deadline:
                where = "while it waited" if entry.started is None else "while it ran"
                self._refuse(entry, "deadline", deadline_exceeded(where))
            elif entry.started is None:
                error = waited_too_long(self._admission.retry_after_s())
                self._refuse(entry, "waiting_timeout", error)
        self._arm()

    def _refuse(self, entry: InFlight, reason: str, error: ApiError) -> None:
        self._admission.refused(reason)
        self._client.refuse(entry, error)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
