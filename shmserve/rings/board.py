"""A board: named u64 words, fixed-bucket histograms and rosters of one process, one writer, read-only for all others.

Owns: the cells. Never: locks, allocates after it was made, or knows where the table of its names is (board_table.py).

A histogram of n bounds has n + 3 cells: n + 1 counts (the last is above every bound), then the count and the sum of all
observations. A reader sees each cell whole, and the cells of one histogram as of slightly different moments.
A row of a roster is there while its first cell, the key, is not 0: it is stored last and taken away first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmserve.rings import layout as L
from shmserve.rings.board_table import BoardSpec, create_segment, read_table
from shmserve.rings.segment import Segment, SegmentError


class Histogram:
    """Counts by bucket, written by one process. Observations come in arrays: one bincount per batch."""

    def __init__(self, cells: npt.NDArray[np.uint64], bounds: Sequence[int]) -> None:
        self.bounds = tuple(bounds)
        self._edges = np.asarray(bounds, np.float64)
        self._cells = cells
        self._words = cells.data.cast("B").cast("Q")
        self._num_buckets = len(bounds) + 1

    def observe(self, values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
        """Add `values`; one equal to a bound belongs to that bound's bucket (Prometheus' "le")."""
        buckets = self._edges.searchsorted(values, side="left")
        self._cells[: self._num_buckets] += np.bincount(
            buckets, minlength=self._num_buckets
        ).astype(np.uint64)
        self._cells[self._num_buckets] += np.uint64(len(values))
        self._cells[self._num_buckets + 1] += np.uint64(max(0, int(values.sum())))

    def observe_one(self, value: int, count: int = 1) -> None:
        """Add one value, `count` times, without numpy's fixed costs."""
        words = self._words
        words[bisect_left(self.bounds, value)] += count
        words[self._num_buckets] += count
        words[self._num_buckets + 1] += max(0, value) * count

    def cells(self) -> npt.NDArray[np.uint64]:
        """A copy of it: counts by bucket, the count and the sum."""
        return self._cells.copy()

    def add_cells(self, cells: npt.NDArray[np.uint64]) -> None:
        """Add what `cells` of another one with the same bounds holds."""
        self._cells += cells


class Roster:
    """Who is there, row by row, written by one process. A row that the roster does not have is not shown."""

    def __init__(self, words: memoryview, first: int, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        self._words = words
        self._first = first
        self._width = num_columns

    def enter(self, row: int, key: int, *values: int) -> None:
        """Show a row: the key, then a value for each other column."""
        if row < self.num_rows:
            words = self._words
            at = self._first + row * self._width
            words[at] = 0  # nobody takes the old key with the new values
            for cell, value in enumerate(values, at + 1):
                words[cell] = value
            words[at] = key

    def set(self, row: int, column: int, value: int) -> None:
        """Change one value of a row that is there."""
        if row < self.num_rows:
            self._words[self._first + row * self._width + column] = value

    def leave(self, row: int) -> None:
        """Show it no more."""
        if row < self.num_rows:
            self._words[self._first + row * self._width] = 0

    def clear(self) -> None:
        for row in range(self.num_rows):
            self.leave(row)


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """counts has one entry per bound and one for what lies above; not cumulative."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    count: int
    sum: int


class Board:
    """The writing side. `board["name"] = value` stores a word; one thread per word."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        words, table = read_table(segment)
        self._words = words
        self._index: dict[str, int] = table["words"]
        self.histograms: dict[str, Histogram] = {}
        for name, (cell, bounds) in table["histograms"].items():
            cells = np.frombuffer(
                segment.bytes_view(cell * 8, (cell + len(bounds) + 3) * 8), np.uint64
            )
            self.histograms[name] = Histogram(cells, bounds)
        self.rosters = {
            name: Roster(words, cell, num_rows, len(columns))
            for name, (cell, num_rows, columns) in table.get("rosters", {}).items()
        }

    @classmethod
    def create(cls, name: str, spec: BoardSpec, epoch: int) -> Board:
        """Make the segment `name`. Supervisor only; the process it belongs to writes it."""
        return cls(create_segment(name, spec, epoch))

    @staticmethod
    def name(instance: str, epoch: int, role: str, index: int) -> str:
        return f"/shmserve.{instance}.{epoch}.{role}{index}.board"

    def __setitem__(self, name: str, value: int) -> None:
        self._words[self._index[name]] = value

    def __getitem__(self, name: str) -> int:
        return self._words[self._index[name]]

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self._words[self._index[name]] += amount

    def cell(self, name: str) -> int:
        """Index of a word in `words`, for hot paths."""
        return self._index[name]

    @property
    def words(self) -> memoryview:
        return self._words

    def close(self) -> None:
        self.histograms.clear()
        self.segment.close()


class BoardReader:
    """The reading side, in any process. `words()`, `histograms()` and `roster()` copy the moment out."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._words, table = read_table(segment)
        self._index: dict[str, int] = table["words"]
        self._histograms: dict[str, tuple[int, list[int]]] = table["histograms"]
        self._rosters: dict[str, tuple[int, int, list[str]]] = table.get("rosters", {})
        self.epoch = self._words[L.W_EPOCH]

    @classmethod
    def attach(cls, name: str) -> BoardReader:
        """Open the board `name` read-only. Raises SegmentError if it is not there."""
        segment = Segment.attach_readonly(name)
        try:
            return cls(segment)
        except SegmentError:
            segment.close()
            raise

    def __getitem__(self, name: str) -> int:
        return self._words[self._index[name]]

    def get(self, name: str, default: int = 0) -> int:
        index = self._index.get(name)
        return default if index is None else self._words[index]

    def words(self) -> dict[str, int]:
        return {name: self._words[cell] for name, cell in self._index.items()}

    def histograms(self) -> dict[str, HistogramReading]:
        readings = {}
        for name, (cell, bounds) in self._histograms.items():
            cells = self._words[cell : cell + len(bounds) + 3].tolist()
            readings[name] = HistogramReading(
                tuple(bounds), tuple(cells[: len(bounds) + 1]), cells[-2], cells[-1]
            )
        return readings

    def roster(self, name: str) -> list[dict[str, int]]:
        """The rows that are there now, by column; none if there is no such roster. A row that changes meanwhile is left out."""
        if name not in self._rosters:
            return []
        first, num_rows, columns = self._rosters[name]
        rows = []
        for at in range(first, first + num_rows * len(columns), len(columns)):
            if key := self._words[at]:
                cells = self._words[at : at + len(columns)].tolist()
                if cells[0] == key == self._words[at]:
                    rows.append(dict(zip(columns, cells, strict=True)))
        return rows

    def roster_cells(self, name: str) -> npt.NDArray[np.uint64]:
        """All its rows as they are now, one a line, those that are not there with a key of 0; a row may be half changed."""
        if name not in self._rosters:
            return np.zeros((0, 1), np.uint64)
        first, num_rows, columns = self._rosters[name]
        cells = np.array(self._words[first : first + num_rows * len(columns)], np.uint64)
        return cells.reshape(num_rows, len(columns))

    def roster_value(self, name: str, row: int, column: int) -> int:
        """One value; 0 if that row is not there."""
        if name not in self._rosters:
            return 0
        first, num_rows, columns = self._rosters[name]
        at = first + row * len(columns)
        return self._words[at + column] if row < num_rows and self._words[at] else 0

    def close(self) -> None:
        self.segment.close()
