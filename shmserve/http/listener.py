"""Listening sockets as this front end wants them: short turns for the event loop, short buffers in the kernel.

Owns: socket options, the accepting, and what the kernel knows of a client's backlog. Never: binds (the supervisor did).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from typing import Final

from aiohttp import web

from shmserve.config import HttpConfig
from shmserve.http.turnstile import Turnstile

log = logging.getLogger(__name__)

NOTSENT_LOWAT_BYTES: Final = 16 * 1024
"""Bytes that the kernel takes beyond what is on its way: without it, it swallows 3.9 MB of a client that does not read."""

LATER_THAN_US_S: Final = 30.0
"""The kernel ends connections whose peer is gone, and those whose peer has closed its window. The latter are ours to end: we can
tell a slow client from a stuck one, and count it."""

RETRY_ACCEPT_S: Final = 1.0
"""How long nobody is accepted after the descriptors ran out."""

_TCP_NOTSENT_LOWAT: Final = 25  # not in the socket module of every Python


class Listener:
    """A bound socket that is served. A connection is accepted in a turn of its own, like any other heavy part of a request.

    asyncio's server would take a whole burst in one turn of the loop, and one connection a turn still cost running streams 0.4 ms
    in each: at B = 384 that was what made them fall behind.
    """

    def __init__(
        self, server: web.Server, sock: socket.socket, config: HttpConfig, turnstile: Turnstile
    ) -> None:
        self._server = server
        self._sock = sock
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()
        self._accepting: asyncio.Task[None] | None = None
        self._is_closed = False
        # What is set here is inherited by every connection.
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # A sandbox's sockets may not know the options: the bounds in user space still hold.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
                timeout_ms = int((config.slow_client_seconds + LATER_THAN_US_S) * 1000)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(
            self._sock.fileno()
        )  # level-triggered: until this one has had its turn
        self._accepting = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        await self._turnstile.turn(has_tokens=False)
        try:
            connection, _ = self._sock.accept()
            connection.setblocking(False)
            await self._loop.connect_accepted_socket(self._server, connection)
        except (BlockingIOError, ConnectionError) as error:
            log.debug("a connection was gone before it was accepted: %s", error)
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            await asyncio.sleep(RETRY_ACCEPT_S)
        if not self._is_closed:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Accept nobody any more."""
        self._is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._accepting is not None:
            self._accepting.cancel()
        self._sock.close()


def backlog_bytes(transport: asyncio.Transport) -> int:
    """What the client has not yet taken: the transport's buffer and what the kernel holds unacknowledged (SIOCOUTQ)."""
    sock = transport.get_extra_info("socket")
    in_kernel = 0
    with contextlib.suppress(OSError):  # the socket was closed under us
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        (in_kernel,) = struct.unpack("i", answer)
    return transport.get_write_buffer_size() + in_kernel
