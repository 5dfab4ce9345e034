"""Which sequences are out of time: their clients' own deadlines, and the operator's bounds on waiting and on running.

Owns: for each sequence that has a bound, the moment at which it ends. Never: ends one (the engine does, in the queue and while it runs).
A step asks for the nearest moment only; who has no bound is never looked at. Worker's main thread only.

    waits    until the client's deadline, or --waiting-timeout after it arrived at the front end
    runs     until the client's deadline, or --running-timeout after it was admitted; a preemption changes nothing
"""

from __future__ import annotations

import time
from typing import Final

from shmserve.config import WorkerConfig
from shmserve.lazy_heap import LazyHeap
from shmserve.wire.submit import Submit
from shmserve.worker.sequence import Sequence

MOST_WAIT_MS: Final = 3_600_000
"""An idle worker looks again so often: a deadline may be anything, and poll() takes 24 days at most."""


class Deadlines:
    """Of one worker."""

    def __init__(self, config: WorkerConfig) -> None:
        self._waiting_ns = int(config.waiting_timeout_s * 1e9)
        self._running_ns = int(config.running_timeout_s * 1e9)
        self._heap: LazyHeap[Sequence] = LazyHeap()

    @property
    def num_bounded(self) -> int:
        """Sequences that have a bound."""
        return len(self._heap)

    def arrived(self, sequence: Sequence, request: Submit) -> None:
        """It waits."""
        sequence.deadline_ns = request.deadline_ns
        # One that came without its arrival has waited since it was received.
        since_ns = request.arrival_ns or sequence.received_ns
        self._bound(sequence, since_ns + self._waiting_ns if self._waiting_ns else 0)

    def started(self, sequence: Sequence) -> None:
        """It runs, for the first time."""
        if self._waiting_ns or self._running_ns:
            at_ns = sequence.admitted_ns + self._running_ns if self._running_ns else 0
            self._bound(sequence, at_ns)

    def _bound(self, sequence: Sequence, at_ns: int) -> None:
        bounds = [at for at in (at_ns, sequence.deadline_ns) if at]
        if bounds:
            self._heap.put(min(bounds), sequence)
        else:
            self._heap.discard(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._heap.discard(sequence)

    def due(self, now_ns: int) -> list[Sequence]:
        """Who is out of time, each told of once."""
        found: list[Sequence] = []
        while (first := self._heap.first()) is not None and first[0] <= now_ns:
            found.append(first[1])
            self._heap.discard(first[1])
        return found

    def wait_ms(self) -> int | None:
        """How long an idle worker may sleep; None if nobody's time runs."""
        first = self._heap.first()
        if first is None:
            return None
        left_ns: int = first[0] - time.monotonic_ns()
        return min(MOST_WAIT_MS, max(0, -(-left_ns // 1_000_000)))
