"""How long a step may take, by what its like has taken: how the supervisor tells a worker that hangs from one in a long prefill.

Owns: the slowest decode step and the slowest prefill step, of late, and what a prompt token costs. Never: judges (`health.py`
does, by ten times what is expected here and --hang-timeout), or reads a clock. The worker's main thread only.

    decode     as long as the slowest of the last 1,024 to 2,048 steps
    prefill    the same, of prefill steps; or its tokens, each at the cost of one in the warm-up: the first long prompt of a
               worker's life has no like
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 1024
"""A step that a SIGSTOP made long is forgotten after twice as many of its kind: it must not excuse a hang for ever."""


class Slowest:
    """The greatest of the last WINDOW to 2 * WINDOW values, in O(1)."""

    __slots__ = ("_count", "_former", "_now", "value")

    def __init__(self) -> None:
        self.value = 0
        self._now = 0
        self._former = 0
        self._count = 0

    def add(self, value: int) -> None:
        if value > self._now:
            self._now = value
            self.value = max(value, self._former)
        self._count += 1
        if self._count == WINDOW:
            self._former, self._now, self._count = self._now, 0, 0
            self.value = self._former


class StepTimes:
    """Told of every step; says what the next may take."""

    def __init__(self) -> None:
        self._prefill = Slowest()
        self._decode = Slowest()
        self._token_ns = 0

    def warmed_up(self, num_tokens: int, elapsed_ns: int) -> None:
        """A chunk of a prompt was computed in the warm-up, when nothing else ran."""
        self._token_ns = elapsed_ns // num_tokens

    def expected_ns(self, is_prefill: bool, num_tokens: int) -> int:
        """What a step of `num_tokens` may take; 0 if nothing is known."""
        if not is_prefill:
            return self._decode.value
        return max(self._prefill.value, num_tokens * self._token_ns)

    def took(self, is_prefill: bool, elapsed_ns: int) -> None:
        (self._prefill if is_prefill else self._decode).add(elapsed_ns)
