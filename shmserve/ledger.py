"""What children that are gone had counted: a death must not make the instance's sums smaller.

Owns: the words `past_*` of the supervisor's board. Never: counts anything itself. Supervisor only; read by `http/metrics.py`.

    sum over the living boards + past        only grows, while the instance lives

The board of a child that died is removed and its counts are added here between two values of `ledger_version`, the first of them odd.
Who reads the version before and after everything else, and finds the same even one, has counted nobody twice and nobody not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shmserve.boards import counters_of
from shmserve.rings.board import Board

VERSION: Final = "ledger_version"
MOST_COUNT: Final = 1 << 62
"""A count as large is no count: who wrote it had lost its way, which may be why it is gone."""


class Ledger:
    """`board` is the supervisor's."""

    def __init__(self, board: Board) -> None:
        self._board = board

    @contextmanager
    def taking_over(self, role: str, gone: Board) -> Iterator[None]:
        """Inside, `gone` is removed: its process writes no more. At the end its counts are ours."""
        past = {word: gone[word] for word in counters_of(role)}
        histograms = {name: histogram.cells() for name, histogram in gone.histograms.items()}
        board = self._board
        board.add(VERSION)
        try:
            yield
        finally:
            for word, value in past.items():
                if 0 < value < MOST_COUNT:
                    board.add(f"past_{role}_{word}", value)
            for name, cells in histograms.items():
                board.histograms[f"past_{role}_{name}"].add_cells(cells)
            board.add(VERSION)
