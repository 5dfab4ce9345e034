"""The heavy part of one request, and one connection, per turn of the event loop, and running streams first.

Owns: the queues of those that want a turn; each handler waits in one once at a time, so the connections bound them. Between two
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
        self._with_connections: deque[Callable[[], None]] = deque()
        self._is_turning = False
        # Handlers with tokens that this turn of the loop has room for, and the next one; none beside a request.
        self._room = self._room_after = 0
        self._may_connect = self._may_connect_after = False  # the same for its one connection
        self._last_turn = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._with_tokens) + len(self._with_requests) + len(self._with_connections)

    async def turn(self, *, has_tokens: bool) -> None:
        """Return at once if this turn of the loop has room and no token waits, else in a later one."""
        self._count_turns()
        queue = self._with_tokens if has_tokens else self._with_requests
        weight = 1 if has_tokens else TOKENS_PER_TURN
        loop = asyncio.get_running_loop()
        if not queue and self._room >= weight and not self._is_behind():
            self._room -= weight
            if not has_tokens:
                self._last_turn = loop.time()
            return
        mine = loop.create_future()
        queue.append(mine)
        await mine

    def begin(self, connect: Callable[[], None]) -> None:
        """Call `connect`, which takes a connection, at once or in a later turn: one in each, beside the request that begins in it.

        In one line with requests, one would be taken for every round of all of them, and under overload those who came last waited a
        minute for their refusal.
        """
        self._count_turns()
        if self._may_connect and not self._with_connections and not self._is_behind():
            self._may_connect = False
            connect()
        else:
            self._with_connections.append(connect)

    def _count_turns(self) -> None:
        """From here on, until nobody waits."""
        if not self._is_turning:
            self._is_turning = True
            self._room = self._room_after = TOKENS_PER_TURN
            self._may_connect = self._may_connect_after = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Whom it lets in runs in the next turn of the loop, behind the next call of this."""
        self._room, self._room_after = self._room_after, TOKENS_PER_TURN
        self._may_connect, self._may_connect_after = self._may_connect_after, True
        if not (self._with_tokens or self._with_requests or self._with_connections):
            self._is_turning = False
            return
        loop = asyncio.get_running_loop()
        loop.call_soon(self._next)
        num_in = _let_in(self._with_tokens, TOKENS_PER_TURN)
        if num_in:
            self._room_after -= num_in
            return
        now = loop.time()
        if self._is_behind() and now - self._last_turn < MOST_WAIT_S:
            return
        self._last_turn = now
        if _let_in(self._with_requests, 1):
            self._room_after = 0
        if self._with_connections:
            self._may_connect_after = False
            loop.call_soon(self._with_connections.popleft())


def _let_in(queue: deque[asyncio.Future[None]], most: int) -> int:
    num_in = 0
    while queue and num_in < most:
        first = queue.popleft()
        if not first.done():  # else its handler was cancelled while it waited
            first.set_result(None)
            num_in += 1
    return num_in
