"""The pump's table: what a plain token needs on its way to a socket, by table slot.

Owns: for each place of the request table, whose it is, how its frames are built and where they go, and when the last one was
written. The columns are plain lists and one array, so that a token of a stream that keeps up touches no request object: with 256
streams, each object touched per token is a cache miss or three. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from shmserve.http.uring import address_of

if TYPE_CHECKING:
    from shmserve.http.logprob_send import LogprobPath
    from shmserve.http.made_send import MadePath

MOST_CHUNK_BYTES: Final = 4_096
SIZE_LINES: Final = [b"%x\r\n" % size for size in range(MOST_CHUNK_BYTES)]
_NO_LINES: Final = [b""] * MOST_CHUNK_BYTES

PiecesById: TypeAlias = list[bytes] | dict[int, bytes]
"""Empty, or IndexError, where a token is not the pump's to write."""
Direct: TypeAlias = tuple[
    list[bytes],
    int,
    bytes,
    bytes,
    PiecesById,
    Callable[[bytes], int],
    Callable[[bytes, int], None],
    "Row | None",
]
"""Chunk size lines by size; bytes around a piece, counted; before it; behind it; pieces by token id; the socket's send; who
takes over a frame that was not sent whole, with what was sent of it (-1: the connection is broken); the same for
frames that are sent together (step_send.py), None where they may not be."""

Row: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""Descriptor; bytes around a piece; where what is before it lies, and its size; the same of what is behind; 1 if chunked, else 0;
1 if its pieces leave out some of those that most streams write."""
ROWS: Final = np.dtype(
    {
        "names": [
            "fd", "around", "front_at", "front_size", "back_at", "back_size", "is_chunked", "is_picky",
        ],
        "formats": ["<i4", "<i4", "<u8", "<u4", "<u8", "<u4", "<u4", "<u4"],
    },
    align=True,
)  # fmt: skip


def size_line(size: int) -> bytes:
    """What stands before a chunk of so many bytes."""
    return SIZE_LINES[size] if size < MOST_CHUNK_BYTES else b"%x\r\n" % size


def direct_path(
    before: bytes,
    after: bytes,
    is_chunked: bool,
    pieces: PiecesById,
    longest_piece: int,
    send: Callable[[bytes], int],
    spill: Callable[[bytes, int], None],
    fd: int = -1,
) -> Direct | None:
    """The path of one choice's plain tokens; None if its frames could be larger than a size line is kept for."""
    fixed = len(before) + len(after)
    if fixed + longest_piece >= MOST_CHUNK_BYTES:
        return None
    lines = _NO_LINES  # HTTP/1.0
    if is_chunked:
        lines, after = SIZE_LINES, after + b"\r\n"
    row = None
    if fd >= 0:
        row = (
            fd,
            fixed,
            address_of(before),
            len(before),
            address_of(after),
            len(after),
            is_chunked,
            isinstance(pieces, dict),
        )
    return (lines, fixed, before, after, pieces, send, spill, row)


class DirectTable:
    """Columns of a request table with `num_slots` places (rounded up to a power of two)."""

    def __init__(self, num_slots: int) -> None:
        size = 1 << max(0, num_slots - 1).bit_length()
        self.size = size
        self.mask = np.uint64(size - 1)
        self.owner = np.zeros(size, np.uint64)  # req_id; 0: nobody
        self.paths: list[Direct | None] = [None] * size  # None: not by the pump, now
        self.written_ns = np.zeros(size, np.int64)  # of the newest frame
        self.rows = np.zeros(size, ROWS)  # `fd` is -1 where frames must go one by one
        self.rows["fd"] = -1
        # Of streams with logprobs, whose place in `paths` is empty.
        self.logprob_paths: list[LogprobPath | None] = [None] * size
        self.has_logprobs = np.zeros(size, np.bool_)
        self.num_logprob_paths = 0
        # Of streams whose formats make the frames; so is theirs.
        self.made_paths: list[MadePath | None] = [None] * size
        self.is_made = np.zeros(size, np.bool_)
        self.num_made_paths = 0

    def enter(self, req_id: int, slot: int) -> None:
        """The place `slot` is `req_id`'s from here on."""
        self.owner[slot] = req_id
        self.lead(slot, None)
        self.written_ns[slot] = 0

    def lead(self, slot: int, path: Direct | LogprobPath | MadePath | None) -> None:
        """Plain tokens of this place go this way from now on; None: not by the pump."""
        logprob_path: LogprobPath | None = None
        made_path: MadePath | None = None
        if path is not None and not isinstance(path, tuple):
            if path.is_made is True:
                made_path = path
            else:
                logprob_path = path
            path = None
        if made_path is not self.made_paths[slot]:
            is_there = made_path is not None
            self.num_made_paths += is_there - (self.made_paths[slot] is not None)
            self.made_paths[slot] = made_path
            self.is_made[slot] = is_there
        if logprob_path is not self.logprob_paths[slot]:
            is_there = logprob_path is not None
            self.num_logprob_paths += is_there - (self.logprob_paths[slot] is not None)
            self.logprob_paths[slot] = logprob_path
            self.has_logprobs[slot] = is_there
        self.paths[slot] = path
        row = path[-1] if path is not None else None
        if row is not None:
            self.rows[slot] = row
        else:
            self.rows["fd"][slot] = -1

    def leave(self, slot: int) -> None:
        """Nobody's: a stale record finds nothing."""
        self.owner[slot] = 0
        self.lead(slot, None)
