"""Listening sockets as this front end wants them: short turns for the event loop, short buffers in the kernel.

Owns: the accepting. Never: binds (the supervisor did).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
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

MOST_HANDSHAKES: Final = 1_024
"""TLS clients that may be beginning at once; more wait in the kernel's backlog. Each has HANDSHAKE_TIMEOUT_S at most."""

CLOSE_NOTIFY_S: Final = 5.0
"""How long a TLS connection that we close waits for its client to say so too."""


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
        self._handshakes: set[asyncio.Task[None]] = set()
        self._sock = sock
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()
        self._accepting: asyncio.Task[None] | None = None
        self._is_closed = False
        bound_kernel_share(sock, config.slow_client_seconds)
        sock.setblocking(False)
        sock.listen(config.backlog)
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(
            self._sock.fileno()
        )  # level-triggered: until this one has had its turn
        self._accepting = self._loop.create_task(self._accept())

    async def _accept(self) -> None:
        await self._turnstile.turn(has_tokens=False, is_connection=True)
        try:
            connection, _ = self._sock.accept()
            connection.setblocking(False)
            if not self._occupancy.has_room(len(self._handshakes)):
                self._occupancy.turn_away(connection, in_clear=self._tls is None)
            elif self._tls is None:
                await self._loop.connect_accepted_socket(self._connect, connection)
            else:
                self._shake_hands(connection, self._tls)
        except (BlockingIOError, ConnectionError) as error:
            log.debug("a connection was gone before it was accepted: %s", error)
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            await asyncio.sleep(RETRY_ACCEPT_S)
        if not self._is_closed and len(self._handshakes) < MOST_HANDSHAKES:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _shake_hands(self, connection: socket.socket, tls: ssl.SSLContext) -> None:
        """Let a client begin TLS at its own pace, beside others: a slow one must not keep them from being accepted."""

        async def shake() -> None:
            try:
                await self._loop.connect_accepted_socket(
                    self._connect,
                    connection,
                    ssl=tls,
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=CLOSE_NOTIFY_S,
                )
            except OSError as error:  # ssl.SSLError and a timeout are ones
                log.debug("a client could not begin TLS: %s", error)

        task = self._loop.create_task(shake())
        self._handshakes.add(task)
        task.add_done_callback(self._after_handshake)

    def _after_handshake(self, task: asyncio.Task[None]) -> None:
        was_full = len(self._handshakes) >= MOST_HANDSHAKES
        self._handshakes.discard(task)
        if was_full and not self._is_closed:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def close(self) -> None:
        """Accept nobody any more."""
        self._is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        for task in (self._accepting, *self._handshakes):
            if task is not None:
                task.cancel()
        self._sock.close()
