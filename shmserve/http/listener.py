"""Listening sockets as this front end wants them: short turns for the event loop, short buffers in the kernel.

Owns: the accepting. Never: binds (the supervisor did).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

from aiohttp import web

from shmserve.config import HttpConfig
from shmserve.http.backlog import bound_kernel_share
from shmserve.http.connection import connections
from shmserve.http.occupancy import Occupancy
from shmserve.http.turnstile import Turnstile
from shmserve.tls import HANDSHAKE_TIMEOUT_S, server_context

log = logging.getLogger(__name__)

RETRY_ACCEPT_S: Final = 1.0
"""How long nobody is accepted after the descriptors ran out."""

MOST_BEGINNING: Final = 1_024
"""Clients that may be beginning at once; more wait in the kernel's backlog. One with TLS has HANDSHAKE_TIMEOUT_S at most."""

CLOSE_NOTIFY_S: Final = 5.0
"""How long a TLS connection that we close waits for its client to say so too, at least: as long as a client may be stuck, since it may
still have an answer to read."""


class Listener:
    """A bound socket that is served. A connection is accepted in a turn of its own, like any other heavy part of a request.

    asyncio's server would take a whole burst in one turn of the loop, and one connection a turn still cost running streams 0.4 ms
    in each: at B = 384 that was what made them fall behind.
    """

    def __init__(
        self,
        server: web.Server,
        sock: socket.socket,
        config: HttpConfig,
        turnstile: Turnstile,
        occupancy: Occupancy,
    ) -> None:
        self._connect = connections(server, config, occupancy)
        self._occupancy = occupancy
        self._tls = server_context(config)
        self._farewell_s = max(CLOSE_NOTIFY_S, config.slow_client_seconds)
        self._beginning: set[asyncio.Task[None]] = set()
        self._sock = sock
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()
        self._has_asked = False  # for a turn
        self._is_paused = False
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        bound_kernel_share(sock, config.slow_client_seconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its connections inherit it
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        # Said again in each turn of the loop until it has had its own, and the loop does not sleep meanwhile: to stop it from
        # being said would be two system calls a connection.
        if not self._has_asked:
            self._has_asked = True
            self._turnstile.begin(self._accept)

    def _accept(self) -> None:
        self._has_asked = False
        if self._is_closed:
            return
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError) as error:
            log.debug("a connection was gone before it was accepted: %s", error)
            return
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            self._retry = self._loop.call_later(RETRY_ACCEPT_S, self._retry_now)
            self._pause()
            return
        connection.setblocking(False)
        if not self._occupancy.has_room():
            self._occupancy.turn_away(connection, in_clear=self._tls is None)
            return
        self._occupancy.num_beginning += 1  # until its connection is made
        task = self._loop.create_task(self._begin(connection))
        self._beginning.add(task)
        task.add_done_callback(self._has_begun)
        if len(self._beginning) >= MOST_BEGINNING:
            self._pause()

    async def _begin(self, connection: socket.socket) -> None:
        """Let a client begin, TLS at its own pace, beside others: a slow one must not keep them from being accepted."""
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._connect, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._connect,
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=self._farewell_s,
                )
        except OSError as error:  # ssl.SSLError and a timeout are ones
            self._occupancy.num_beginning -= 1
            log.debug("a client could not begin: %s", error)

    def _has_begun(self, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        if self._is_paused:
            self._go_on()

    def _retry_now(self) -> None:
        self._retry = None
        self._go_on()

    def _pause(self) -> None:
        self._is_paused = True
        self._loop.remove_reader(self._sock.fileno())

    def _go_on(self) -> None:
        is_full = len(self._beginning) >= MOST_BEGINNING
        if not (is_full or self._is_closed or self._retry is not None):
            self._is_paused = False
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Accept nobody any more."""
        self._is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        for task in self._beginning:
            task.cancel()
        if self._retry is not None:
            self._retry.cancel()
        self._sock.close()
