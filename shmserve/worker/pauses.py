"""Who is paused, and for which of three reasons: its client, its output that waits outside the ring, its grammar that compiles.

Owns: the first two reasons of each running or waiting request (constraints.py knows the third). Never: decides when output is too much
(the emitters do). A sequence goes on when its last reason is gone. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shmserve.worker.constraints import Constraints
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence


class Pauses:
    """`by_id` is the engine's: every request that has no answer yet."""

    def __init__(
        self, by_id: Mapping[int, Sequence], scheduler: Scheduler, constraints: Constraints
    ) -> None:
        self._by_id = by_id
        self._scheduler = scheduler
        self._constraints = constraints
        self._backlogged: set[int] = set()  # their output waits outside the ring
        self._held: set[int] = set()  # by PAUSE records

    def __len__(self) -> int:
        """Sequences, each once, whatever its reasons."""
        num_paused = len(self._backlogged) + len(self._held) + self._constraints.num_compiling
        if self._held:  # what compiles has no output yet, so none of it is backlogged
            num_paused -= len(self._backlogged & self._held)
            if self._constraints.num_compiling:
                num_paused -= sum(map(self._constraints.is_compiling, self._held))
        return num_paused

    def hold(self, req_id: int, is_held: bool) -> None:
        """The client has paused the request, or lets it go on."""
        if req_id in self._by_id:
            (self._held.add if is_held else self._held.discard)(req_id)
            self.apply(req_id)

    def can_backlog(self, req_id: int) -> bool:
        return req_id in self._by_id and req_id not in self._backlogged

    def backlog(self, req_id: int) -> None:
        """Too much of its output waits."""
        self._backlogged.add(req_id)
        self.apply(req_id)

    def relieve(self, is_relieved: Callable[[int], bool]) -> None:
        """Let those go on whose channel `is_relieved`."""
        if self._backlogged:
            for req_id in list(self._backlogged):
                if is_relieved(self._by_id[req_id].channel):
                    self._backlogged.discard(req_id)
                    self.apply(req_id)

    def apply(self, req_id: int) -> None:
        """Tell the scheduler what follows from all reasons."""
        is_held = req_id in self._held
        is_paused = is_held or req_id in self._backlogged or self._constraints.is_compiling(req_id)
        self._scheduler.set_paused(self._by_id[req_id], is_paused, yields=is_held)

    def forget(self, req_id: int) -> None:
        """The request has ended."""
        self._backlogged.discard(req_id)
        self._held.discard(req_id)
