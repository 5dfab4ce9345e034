"""How many connections are open, and what becomes of one too many: a 503 and the end, without a byte of it having been parsed.

Owns: the bound on connections, within what the descriptors allow. A stream needs two (the pump sends on one of its own), so every place of
the request table keeps one back. Who is turned away may still be sending: its socket is kept half-closed for a moment, else the reset could
overtake the answer; those who linger are bounded too. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable
from typing import Final

import msgspec

from shmserve.config import Config, ConfigError
from shmserve.http.errors import ApiError

log = logging.getLogger(__name__)

MOST_LINGERING: Final = 128
LINGER_S: Final = 1.0
OWN_DESCRIPTORS: Final = 96
"""Of a front end without a connection: its loop, log, model files, boards, listening sockets."""
DESCRIPTORS_PER_WORKER: Final = 16
"""Two segments and four counters of a channel, twice while it is replaced, and a board."""
_READ_BYTES: Final = 65_536


def most_connections(asked: int, num_places: int, num_workers: int) -> int:
    """`asked`, or what the limit on descriptors leaves beside everything else; 0 if that is nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return asked
    kept = MOST_LINGERING + OWN_DESCRIPTORS + DESCRIPTORS_PER_WORKER * num_workers + num_places
    return max(0, min(asked, soft - kept))


def occupancy_of(config: Config, refused: Callable[[str], None]) -> Occupancy:
    """What --max-concurrent-connections asks for, as far as descriptors go. Raises ConfigError if they allow no connection."""
    asked, num_workers = config.http.max_concurrent_connections, config.num_workers
    num_places = config.worker.run_slots * num_workers + config.http.max_queued_requests
    most = most_connections(asked, num_places, num_workers)
    if not most:
        raise ConfigError("too few descriptors are allowed for one connection (ulimit -n)")
    if most < asked:
        log.warning(
            "at most %d connections, not %d: more descriptors are not allowed (RLIMIT_NOFILE)",
            most,
            asked,
        )
    return Occupancy(most, refused)


class Occupancy:
    """The connections of one front end. `refused(reason)` counts a refusal."""

    def __init__(self, most: int, refused: Callable[[str], None]) -> None:
        self.most = most
        self.num_open = 0
        self.num_beginning = 0  # accepted, and not yet made a connection of: whoever accepts counts them up, and down if it fails
        self._refused = refused
        self._lingering: dict[socket.socket, asyncio.TimerHandle] = {}
        error = ApiError(
            503,
            f"The server has {most} connections open, and takes no more (--max-concurrent-connections).",
            type="overloaded_error",
            code="too_many_connections",
            retry_after_s=1,
        )
        body = msgspec.json.encode(error.body())
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._answer = head.encode() + body

    def has_room(self) -> bool:
        """Whether one more may be served."""
        return self.num_open + self.num_beginning < self.most

    def turn_away(self, connection: socket.socket, *, in_clear: bool) -> None:
        """Answer 503, where the client can read it `in_clear`, and close."""
        self._refused("connections")
        with contextlib.suppress(OSError):  # it may be gone already
            if in_clear:
                connection.send(self._answer)
            connection.shutdown(socket.SHUT_WR)
            if len(self._lingering) < MOST_LINGERING:
                loop = asyncio.get_running_loop()
                self._lingering[connection] = loop.call_later(LINGER_S, self._let_go, connection)
                loop.add_reader(connection.fileno(), self._on_readable, connection)
                return
        connection.close()

    def _on_readable(self, connection: socket.socket) -> None:
        try:
            is_over = not connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            is_over = True
        if is_over:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._lingering.pop(connection).cancel()
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()

    def close(self) -> None:
        """Nobody lingers any more."""
        for connection in list(self._lingering):
            self._let_go(connection)
