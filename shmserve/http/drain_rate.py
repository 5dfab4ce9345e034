"""How fast those who wait are served: the finishes since the queue formed.

Owns: the measured rate behind Retry-After. Never: guesses from times in which nobody waited: an idle hour says nothing about how fast
a full server is. Event loop's thread only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

FINISHES_REMEMBERED: Final = 64
MOST_S: Final = 60


class DrainRate:
    """`formed`, `finished` and `dissolved` are told to it; `retry_after_s` is what a client is told."""

    def __init__(self) -> None:
        self._formed_at = 0.0
        self._finishes: deque[float] = deque(maxlen=FINISHES_REMEMBERED)
        self._before_s = 0.0  # per finish, when there was a queue last; 0: not known

    def formed(self) -> None:
        """Somebody waits, where nobody did."""
        self._formed_at = time.monotonic()

    def finished(self) -> None:
        """A sequence ended while somebody waited."""
        self._finishes.append(time.monotonic())

    def dissolved(self) -> None:
        """Nobody waits any more."""
        self._before_s = self._per_finish_s()
        self._finishes.clear()

    def retry_after_s(self, num_places: int) -> int:
        """Whole seconds in which so many places should become free, 1 to 60; 1 while nothing is known."""
        return max(1, min(MOST_S, math.ceil(num_places * self._per_finish_s())))

    def _per_finish_s(self) -> float:
        finishes = self._finishes
        if len(finishes) < 2:
            return self._before_s
        is_whole = (
            len(finishes) < FINISHES_REMEMBERED
        )  # then it reaches back to when the queue formed
        since = self._formed_at if is_whole else finishes[0]
        return (time.monotonic() - since) / (len(finishes) - (not is_whole))
