"""One request in flight: an entry of the front end's table, from its SUBMIT to its FINISH.

The pump writes it, the handler reads it, both on the event loop. It is forgotten at its FINISH, not when the client leaves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmserve.http.direct import Direct, DirectTable
from shmserve.http.errors import ApiError
from shmserve.http.logprobs import LogprobLog
from shmserve.http.ways import PassedTokens
from shmserve.wire.finish import FinishRecord

if TYPE_CHECKING:
    from shmserve.http.detokenizer import TextStream
    from shmserve.http.logprob_send import LogprobPath
    from shmserve.http.made_send import MadePath
    from shmserve.http.timing import TokenTimes
    from shmserve.http.waiting_line import Party
    from shmserve.http.worker_link import WorkerLink


class Signal:
    """Wakes the one handler task that waits for any of its requests. Level-triggered: `set` before `wait` is not lost."""

    __slots__ = ("_due", "_future", "_is_set", "_timer")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._is_set = False
        self._due = math.inf  # when the wait is over that is on now, or was the last
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set, or `timeout_s` is over; True if it was set. Clears it."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._due = math.inf if timeout_s is None else loop.time() + timeout_s
            if self._timer is None or self._due < self._timer.when():
                self._arm()
            self._future = loop.create_future()
            try:
                await self._future
            finally:
                self._future = None
        was_set, self._is_set = self._is_set, False
        return was_set

    def _arm(self) -> None:
        """One timer for wait after wait: to make one and to cancel it takes longer than to be woken by it once too often."""
        self.close()
        if self._due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self._due, self._look)

    def _look(self) -> None:
        assert self._timer is not None, "it calls this"
        is_over, self._timer = self._due <= self._timer.when(), None
        if self._future is None or self._future.done():
            return
        if is_over:
            self._future.set_result(None)
        else:
            self._arm()

    def close(self) -> None:
        """Nobody waits any more: no timer is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class InFlight:
    """`token_ids` are those that came and are not yet taken. `direct` is the pump's way for plain tokens straight to the
    transport, None while it may not; it and `last_written_ns` live in the table's columns, at this entry's place."""

    __slots__ = (
        "_slot",
        "_table",
        "aborted_ns",
        "arrival_ns",
        "deadline_ns",
        "error",
        "expiry",
        "finish",
        "first_popped_ns",
        "has_tokens",
        "index",
        "is_aborted",
        "is_submitted",
        "link",
        "log_row",
        "logprobs",
        "on_tokens",
        "party",
        "passed",
        "popped_ns",
        "req_id",
        "signal",
        "started",
        "submitted_ns",
        "text",
        "timing",
        "token_ids",
        "was_stop_token",
    )

    def __init__(
        self,
        req_id: int,
        index: int,
        link: WorkerLink,
        signal: Signal,
        arrival_ns: int,
        table: DirectTable,
    ) -> None:
        self._table = table
        self._slot = req_id & int(table.mask)
        table.enter(req_id, self._slot)
        self.req_id = req_id
        self.index = index  # which choice of its response
        self.link = link
        self.signal = signal
        self.arrival_ns = arrival_ns
        self.submitted_ns = 0
        self.is_submitted = False  # the SUBMIT is in the ring (not waiting outside it)
        self.is_aborted = False
        self.aborted_ns = 0  # when that was decided
        self.log_row = 0  # where its times between tokens are counted; 0: nowhere (interval_log.py)
        self.text: TextStream | None = None  # the newest that reads it
        self.started: FinishRecord | None = None
        self.finish: FinishRecord | None = None
        self.error: ApiError | None = None
        self.party: Party | None = None  # whose place it holds; None: a control record's
        self.deadline_ns = 0  # its client's own; 0: none
        self.expiry: ApiError | None = None  # its time was over before it ran
        self.token_ids: list[int] = []
        self.logprobs: LogprobLog | None = None  # only where they were asked for
        self.timing: TokenTimes | None = None  # only where it was asked for
        self.passed: PassedTokens | None = None  # only where the text is split
        self.popped_ns = 0  # its newest tokens that the pump did not write itself; the first
        self.first_popped_ns = 0
        self.was_stop_token = False  # the last token ended the request and has no text
        self.has_tokens = False  # the first one has come
        self.on_tokens: Callable[[InFlight], None] | None = None  # slow path of a running stream

    def matched_stop(self, stops: tuple[bytes, ...]) -> str:
        """The text that ended it: a stop string, or what a stop regex matched."""
        assert self.finish is not None
        if self.finish.matched_stop < len(stops):
            return stops[self.finish.matched_stop].decode()
        assert self.text is not None
        return self.text.matched_text

    @property
    def place(self) -> int:
        """Its place in the table."""
        return self._slot

    @property
    def direct(self) -> Direct | LogprobPath | MadePath | None:
        table, slot = self._table, self._slot
        return table.paths[slot] or table.logprob_paths[slot] or table.made_paths[slot]

    @direct.setter
    def direct(self, path: Direct | LogprobPath | MadePath | None) -> None:
        if self._table.owner[self._slot] == self.req_id:  # else its place is another's already
            self._table.lead(self._slot, path)

    @property
    def last_written_ns(self) -> int:
        """When its newest frame was written."""
        return int(self._table.written_ns[self._slot])

    @last_written_ns.setter
    def last_written_ns(self, at_ns: int) -> None:
        if self._table.owner[self._slot] == self.req_id:
            self._table.written_ns[self._slot] = at_ns

    def forgotten(self) -> None:
        """Its FINISH came, or its channel ended: its place in the table is free."""
        self._table.leave(self._slot)

    @property
    def is_over(self) -> bool:
        """No record will come any more."""
        return self.finish is not None or self.error is not None

    def fail(self, error: ApiError) -> None:
        """The end, without a FINISH: the channel is gone."""
        if not self.is_over:
            self.error = error
            self.direct = None
            self.signal.set()
