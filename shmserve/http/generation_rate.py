"""How many tokens a second each worker makes, from the counter on its board: `gen_throughput` of /v1/loads.

Owns: two readings a worker, the rate between them, and nothing else. Never: keeps a timer; who asks pays for the reading, and the rate is
that since a reading of at least a second ago (the first asker is told 0). Event loop's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SHORTEST_NS: Final = 1_000_000_000
"""Two askers a moment apart must not be told what one step happened to bring."""


@dataclass(frozen=True, slots=True)
class _Reading:
    taken_ns: int
    num_tokens: int


class GenerationRates:
    """`look` with every reading of a worker's counter; it gives the rate."""

    def __init__(self) -> None:
        # Worker -> (the reading to count from, the one to count from once that is two spans old).
        self._readings: dict[int, tuple[_Reading, _Reading]] = {}
        self._rates: dict[int, float] = {}

    def look(self, worker: int, now_ns: int, num_tokens: int) -> float:
        """Tokens a second. A counter that fell is a new worker's: it begins anew."""
        now = _Reading(now_ns, num_tokens)
        base, newer = self._readings.get(worker, (now, now))
        if num_tokens < newer.num_tokens:
            base = newer = now
            self._rates.pop(worker, None)
        if now_ns - newer.taken_ns >= SHORTEST_NS:
            base, newer = newer, now
        self._readings[worker] = (base, newer)
        span_ns = now_ns - base.taken_ns
        if span_ns >= SHORTEST_NS:
            self._rates[worker] = (num_tokens - base.num_tokens) * 1e9 / span_ns
        return self._rates.get(worker, 0.0)
