"""The heavy part of one request per turn of the event loop, and running streams first.

Owns: the queue of handlers that want a turn; each handler waits in it once at a time, so the connections bound it. Between two
turns the loop polls its descriptors and the pump moves tokens; while the pump is behind, nobody gets a turn, but the first in
line waits at most `MOST_WAIT_S` for that. Measured with 256 requests in one burst: without it, tokens of the streams that had
begun were 300 ms late. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

MOST_WAIT_S: Final = 0.02
"""A front end that can do no more than move tokens still takes 50 requests a second."""

TOKENS_PER_TURN: Final = 8
"""Handlers that begin or end a stream, 0.2 ms each, in one turn of the loop."""


class Turnstile:
    """First come, first served, but who has tokens to send before who has a request to begin.

    `is_behind` says whether tokens wait to be moved by the pump.
    """

    def __init__(self, is_behind: Callable[[], bool]) -> None:
        self._is_behind = is_behind
        self._with_tokens: deque[asyncio.Future[None]] = deque()
        self._with_requests: deque[asyncio.Future[None]] = deque()
        self._with_connections: deque[asyncio.Future[None]] = deque()
        self._was_request = False
        self._is_turning = False
        self._last_turn = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._with_tokens) + len(self._with_requests) + len(self._with_connections)

    async def turn(self, *, has_tokens: bool, is_connection: bool = False) -> None:
        """Return at once if nobody else had this turn of the loop and no token waits, else in a later one.

        Connections to accept take turns with requests. In one line with them, one would be accepted for every round of all requests, and
        under overload those who came last waited a minute for their refusal.
        """
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._next)
            if not self._is_behind():
                self._last_turn = loop.time()
                return
        mine = loop.create_future()
        if is_connection:
            self._with_connections.append(mine)
        else:
            (self._with_tokens if has_tokens else self._with_requests).append(mine)
        await mine

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        if not self.num_waiting:
            self._is_turning = False
            return
        loop.call_soon(self._next)
        now = loop.time()
        if self._let_in(self._with_tokens, TOKENS_PER_TURN):
            return
        if not self._is_behind() or now - self._last_turn >= MOST_WAIT_S:
            self._last_turn = now
            lines = (self._with_connections, self._with_requests)
            first, second = lines if self._was_request else lines[::-1]
            is_first = self._let_in(first, 1) > 0
            if is_first or self._let_in(second, 1):
                self._was_request = (first if is_first else second) is self._with_requests

    def _let_in(self, queue: deque[asyncio.Future[None]], most: int) -> int:
        num_in = 0
        while queue and num_in < most:
            first = queue.popleft()
            if not first.done():  # else its handler was cancelled while it waited
                first.set_result(None)
                num_in += 1
        return num_in
