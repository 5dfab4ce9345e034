"""The bodies of requests in memory: how large one may be, and how large all may be together.

Owns: the reading of bodies, and the count of their bytes. A body counts from before its first byte is read until its request has been
answered: what is made of it (JSON, text, token ids) lives as long. Never: looks into one. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiohttp import web

from shmserve.http.connection import go_on
from shmserve.http.errors import ApiError

if TYPE_CHECKING:
    from shmserve.config import HttpConfig
    from shmserve.rings.board import Board

COUNTED: Final[web.RequestKey[int]] = web.RequestKey("counted_bytes", int)


class Bodies:
    """All that one front end holds. `refused(reason)` counts a refusal."""

    def __init__(self, config: HttpConfig, board: Board, refused: Callable[[str], None]) -> None:
        self._most_each = config.max_body_bytes
        self._most = config.bodies_bytes
        self._board = board
        self._refused = refused
        self.num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """The whole body; `forget` the request when it has been answered. Raises ApiError: 413, or 503 while too many others are here."""
        length = request.content_length
        if length is not None:
            self._check_size(length, "has")
            self._count(request, length)
        await go_on(request)
        # Not request.read(): that keeps the body twice, and knows no sum. A compressed body is longer than the header says.
        parts: list[bytes] = []
        num_read = 0
        while part := await request.content.readany():
            num_read += len(part)
            self._check_size(num_read, "has at least")
            if num_read > request.get(COUNTED, 0):
                self._count(request, len(part))
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def forget(self, request: web.Request) -> None:
        """It has been answered."""
        self._add(-request.get(COUNTED, 0))
        request[COUNTED] = 0

    def _check_size(self, num_bytes: int, has: str) -> None:
        if num_bytes > self._most_each:
            self._refused("body")
            raise ApiError(
                413,
                f"The body {has} {num_bytes} bytes, at most {self._most_each} are allowed (--max-body-bytes).",
                code="body_too_large",
            )

    def _count(self, request: web.Request, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._most:
            self._refused("bodies")
            raise ApiError(
                503,
                f"The bodies of other requests take {self.num_bytes} of {self._most} bytes (--max-bodies-bytes).",
                type="overloaded_error",
                code="bodies_full",
                retry_after_s=1,
            )
        request[COUNTED] = request.get(COUNTED, 0) + num_bytes
        self._add(num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._board["body_bytes"] = self.num_bytes
