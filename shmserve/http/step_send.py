"""The plain tokens of a step, to all of their sockets in one system call.

Owns: which records of a batch may go together, where the parts of their frames lie, and the times that they were written at. Never:
touches a Python object per token, sends two frames of one connection in a call, or anything that is not a plain token of a stream that
keeps up; what it leaves is the pump's, one by one. Event loop's thread only.

    frame = size line | what is before the piece | piece | what is behind it      each part lies ready somewhere; numpy says where
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.http.direct import SIZE_LINES, DirectTable
from shmserve.http.hop_times import HopTimes
from shmserve.http.uring import MOST_SENDS, SendRing, address_of

log = logging.getLogger(__name__)

FEWEST_SENDS: Final = 16
"""Below it the call's own cost is more than it saves."""

Indices = npt.NDArray[np.intp]
_NONE: Final = np.zeros(0, np.intp)


class _Cells:
    """Byte strings by number: where each lies, and its size."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self._data = b"".join(strings)  # which must live as long as its address is used
        self.size = np.fromiter(map(len, strings), np.uint64, len(strings))
        ends = self.size.cumsum(dtype=np.uint64)
        self.address = ends - self.size + np.uint64(address_of(self._data))


class StepSender:
    """Sends what a table's direct paths can take, at most MOST_SENDS records at a time.

    `pieces` are the text of each token as most streams write it; streams with others go one by one.
    """

    def __init__(
        self, ring: SendRing, table: DirectTable, times: HopTimes, pieces: list[bytes]
    ) -> None:
        self._ring = ring
        self._table = table
        self._times = times
        self._pieces = pieces
        self._cells = _Cells(pieces)
        self._lines = _Cells(SIZE_LINES)
        self._first = np.zeros(table.size, np.intp)
        self._order = np.arange(MOST_SENDS + 1)

    @property
    def is_open(self) -> bool:
        """False once the kernel has refused a call: from then on everything is left to the pump."""
        return self._ring.is_open

    def takes(self, pieces: list[bytes]) -> bool:
        """Whether a stream that writes these, wherever they are not empty, may go together with others."""
        return pieces is self._pieces and self._ring.is_open

    def count_together(self, slots: npt.NDArray[np.uint64]) -> int:
        """How many of the records at the front are of different places of the table; 0 if too few to send together.

        A step has one record for each sequence, so where a place comes again, the next step begins.
        """
        count = len(slots)
        if not FEWEST_SENDS <= count <= MOST_SENDS or not self._ring.is_open:
            return 0
        order = self._order[:count]
        self._first[slots[::-1]] = order[
            ::-1
        ]  # the last one written stands: the first of its place
        is_again = self._first[slots] != order
        if self._table.num_logprob_paths:  # several records a token, none of which goes together
            is_again &= self._table.rows["fd"][slots] >= 0
        if is_again.any():
            count = int(is_again.argmax())
        return count if count >= FEWEST_SENDS else 0

    def send(
        self,
        slots: npt.NDArray[np.uint64],
        is_plain: npt.NDArray[np.bool_],
        token_ids: npt.NDArray[np.uint32],
    ) -> tuple[Indices, Sequence[int]]:
        """Send what may go together; (which records were written, in this order; which are left)."""
        count = len(slots)
        rows = self._table.rows[slots]
        # No piece: no text of its own, or no token of ours; the pump looks at it.
        is_ours = token_ids < len(self._pieces)
        tokens = np.where(is_ours, token_ids, 0)
        sizes = self._cells.size[tokens]
        may_go = is_plain & is_ours & (rows["fd"] >= 0) & (sizes > 0)
        self._ask_picky(slots, rows, tokens, may_go)
        chosen = may_go.nonzero()[0]
        num_chosen = len(chosen)
        if num_chosen < FEWEST_SENDS:
            return _NONE, range(count)
        left: Sequence[int] = ()
        if num_chosen < count:
            left = (~may_go).nonzero()[0].tolist()
            slots, rows, tokens, sizes = slots[chosen], rows[chosen], tokens[chosen], sizes[chosen]
        whole = self._lay_out(rows, tokens, sizes)
        begin_ns = time.monotonic_ns()
        results = self._ring.send(rows["fd"])
        took_ns = time.monotonic_ns() - begin_ns
        self._note_written(slots, begin_ns, took_ns)
        unsent = (results != whole).nonzero()[0]
        if len(unsent):
            self._spill(slots[unsent], tokens[unsent], results[unsent])
        return chosen, left

    def _ask_picky(
        self,
        slots: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.void],
        tokens: Indices,
        may_go: npt.NDArray[np.bool_],
    ) -> None:
        """Take out of `may_go` what a stream's own pieces leave out: such a token touches one of its stop strings."""
        picky = (may_go & (rows["is_picky"] > 0)).nonzero()[0]
        if not len(picky):
            return
        paths = self._table.paths
        for i, slot, token_id in zip(
            picky.tolist(), slots[picky].tolist(), tokens[picky].tolist(), strict=True
        ):
            path = paths[slot]
            if path is None or not path[4][token_id]:
                may_go[i] = False

    def _lay_out(
        self, rows: npt.NDArray[np.void], tokens: Indices, sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Say where the parts of the frames lie; the size of each frame in bytes."""
        count = len(rows)
        chunk = rows["around"] + sizes.astype(np.intp)
        parts = self._ring.parts[:count]
        at, size = parts["address"], parts["size"]
        at[:, 0], size[:, 0] = (
            self._lines.address[chunk],
            self._lines.size[chunk] * rows["is_chunked"],
        )
        at[:, 1], size[:, 1] = rows["front_at"], rows["front_size"]
        at[:, 2], size[:, 2] = self._cells.address[tokens], sizes
        at[:, 3], size[:, 3] = rows["back_at"], rows["back_size"]
        whole: npt.NDArray[np.int64] = size.sum(axis=1, dtype=np.int64)
        return whole

    def _note_written(self, slots: npt.NDArray[np.uint64], begin_ns: int, took_ns: int) -> None:
        """The kernel does not say when each was sent: one after the other, and each took about as long."""
        count = len(slots)
        at_ns = self._order[1 : count + 1] * took_ns // count + begin_ns
        written_ns = self._table.written_ns
        self._times.written.frombytes(at_ns.tobytes())
        self._times.itl_wire.frombytes((at_ns - written_ns[slots]).tobytes())
        written_ns[slots] = at_ns

    def _spill(
        self, slots: npt.NDArray[np.uint64], tokens: Indices, results: npt.NDArray[np.int64]
    ) -> None:
        """Hand over the frames that were not sent whole."""
        if self._ring.failure:
            why = os.strerror(self._ring.failure)
            log.error("io_uring_enter: %s; tokens are sent one by one from now on", why)
        for slot, token_id, result in zip(
            slots.tolist(), tokens.tolist(), results.tolist(), strict=True
        ):
            path = self._table.paths[slot]
            assert path is not None, "a place with a row has a path"
            lines, around, front, back, pieces, _, spill, _ = path
            piece = pieces[token_id]
            frame = b"".join((lines[around + len(piece)], front, piece, back))
            # EAGAIN: nothing fitted. Any other: the connection is broken.
            spill(frame, 0 if result == -errno.EAGAIN else max(result, -1))
