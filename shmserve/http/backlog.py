"""What the kernel holds of a client's bytes: how much it may take from us, and how much it has.

Owns: the socket options that keep the kernel's share small, and the question how much of it the client has not acknowledged.
Never: decides what becomes of a slow client (`slow_client.py`). Event loop's thread only.

What has arrived in the client's own receive buffer is acknowledged, and nobody here can see whether it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from typing import Final

NOTSENT_LOWAT_BYTES: Final = 16 * 1024
"""Bytes that the kernel takes beyond what is on its way: without it, it swallows 3.9 MB of a client that does not read."""

LATER_THAN_US_S: Final = 30.0
"""The kernel ends connections whose peer is gone, and those whose peer has closed its window. The latter are ours to end: we can
tell a slow client from a stuck one, and count it."""

_TCP_NOTSENT_LOWAT: Final = 25  # not in the socket module of every Python
_INT: Final = struct.Struct("i")
_U64: Final = struct.Struct("Q")
_BYTES_ACKED_END: Final = 128  # of tcpi_bytes_acked in struct tcp_info


def bound_kernel_share(listening: socket.socket, most_seconds: float) -> None:
    """Set on a listening socket what every connection that it accepts inherits. `most_seconds`: how long a client may be stuck."""
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return  # a Unix socket's buffer is small, and a dead peer is known at once
    # A sandbox's sockets may not know the options: the bounds in user space still hold.
    with contextlib.suppress(OSError):
        listening.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
        timeout_ms = int((most_seconds + LATER_THAN_US_S) * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def unacknowledged_bytes(sock: socket.socket) -> int:
    """What the kernel holds of what was written to `sock` and its peer has not acknowledged (SIOCOUTQ); 0 for a closed one."""
    fd = sock.fileno()
    if fd < 0:
        return 0
    try:
        (num_bytes,) = _INT.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(_INT.size)))
    except OSError:  # a kind of socket that does not tell
        return 0
    return int(num_bytes)


def acknowledged_bytes(sock: socket.socket) -> int:
    """How much the peer of a TCP socket has ever acknowledged; 0 where nobody counts it. It grows with every byte that is taken."""
    if sock.fileno() < 0 or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_END)
    except OSError:
        return 0
    if len(info) < _BYTES_ACKED_END:
        return 0
    (num_bytes,) = _U64.unpack_from(info, _BYTES_ACKED_END - _U64.size)
    return int(num_bytes)


def is_gone(transport: asyncio.Transport) -> bool:
    """Whether the connection is no more, as far as its transport says. asyncio's TLS transport may then have let go of whatever knew."""
    try:
        return transport.get_extra_info("socket") is None
    except AttributeError:
        return True


def backlog_bytes(transport: asyncio.Transport) -> int:
    """What the client has not taken: the transport's buffer, and what the kernel holds.

    On a TLS connection the transport does not tell of what it has encrypted already, which is 64 KiB at most.
    """
    sock = transport.get_extra_info("socket")
    return transport.get_write_buffer_size() + unacknowledged_bytes(sock)
