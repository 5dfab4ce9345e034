"""The time between tokens of each request, for the line that it gets in the log: p50 and p99 without keeping its tokens.

Owns: for each request that is being looked at, a row of counts by bucket (16 an octave: 3 % off at most), and which row a place
of the table writes into. Never: costs a token anything on its way; a few thousand are added at once, with those of the histograms.

    rows     row 0 is nobody's: what is not looked at, or came when all MOST_ROWS were taken
Event loop's thread only.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_ROWS: Final = 4_096
"""Requests at once; one more is logged without its p50 and p99."""
# The upper bits of a float64 are its logarithm, 16 steps an octave: cheaper than asking for it.
_SHIFT: Final = 48
_NUM_OCTAVES: Final = 20
_FIRST: Final = int(np.float64(1 << 14).view(np.int64)) >> _SHIFT  # 16 us; the last is 17 s
_NUM_BUCKETS: Final = 16 * _NUM_OCTAVES + 2
_BITS: Final = struct.Struct("2q")
_EDGES: Final = struct.Struct("2d")
_FLOAT: Final = struct.Struct("d")
_WORD: Final = struct.Struct("q")
_ONE: Final = np.uint32(1)  # of the counts' own type: numpy's fast way


class IntervalLog:
    """`row_of_place[slot]` is the row of whoever has that place of the request table."""

    def __init__(self, num_places: int) -> None:
        self.row_of_place = np.zeros(num_places, np.int32)
        # Pages that nobody touches are not there.
        self._counts = np.zeros((MOST_ROWS, _NUM_BUCKETS), np.uint32)
        self._flat = self._counts.reshape(-1)
        self._free = list(range(MOST_ROWS - 1, 0, -1))

    def take_row(self) -> int:
        """An empty row; 0 if there is none."""
        return self._free.pop() if self._free else 0

    def give_back(self, row: int) -> None:
        """Its request is logged, and no place leads to it."""
        if row:
            self._counts[row] = 0
            self._free.append(row)

    def observe(self, rows: npt.NDArray[np.int32], times_ns: npt.NDArray[np.int64]) -> None:
        """Add the times of many tokens, each to its row."""
        buckets = (times_ns.astype(np.float64).view(np.int64) >> _SHIFT) - (_FIRST - 1)
        np.add.at(self._flat, buckets.clip(0, _NUM_BUCKETS - 1) + rows * _NUM_BUCKETS, _ONE)

    def observe_one(self, row: int, time_ns: int, num_at_once: int) -> None:
        """Add the time of a frame's first token, and zeros for those that came with it."""
        if row:  # without an array of one: that takes ten times as long
            (bits,) = _WORD.unpack(_FLOAT.pack(time_ns))
            bucket = (bits >> _SHIFT) - (_FIRST - 1)
            self._counts[row, min(max(0, bucket), _NUM_BUCKETS - 1)] += _ONE
            if num_at_once:
                self._counts[row, 0] += num_at_once

    def quantiles_ms(self, row: int, shares: tuple[float, ...]) -> tuple[float, ...] | None:
        """So many ms or less took those shares of the row's tokens; None if it has none."""
        if not row:
            return None
        counts = self._counts[row]
        buckets = counts.nonzero()[0].tolist()  # a handful, of hundreds
        if not buckets:
            return None
        sums = list(accumulate(counts[buckets].tolist()))
        ranks = [max(1, -int(-share * sums[-1] // 1)) for share in shares]
        return tuple(round(_middle_ms(buckets[bisect_left(sums, rank)]), 3) for rank in ranks)


def _middle_ms(bucket: int) -> float:
    """The middle of a bucket; 0 of the first: at once."""
    if bucket == 0:
        return 0.0
    lower = bucket - 1 + _FIRST
    low, high = _EDGES.unpack(_BITS.pack(lower << _SHIFT, (lower + 1) << _SHIFT))
    return float(low + high) / 2e6
