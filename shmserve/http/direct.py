"""The pump's table: what a plain token needs on its way to a socket, by table slot.

Owns: for each place of the request table, whose it is, how its frames are built and where they go, and when the last one was
written. The columns are plain lists and one array, so that a token of a stream that keeps up touches no request object: with 256
streams, each object touched per token is a cache miss or three. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

MOST_CHUNK_BYTES: Final = 4_096
_SIZE_LINES: Final = [b"%x\r\n" % size for size in range(MOST_CHUNK_BYTES)]
_NO_LINES: Final = [b""] * MOST_CHUNK_BYTES

Direct: TypeAlias = tuple[
    list[bytes],
    int,
    bytes,
    bytes,
    list[bytes],
    Callable[[bytes], int],
    Callable[[bytes, int], None],
    int,
]
"""Chunk size lines by size; bytes around a piece, counted; before it; behind it; pieces by token id; the socket's send; who
takes over a frame that was not sent whole, with what was sent of it (-1: the connection is broken); the socket's descriptor, if a
frame may be sent on it together with those of others (else -1)."""


def direct_path(
    before: bytes,
    after: bytes,
    is_chunked: bool,
    pieces: list[bytes],
    longest_piece: int,
    send: Callable[[bytes], int],
    spill: Callable[[bytes, int], None],
    fd: int = -1,
) -> Direct | None:
    """The path of one choice's plain tokens; None if its frames could be larger than a size line is kept for."""
    fixed = len(before) + len(after)
    if fixed + longest_piece >= MOST_CHUNK_BYTES:
        return None
    if not is_chunked:  # HTTP/1.0
        return (_NO_LINES, fixed, before, after, pieces, send, spill, fd)
    return (_SIZE_LINES, fixed, before, after + b"\r\n", pieces, send, spill, fd)


class DirectTable:
    """Columns of a request table with `num_slots` places (rounded up to a power of two)."""

    def __init__(self, num_slots: int) -> None:
        size = 1 << max(0, num_slots - 1).bit_length()
        self.size = size
        self.mask = np.uint64(size - 1)
        self.owner = np.zeros(size, np.uint64)  # req_id; 0: nobody
        self.paths: list[Direct | None] = [None] * size  # None: not by the pump, now
        self.written_ns = [0] * size  # of the newest frame

    def enter(self, req_id: int, slot: int) -> None:
        """The place `slot` is `req_id`'s from here on."""
        self.owner[slot] = req_id
        self.paths[slot] = None
        self.written_ns[slot] = 0

    def leave(self, slot: int) -> None:
        """Nobody's: a stale record finds nothing."""
        self.owner[slot] = 0
        self.paths[slot] = None
