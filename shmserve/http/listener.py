"""Listening sockets as this front end wants them: short turns for the event loop, short buffers in the kernel.

Owns: socket options, the start of the sites, and what the kernel knows of a client's backlog. Never: binds (the supervisor did).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from typing import Final

from aiohttp import web

from shmserve.config import HttpConfig

NOTSENT_LOWAT_BYTES: Final = 16 * 1024
"""Bytes that the kernel takes beyond what is on its way: without it, it swallows 3.9 MB of a client that does not read."""

LATER_THAN_US_S: Final = 30.0
"""The kernel ends connections whose peer is gone, and those whose peer has closed its window. The latter are ours to end: we can
tell a slow client from a stuck one, and count it."""

ACCEPTS_PER_TURN: Final = 1
_TCP_NOTSENT_LOWAT: Final = 25  # not in the socket module of every Python


async def listen(runner: web.AppRunner, sock: socket.socket, config: HttpConfig) -> None:
    """Serve on a bound socket. What is set here is inherited by every connection that it accepts."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        # A sandbox's sockets may not know the options: the bounds in user space still hold.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
            timeout_ms = int((config.slow_client_seconds + LATER_THAN_US_S) * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    # asyncio accepts as many connections in one turn as the backlog says: a burst would hold the loop.
    await web.SockSite(runner, sock, backlog=ACCEPTS_PER_TURN).start()
    sock.listen(config.backlog)  # the kernel's own queue stays long


def backlog_bytes(transport: asyncio.Transport) -> int:
    """What the client has not yet taken: the transport's buffer and what the kernel holds unacknowledged (SIOCOUTQ)."""
    sock = transport.get_extra_info("socket")
    in_kernel = 0
    with contextlib.suppress(OSError):  # the socket was closed under us
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
        (in_kernel,) = struct.unpack("i", answer)
    return transport.get_write_buffer_size() + in_kernel
