"""Tokens whose frames their own format makes (`ways.Made`): with a number or a time of each, or several tokens a frame.

Owns: which records of a batch are such a token's, and their way to the socket past the task, the text stream and the JSON encoder of the
slow way. Never: takes anything else: a token that is no text by itself, or what waits behind one in its stream; all of that is left to
the pump, in its order. Event loop's thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from shmserve.http.direct import DirectTable, PiecesById, size_line
from shmserve.wire.tokens import ONE_TOKEN, TOKEN_SLOT_BYTES

if TYPE_CHECKING:
    from shmserve.http.choice import Choice
    from shmserve.http.in_flight import InFlight

log = logging.getLogger(__name__)

_COLUMNS: Final = np.dtype(
    {
        "names": ["time_ns", "meta", "token_id", "delay_us"],
        "formats": ["<u8", "<u4", "<u4", "<u4"],
        "offsets": [8, 20, 32, 64],
        "itemsize": TOKEN_SLOT_BYTES,
    }
)


class MadePath:
    """The pump's way for the tokens of one choice. `send` and `spill` are those of any direct path; `note` is told that a frame of the
    choice is on its way."""

    is_made: ClassVar[Literal[True]] = True
    __slots__ = ("_frame", "_is_chunked", "_note", "_send", "_spill", "choice", "pieces")

    def __init__(
        self,
        choice: Choice,
        frame: Callable[[bytes, int], bytes],
        pieces: PiecesById,
        is_chunked: bool,
        send: Callable[[bytes], int],
        spill: Callable[[bytes, int], None],
        note: Callable[[Choice], None],
    ) -> None:
        self.pieces = pieces
        self.choice = choice
        self._frame = frame
        self._is_chunked = is_chunked
        self._send = send
        self._spill = spill
        self._note = note

    def take(
        self, piece: bytes, token_id: int, sampled_ns: int, delay_us: int, popped_ns: int
    ) -> bool:
        """The next token; whether a frame was written."""
        choice, now = self.choice, time.monotonic_ns()
        entry = choice.entry
        entry.popped_ns = popped_ns
        if entry.timing is not None:
            entry.timing.came_alone(sampled_ns, delay_us, popped_ns)
            entry.timing.framed(now)
        choice.num_unwritten += 1
        choice.framed_ns = now
        frame = self._frame(piece, token_id)
        if not frame:
            return False
        if self._is_chunked:
            frame = b"".join((size_line(len(frame)), frame, b"\r\n"))
        try:
            sent = self._send(frame)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = -1
        self._note(choice)
        if sent != len(frame):
            self._spill(frame, sent)
        return True


class MadeSender:
    """Sends what the table's `made_paths` can take. A stream whose frame cannot be made is given to `give_up`."""

    def __init__(self, table: DirectTable, give_up: Callable[[InFlight], None]) -> None:
        self._table = table
        self._give_up = give_up

    def send(
        self,
        view: memoryview,
        slots: npt.NDArray[np.uint64],
        ids: npt.NDArray[np.uint64],
        left: Sequence[int],
        popped_ns: int,
    ) -> tuple[list[int], int, Sequence[int]]:
        """(The records that were taken; how many frames were written; what is left of `left`.)"""
        table = self._table
        chosen = (table.is_made[slots] & (table.owner[slots] == ids)).nonzero()[0]
        if not len(chosen):
            return [], 0, left
        records = np.frombuffer(view, _COLUMNS)[chosen]  # a copy: nothing holds the view
        columns = [records[name].tolist() for name in ("meta", "token_id", "time_ns", "delay_us")]
        del view, ids  # views of the ring, which a traceback that somebody keeps would keep
        paths = table.made_paths
        taken: list[int] = []
        is_left: set[int] = set()  # places of which something is left: all that follows is, too
        num_frames = 0
        for i, place, meta, token_id, time_ns, delay_us in zip(
            chosen.tolist(), slots[chosen].tolist(), *columns, strict=True
        ):
            path = paths[place]  # None: congested since
            if meta != ONE_TOKEN or path is None or place in is_left:
                is_left.add(place)
                continue
            try:
                piece = path.pieces[token_id]
            except IndexError:  # no token of ours: refused by whoever looks at it next
                piece = b""
            if not piece:
                is_left.add(place)
                continue
            taken.append(i)
            try:
                num_frames += path.take(piece, token_id, time_ns, delay_us, popped_ns)
            except Exception:  # a fault of ours, or of one format: it ends this stream only
                log.exception("request %016x: its token could not be written", table.owner[place])
                is_left.add(place)
                self._give_up(path.choice.entry)
        if not taken:
            return taken, 0, left
        gone = set(taken)
        return taken, num_frames, [i for i in left if i not in gone]
