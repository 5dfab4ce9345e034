"""One request's heavy part per turn of the event loop, so that a burst of arrivals does not hold up running streams.

Owns: the queue of handlers that want a turn; each handler waits in it once at a time, so the connections bound it. Between two
turns the loop polls its descriptors, and the pump moves tokens. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turnstile:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def turn(self) -> None:
        """Return at once if nobody else had this turn of the loop, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else its handler was cancelled while it waited
                first.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_turning = False
