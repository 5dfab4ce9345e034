"""The tokens of streams with logprobs, from their records to their sockets, past every object of the slow way.

Owns: which records of a batch are such a token's (its TOP_LOGPROBS slots, then one TOKENS slot, all in this batch), and their frames.
Never: takes anything else: a token that is no text by itself, a record that cannot be, what waits behind either in its stream; all
of that is left to the pump, in its order. Event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shmserve.http.direct import DirectTable, PiecesById, size_line
from shmserve.http.hop_times import HopTimes
from shmserve.http.logprob_frames import LogprobFrames
from shmserve.http.logprobs import FLOOR
from shmserve.wire.logprobs import PAIRS_PER_SLOT
from shmserve.wire.tokens import ONE_TOKEN, TOKEN_SLOT_BYTES, TokenKind

_encode = msgspec.json.encode
# A slot is either kind; `top_*` mean nothing in a TOKENS slot, `logprob` nothing in the other. An id below 0 is one far above.
_COLUMNS: Final = np.dtype(
    {
        "names": ["meta", "top_ids", "top_logprobs", "logprob"],
        "formats": ["<u4", "(12,)<u4", "(12,)<f4", "<f4"],
        "offsets": [20, 32, 80, 96],
        "itemsize": TOKEN_SLOT_BYTES,
    }
)


class LogprobPath:
    """The pump's way for the tokens of one choice. `send` and `spill` are those of any direct path."""

    is_made: ClassVar[Literal[False]] = False
    __slots__ = ("_around", "_back", "_is_chunked", "frames", "pieces", "send", "spill")

    def __init__(
        self,
        frames: LogprobFrames,
        pieces: PiecesById,
        is_chunked: bool,
        send: Callable[[bytes], int],
        spill: Callable[[bytes, int], None],
    ) -> None:
        self.frames = frames
        self.pieces = pieces
        self.send = send
        self.spill = spill
        self._is_chunked = is_chunked
        self._around = len(frames.front) + len(frames.middle) + len(frames.back)
        self._back = frames.back + b"\r\n" if is_chunked else frames.back

    def frame(
        self, piece: bytes, token_id: int, numbers: Sequence[bytes], top_ids: Sequence[int]
    ) -> bytes:
        """Raises IndexError for what is no token."""
        frames = self.frames
        logprobs = frames.logprobs(token_id, numbers, top_ids)
        line = b""
        if self._is_chunked:
            line = size_line(self._around + len(piece) + len(logprobs))
        return b"".join((line, frames.front, piece, frames.middle, logprobs, self._back))


def _numbers(values: npt.NDArray[np.float32]) -> list[bytes]:
    """As JSON has them: there are no infinities in it."""
    finite = np.where(np.isfinite(values), values, np.float32(FLOOR))
    return _encode(finite.ravel().tolist())[1:-1].split(b",")


class LogprobSender:
    """Sends what the table's `logprob_paths` can take."""

    def __init__(self, table: DirectTable, times: HopTimes) -> None:
        self._table = table
        self._times = times

    def send(
        self,
        view: memoryview,
        slots: npt.NDArray[np.uint64],
        ids: npt.NDArray[np.uint64],
        left: Sequence[int],
    ) -> tuple[list[int], Sequence[int]]:
        """(The TOKENS records that were written, in this order; what is left of `left`.)"""
        table = self._table
        chosen = (table.has_logprobs[slots] & (table.owner[slots] == ids)).nonzero()[0]
        if not len(chosen):
            return [], left
        records = np.frombuffer(view, _COLUMNS)[chosen]  # a copy: nothing holds the view
        del view, ids  # views of the ring, which a traceback that somebody keeps would keep
        metas, places, indices = records["meta"], slots[chosen].tolist(), chosen.tolist()
        counts = metas >> 8 & 0xFF
        is_top = (
            (metas & 0xFF == TokenKind.TOP_LOGPROBS) & (counts > 0) & (counts <= PAIRS_PER_SLOT)
        )
        beside = records[is_top]
        num_beside = counts[is_top].tolist()
        width = max(num_beside, default=0)
        top_ids = beside["top_ids"][:, :width].tolist()
        top_numbers = _numbers(beside["top_logprobs"][:, :width])
        token_ids = records["top_ids"][:, 0].tolist()
        own_numbers = _numbers(np.where(is_top, np.float32(0), records["logprob"]))
        nth_top = np.where(is_top, is_top.cumsum() - 1, -1).tolist()  # a row's place in `beside`
        written: list[int] = []
        taken: list[int] = []
        is_left: set[int] = set()  # places of which something is left: all that follows is, too
        run: list[int] = []  # rows of TOP_LOGPROBS that stand right before, all of one place
        for k, (place, meta, nth) in enumerate(zip(places, metas.tolist(), nth_top, strict=True)):
            if run and places[run[0]] != place:
                is_left.add(places[run[0]])
                run = []
            if place in is_left:
                continue
            if nth >= 0:
                run.append(k)
                continue
            numbers, others = [own_numbers[k]], []
            for row in run:
                i = nth_top[row]
                count = num_beside[i]
                numbers += top_numbers[i * width : i * width + count]
                others += top_ids[i][:count]
            if meta == ONE_TOKEN and self._write(place, token_ids[k], numbers, others):
                written.append(indices[k])
                taken += run
                taken.append(k)
            else:
                is_left.add(place)
            run = []
        if not taken:
            return written, left
        gone = set(chosen[taken].tolist())
        return written, [i for i in left if i not in gone]

    def _write(
        self, place: int, token_id: int, numbers: Sequence[bytes], top_ids: Sequence[int]
    ) -> bool:
        """Write one token's frame; False, with nothing done, if it is not ours to write."""
        path = self._table.logprob_paths[place]
        if path is None or len(top_ids) != path.frames.num_top:  # congested; or some came before
            return False
        try:
            piece = path.pieces[token_id]
            if not piece:
                return False
            frame = path.frame(piece, token_id, numbers, top_ids)
        except IndexError:  # no token of ours: refused by whoever looks at it next
            return False
        try:
            sent = path.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = -1
        at_ns = time.monotonic_ns()
        written_ns = self._table.written_ns
        self._times.written.append(at_ns)
        self._times.itl_wire.append(at_ns - int(written_ns[place]))
        written_ns[place] = at_ns
        if sent != len(frame):
            path.spill(frame, sent)
        return True
