"""A front end's heartbeat: what it does of its own accord, four times a second, or twice, and no more, while nobody asks for anything.

Owns: the timer, and the words of the board that have no other moment: that this process lives, how late its loop is, its gauges. Never: decides
anything about a request. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from shmserve.boards import HEARTBEAT_S, IDLE_HEARTBEAT_S
from shmserve.http.garbage import Garbage

if TYPE_CHECKING:
    from aiohttp import web

    from shmserve.http.front_end import FrontEnd
    from shmserve.http.tracing import Traces


IDLE_AFTER_S: Final = 1.0
"""So long after the last request the gauges are still shown as often as before."""


class Heartbeat:
    """Begins to beat when it is made; needs a running loop."""

    def __init__(self, front: FrontEnd, traces: Traces | None) -> None:
        self._front = front
        self._traces = traces
        self._server: web.Server | None = None
        self._garbage: Garbage | None = None
        self._loop = asyncio.get_running_loop()
        self._due = self._idle_from = self._loop.time()
        self._num_requests = 0
        self._beat()

    def serves(self, server: web.Server) -> None:
        """All is loaded, and `server` has connections from now on."""
        self._server = server
        self._garbage = Garbage()

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        front, now = self._front, self._loop.time()
        board, client = front.board, front.client
        board["heartbeat_ns"] = time.monotonic_ns()
        board["loop_lag_ns"] = max(0, int((now - self._due) * 1e9))
        num_in_flight = len(client.in_flight)
        board["in_flight"] = num_in_flight
        line = front.admission.line
        board["waiting"] = line.num_waiting
        board["waiting_tokens"] = line.num_tokens
        board["connections"] = len(self._server.connections) if self._server else 0
        board["io_uring"] = client.step_sender is not None and client.step_sender.is_open
        for link in client.links.values():
            link.fold_times()
        if front.book is not None:
            front.book.settle()
        if self._traces is not None:
            self._traces.show()
        if self._garbage is not None:
            self._garbage.look(is_idle=not num_in_flight)
        if num_in_flight or line.num_waiting or board["num_requests"] != self._num_requests:
            self._num_requests = board["num_requests"]
            self._idle_from = now + IDLE_AFTER_S
        self._due = now + (HEARTBEAT_S if now < self._idle_from else IDLE_HEARTBEAT_S)
        self._timer = self._loop.call_at(self._due, self._beat)
