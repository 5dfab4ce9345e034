"""Where the tokens of one front end spent their time: collected in arrays, folded into its board's histograms.

Owns: the four hops of a token (sampled, published, popped, framed, written) and the time between the frames of a stream, for the tokens
that the pump writes itself (`note_turn`) and for those that go the slow way: their records (`note_slots`) and the frames that they end in
(`note_frame`). Never: computes anything per token; a few thousand are folded at once, and whatever there is on the heartbeat.
Event loop's thread only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from shmserve.http.interval_log import IntervalLog
from shmserve.rings.board import Board
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TOKENS_DTYPE, TOKENS_PER_SLOT, TokenKind

if TYPE_CHECKING:
    from shmserve.http.in_flight import InFlight

FOLD_AFTER: Final = 4096
FOLD_RECORDS_AFTER: Final = 1024
"""Records are kept whole until they are folded, 128 bytes each."""
_KIND_AT: Final = 20
_TOKENS: Final = int(TokenKind.TOKENS)
MOST_HOP_NS: Final = 3_600_000_000_000


class HopTimes:
    """`written` and `itl_wire` are filled by the pump, a number each for every token that it has written."""

    def __init__(self, board: Board) -> None:
        self.written = array("q")
        self.itl_wire = array("q")
        self._histograms = board.histograms
        # Times, delays, popped, how many were written.
        self._turns: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32], int, int]] = []
        self._records: list[tuple[npt.NDArray[np.uint8], int]] = []
        self._num_records = 0
        self._frames = array("q")  # popped -> framed, framed -> written of each
        self._frames_itl = array("q")
        self.intervals: IntervalLog | None = None  # only where somebody wants them by request
        self._rows: list[npt.NDArray[np.int32]] = []  # of each turn's tokens

    def note_turn(
        self,
        times_ns: npt.NDArray[np.uint64],
        delays_us: npt.NDArray[np.uint32],
        popped_ns: int,
        num_written: int,
        places: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """The pump has written so many tokens, and appended their times to `written` and `itl_wire`. `places` of the table are given where
        `intervals` is."""
        self._turns.append((times_ns, delays_us, popped_ns, num_written))
        if places is not None and self.intervals is not None:
            self._rows.append(self.intervals.row_of_place[places])
        if len(self.written) >= FOLD_AFTER:
            self.fold()

    def note_slots(self, view: memoryview, chosen: list[int], popped_ns: int) -> None:
        """Slots of `view` that go the slow way, to a stream or into a plain answer; those that hold no tokens are passed over."""
        # As rows of bytes: numpy takes 20 times as long to join arrays with named fields. A copy, so nothing holds the view.
        records = np.frombuffer(view, np.uint8).reshape(-1, TOKEN_SLOT_BYTES)[chosen]
        records = records[records[:, _KIND_AT] == _TOKENS]
        self._records.append((records, popped_ns))
        self._num_records += len(records)
        if self._num_records >= FOLD_RECORDS_AFTER:
            self.fold()

    def note_frame(self, entry: InFlight, framed_ns: int, written_ns: int, num_tokens: int) -> None:
        """A frame of the slow way was written: its newest token's times.

        Who came with another token in one frame came at once: a time of 0.
        """
        before_ns, row = entry.last_written_ns, entry.log_row
        self._frames.append(framed_ns - entry.popped_ns)
        self._frames.append(written_ns - framed_ns)
        if before_ns:
            # Not into `itl_wire`: the pump may be in the middle of a turn.
            self._frames_itl.append(written_ns - before_ns)
            if self.intervals is not None:
                self.intervals.observe_one(row, written_ns - before_ns, num_tokens - 1)
            if num_tokens > 1:
                self._histograms["itl_wire_us"].observe_one(0, num_tokens - 1)
        if len(self._frames) >= FOLD_AFTER:
            self._fold_frames()

    def note_held(self, since_ns: int, until_ns: int, written_ns: int, num_tokens: int) -> None:
        """Tokens beside a frame's newest that had waited for a slow client: the first was framed at `since_ns`, the last at `until_ns`.
        The others are taken to have come evenly between them: it is not worth a time each while they wait."""
        held_ns = written_ns - np.linspace(since_ns, until_ns, num_tokens, dtype=np.int64)
        self._observe("hop_write_us", held_ns)

    def drop(self) -> None:
        """Forget what the pump has collected: a turn that broke off has left times without their records."""
        self._turns.clear()
        self._rows.clear()
        del self.written[:]
        del self.itl_wire[:]

    def fold(self) -> None:
        """Put what was collected into the board's histograms."""
        if self._turns:
            self._fold_turns()
        if self._records:
            self._fold_records()
        if self._frames:
            self._fold_frames()
        if self.itl_wire:
            itl_ns = np.array(self.itl_wire, np.int64)
            del self.itl_wire[:]
            self._histograms["itl_wire_us"].observe(itl_ns // 1000)
            if self._rows and self.intervals is not None:
                rows, self._rows = np.concatenate(self._rows), []
                self.intervals.observe(rows, itl_ns)

    def _fold_frames(self) -> None:
        both = np.array(self._frames, np.int64).reshape(-1, 2)
        del self._frames[:]
        self._observe("hop_frame_us", both[:, 0])
        self._observe("hop_write_us", both[:, 1])
        if self._frames_itl:
            itl_ns = np.array(self._frames_itl, np.int64)
            del self._frames_itl[:]
            self._histograms["itl_wire_us"].observe(itl_ns // 1000)

    def _fold_turns(self) -> None:
        turns, self._turns = self._turns, []
        written = np.array(self.written, np.int64)
        del self.written[:]
        lengths = np.array([turn[3] for turn in turns])
        sampled = np.concatenate([turn[0] for turn in turns]).astype(np.int64)
        published = sampled + np.concatenate([turn[1] for turn in turns]).astype(np.int64) * 1000
        popped_of_turn = np.array([turn[2] for turn in turns], np.int64)
        popped = np.repeat(popped_of_turn, lengths)
        # A token is framed when the one before it in its turn has been written: framing itself takes 0.3 us.
        framed = np.empty_like(written)
        framed[1:] = written[:-1]
        framed[np.cumsum(lengths) - lengths] = popped_of_turn
        self._observe("hop_publish_us", published - sampled)
        self._observe("hop_pop_us", popped - published)
        self._observe("hop_frame_us", framed - popped)
        self._observe("hop_write_us", written - framed)

    def _fold_records(self) -> None:
        turns, self._records = self._records, []
        self._num_records = 0
        records = np.concatenate([turn[0] for turn in turns]).view(TOKENS_DTYPE)[:, 0]
        popped = np.repeat([turn[1] for turn in turns], [len(turn[0]) for turn in turns])
        counts = records["count"].clip(1, TOKENS_PER_SLOT)
        begin = records["time_ns"].astype(np.int64)
        after = records["dt_us"].astype(np.int64) * 1000
        published = begin + after[:, 0]
        after[:, 0] = 0
        is_there = np.arange(TOKENS_PER_SLOT) < counts[:, None]
        # Of a record that was merged, each token was sampled at its own time.
        self._observe("hop_publish_us", ((published - begin)[:, None] - after)[is_there])
        self._observe("hop_pop_us", np.repeat(popped - published, counts))

    def _observe(self, name: str, hop_ns: npt.NDArray[np.int64]) -> None:
        # A worker's time may be anything, and a histogram's sum must stay one.
        self._histograms[name].observe(hop_ns.clip(0, MOST_HOP_NS) // 1000)
