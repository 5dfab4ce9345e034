"""One request in flight: an entry of the front end's table, from its SUBMIT to its FINISH.

The pump writes it, the handler reads it, both on the event loop. It is forgotten at its FINISH, not when the client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from shmserve.http.errors import ApiError
from shmserve.wire import FinishRecord

if TYPE_CHECKING:
    from shmserve.http.client import WorkerLink
    from shmserve.http.stream import ChunkHeads

Direct: TypeAlias = (
    "tuple[ChunkHeads, list[bytes], bytes, Callable[[bytes], None], Callable[[], int]]"
)
"""What a plain token needs on its way to the socket: bytes before a piece by its length, the pieces by token id, bytes behind;
the transport's write and get_write_buffer_size."""


class Signal:
    """Wakes the one handler task that waits for any of its requests. Level-triggered: `set` before `wait` is not lost."""

    __slots__ = ("_future", "_is_set")

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set, or `timeout_s` is over; True if it was set. Clears it."""
        if not self._is_set:
            loop = asyncio.get_running_loop()
            self._future = future = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, _resolve, future)
            try:
                await future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        was_set, self._is_set = self._is_set, False
        return was_set


def _never() -> None:
    raise AssertionError("only a running stream is written to directly")


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InFlight:
    """`token_ids` are those that came and are not yet taken. `direct` is what the pump needs to write plain tokens straight to
    the transport, and None while it may not."""

    __slots__ = (
        "arrival_ns",
        "direct",
        "error",
        "finish",
        "has_tokens",
        "index",
        "is_aborted",
        "is_submitted",
        "last_written_ns",
        "link",
        "on_congested",
        "on_tokens",
        "req_id",
        "signal",
        "started",
        "submitted_ns",
        "token_ids",
        "was_stop_token",
    )

    def __init__(
        self, req_id: int, index: int, link: WorkerLink, signal: Signal, arrival_ns: int
    ) -> None:
        self.req_id = req_id
        self.index = index  # which choice of its response
        self.link = link
        self.signal = signal
        self.arrival_ns = arrival_ns
        self.submitted_ns = 0
        self.is_submitted = False  # the SUBMIT is in the ring (not waiting outside it)
        self.is_aborted = False
        self.started: FinishRecord | None = None
        self.finish: FinishRecord | None = None
        self.error: ApiError | None = None
        self.token_ids: list[int] = []
        self.was_stop_token = False  # the last token ended the request and has no text
        self.has_tokens = False  # the first one has come
        self.last_written_ns = 0  # of the newest frame, written
        self.direct: Direct | None = None  # owned by stream.py
        self.on_tokens: Callable[[InFlight], None] | None = None  # slow path of a running stream
        self.on_congested: Callable[[], None] = (
            _never  # the transport did not take all of a direct write
        )

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
