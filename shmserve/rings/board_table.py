"""The head of a board: the table that says which name has which cells, written once, and believed only if it can be true.

Owns: the layout of the segment up to the first cell, and the JSON in it. Never: reads or writes a cell (board.py does).

    offset  content
         0  BOARD_MAGIC (stored last), VERSION, EPOCH, number of words of the whole segment, bytes of the table
       128  the table: JSON, {"words": {name: cell}, "histograms": {name: [cell, [bounds...]]},
                              "rosters": {name: [cell, rows, [columns...]]}}        (left out where there are none)
     table end, aligned to 128: cells, u64 each
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from shmserve.rings import layout as L
from shmserve.rings.segment import Segment, SegmentError

_TABLE_OFFSET = 128
_W_NUM_WORDS = 3
_W_TABLE_BYTES = 4


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """What a board shows: names of words, histograms by name with ascending integer bounds (their unit is in the name), and
    rosters by name: how many rows, and the columns, of which the first is the key."""

    words: tuple[str, ...]
    histograms: Mapping[str, tuple[int, ...]]
    rosters: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)


def board_bytes(spec: BoardSpec) -> int:
    """What the segment of such a board takes."""
    return _num_words(spec, _lay_out(spec)[0]) * 8


def create_segment(name: str, spec: BoardSpec, epoch: int) -> Segment:
    """A new segment with its table, and all cells 0."""
    first, table = _lay_out(spec)
    num_words = _num_words(spec, first)
    segment = Segment.create(name, num_words * 8)
    segment.mapping[_TABLE_OFFSET : _TABLE_OFFSET + len(table)] = table
    words = segment.words()
    words[L.W_VERSION] = L.VERSION
    words[L.W_EPOCH] = epoch
    words[_W_NUM_WORDS] = num_words
    words[_W_TABLE_BYTES] = len(table)
    words[L.W_CREATED_NS] = time.monotonic_ns()
    words[L.W_MAGIC] = L.BOARD_MAGIC  # last
    return segment


def read_table(segment: Segment) -> tuple[memoryview, dict]:  # type: ignore[type-arg]  # JSON of our own making
    """The words of a segment and the table in it. Raises SegmentError if it is no board, or a damaged one."""
    words = segment.words()
    if words[L.W_MAGIC] != L.BOARD_MAGIC or words[L.W_VERSION] != L.VERSION:
        raise SegmentError(
            errno.EPROTO, f"shared memory {segment.name} is not a board of version {L.VERSION}"
        )
    size = words[_W_TABLE_BYTES]
    try:
        table = json.loads(segment.mapping[_TABLE_OFFSET : _TABLE_OFFSET + size])
        ends = list(table["words"].values())
        ends += [cell + len(bounds) + 2 for cell, bounds in table["histograms"].values()]
        for cell, num_rows, columns in table.get("rosters", {}).values():
            last = cell + num_rows * len(columns) - 1
            ends += [min(cell, last), last]  # one without rows may stand behind the last cell
            ends += [0] if not columns or any(type(name) is not str for name in columns) else []
        is_sound = all(type(cell) is int and 0 < cell < len(words) for cell in ends)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:  # its writer may have written anywhere
        raise SegmentError(errno.EPROTO, f"shared memory {segment.name} has a damaged table")
    return words, table


def _num_words(spec: BoardSpec, first: int) -> int:
    num_cells = len(spec.words) + sum(len(b) + 3 for b in spec.histograms.values())
    return first + num_cells + sum(rows * len(columns) for rows, columns in spec.rosters.values())


def _lay_out(spec: BoardSpec) -> tuple[int, bytes]:
    """First cell (as a word index) and the table. The table's length depends on the cell numbers in it: fix it by padding."""
    draft = _table(spec, 10**6)
    first = -(-(_TABLE_OFFSET + len(draft)) // 128) * 16
    return first, _table(spec, first)


def _table(spec: BoardSpec, first: int) -> bytes:
    words = {name: first + i for i, name in enumerate(spec.words)}
    cell = first + len(spec.words)
    histograms: dict[str, tuple[int, list[int]]] = {}
    for name, bounds in spec.histograms.items():
        histograms[name] = (cell, list(bounds))
        cell += len(bounds) + 3
    table: dict[str, object] = {"words": words, "histograms": histograms}
    if spec.rosters:
        rosters: dict[str, tuple[int, int, list[str]]] = {}
        for name, (num_rows, columns) in spec.rosters.items():
            rosters[name] = (cell, num_rows, list(columns))
            cell += num_rows * len(columns)
        table["rosters"] = rosters
    return json.dumps(table).encode()
