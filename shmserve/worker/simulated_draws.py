"""The draws of the simulated runner: a hash of (seed, position), as an index into the ids that it may choose from.

Owns: draws made ahead of time for rows that decode together: numpy costs the same for one position of 256 rows as for a few of
them, so several steps' draws are made at once. Never: knows what a token may be besides.

Law: what was drawn ahead is what would be drawn now; seeds and positions are compared in every step. Worker's main thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import I4
from shmserve.worker.sampling_state import SamplingState

DEPTH = 16
"""Positions drawn at once, for rows that were drawn for before."""

Index = npt.NDArray[np.intp]


def mix(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of (seed, position): the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draws:
    """Over `choices`."""

    def __init__(self, choices: I4) -> None:
        self._choices = choices
        self._rows: I4 | None = (
            None  # the array itself: who decodes together is named by the same one
        )
        self._at: Index = np.zeros(0, np.intp)
        self._seeds = b""
        self._coming: list[tuple[bytes, Index, I4]] = []  # by position, the next one last

    def of(self, rows: I4, ahead: I4 | None, sampling: SamplingState) -> tuple[Index, I4]:
        """For each of `rows`, `ahead` positions behind its next token: the index that is drawn, and its token.

        Both are shared with later calls: copy before you write.
        """
        if ahead is not None:
            return self._drawn(sampling.seed[rows], sampling.position[rows] + ahead)
        is_known = rows is self._rows
        if not is_known:
            self._rows, self._at, self._coming = rows, rows.astype(np.intp), []
        seeds, positions = sampling.seed[self._at], sampling.position[self._at]
        if self._coming:
            expected, indices, token_ids = self._coming.pop()
            if expected == positions.tobytes() and self._seeds == seeds.tobytes():
                return indices, token_ids
            self._coming = []
        elif is_known:
            self._seeds = seeds.tobytes()
            many = positions + np.arange(DEPTH, dtype=np.int32)[:, None]
            indices, token_ids = self._drawn(seeds, many)
            self._coming = [(many[k].tobytes(), indices[k], token_ids[k]) for k in range(1, DEPTH)]
            self._coming.reverse()
            return indices[0], token_ids[0]
        return self._drawn(seeds, positions)

    def _drawn(self, seeds: npt.NDArray[np.uint64], positions: I4) -> tuple[Index, I4]:
        indices = (mix(seeds, positions) % np.uint64(len(self._choices))).astype(np.intp)
        return indices, self._choices[indices]
