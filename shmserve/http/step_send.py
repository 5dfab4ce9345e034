"""The plain tokens of a step, to all of their sockets in one system call.

Owns: which records of a batch may go together, their frames, and the times that they were written at. Never: sends two frames of one
connection in a call, or anything that is not a plain token of a stream that keeps up; what it leaves is the pump's, one by one.
Event loop's thread only.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.http.direct import DirectTable
from shmserve.http.hop_times import HopTimes
from shmserve.http.uring import MOST_SENDS, SendRing

log = logging.getLogger(__name__)

FEWEST_SENDS: Final = 16
"""Below it the call's own cost (15 us) is more than it saves."""


class StepSender:
    """Sends what a table's direct paths can take. At most MOST_SENDS records at a time."""

    def __init__(self, ring: SendRing, table: DirectTable, times: HopTimes) -> None:
        self._ring = ring
        self._table = table
        self._times = times
        self._first = np.zeros(table.size, np.int64)
        self._order = np.arange(MOST_SENDS + 1)

    def count_together(self, slots: npt.NDArray[np.uint64]) -> int:
        """How many of the records at the front are of different places of the table; 0 if too few to send together.

        A step has one record for each sequence, so where a place comes again, the next step begins.
        """
        count = len(slots)
        if not FEWEST_SENDS <= count <= MOST_SENDS or not self._ring.is_open:
            return 0
        order = self._order[:count]
        self._first[slots[::-1]] = order[::-1]  # the last one written stands: the first of its place
        is_again = self._first[slots] != order
        if is_again.any():
            count = int(is_again.argmax())
        return count if count >= FEWEST_SENDS else 0

    def send(
        self, slots: list[int], is_plain: list[bool], token_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Send what may be sent together; (indices of what was written, in this order; indices of what is left, in order)."""
        paths, written_ns = self._table.paths, self._table.written_ns
        sent: list[int] = []
        left: list[int] = []
        frames: list[bytes] = []
        fds: list[int] = []
        for i, slot, plain, token_id in zip(
            range(len(slots)), slots, is_plain, token_ids, strict=True
        ):
            if plain and (path := paths[slot]) is not None and path[-1] >= 0:
                lines, fixed, front, back, pieces, _, _, fd = path
                try:
                    piece = pieces[token_id]
                except IndexError:  # no token of ours: the pump refuses it
                    piece = b""
                if piece:
                    frames.append(b"".join((lines[fixed + len(piece)], front, piece, back)))
                    fds.append(fd)
                    sent.append(i)
                    continue
            left.append(i)
        if len(frames) < FEWEST_SENDS:
            return [], list(range(len(slots)))
        begin_ns = time.monotonic_ns()
        unsent = self._ring.send(fds, frames)
        took_ns = time.monotonic_ns() - begin_ns
        # The kernel does not say when each was sent: one after the other, and each took about as long.
        shares = self._order[1 : len(frames) + 1] * took_ns // len(frames)
        add_itl = self._times.itl_wire.append
        at_ns = (shares + begin_ns).tolist()
        self._times.written.extend(at_ns)
        for i, at in zip(sent, at_ns, strict=True):
            slot = slots[i]
            add_itl(at - written_ns[slot])
            written_ns[slot] = at
        for k, result in unsent:
            path = paths[slots[sent[k]]]
            assert path is not None
            # EAGAIN: nothing fitted. Any other: the connection is broken.
            path[6](frames[k], 0 if result == -errno.EAGAIN else max(result, -1))
        if self._ring.failure:
            log.error("io_uring_enter: %s; tokens are sent one by one from now on", os.strerror(self._ring.failure))
        return sent, left
