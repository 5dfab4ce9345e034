"""The other front ends of this instance, as their boards show them: what they hold, and whom they could give up.

Owns: the sums over them. Never: writes, or waits: each number is as of this moment, since they write theirs when it changes. A front end
that died is gone with its board, on the supervisor's word. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmserve.boards import REQUEST_COLUMNS

if TYPE_CHECKING:
    from shmserve.http.health import Boards
    from shmserve.rings.board import BoardReader

_LOWEST: Final = -(2**31)


def eviction_rank(priority: int) -> int:
    """A priority as the boards show it: greater is worse, and 0 is who stays."""
    return priority - _LOWEST + 1


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A sequence that waits in another front end. It is sent away through its worker, unless that has begun it meanwhile."""

    req_id: int
    worker: int
    priority: int
    submitted_ns: int
    num_tokens: int
    num_places: int = 1


class Neighbours:
    """All front ends but number `index`."""

    def __init__(self, index: int, boards: Boards) -> None:
        self._index = index
        self._boards = boards

    def _readers(self) -> Iterator[BoardReader]:
        for (role, index), reader in self._boards.readers.items():
            if role == "http" and index != self._index:
                yield reader

    def __len__(self) -> int:
        return sum(1 for _ in self._readers())

    @property
    def num_places(self) -> int:
        """Places of their waiting lines that are taken."""
        return sum(reader["places"] for reader in self._readers())

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait with them."""
        return sum(reader["waiting_tokens"] for reader in self._readers())

    @property
    def num_in_flight(self) -> int:
        return sum(reader["in_flight"] for reader in self._readers())

    def in_flight_to(self, worker: int) -> int:
        """Sequences that they have in flight to a worker."""
        return sum(reader.roster_value("workers", worker, 1) for reader in self._readers())

    def has_worse_than(self, priority: int) -> bool:
        """Whether somebody waits with one of them whose priority is worse."""
        rank = eviction_rank(priority)
        return any(reader["worst_waiting"] > rank for reader in self._readers())

    def worse_than(self, priority: int) -> list[Elsewhere]:
        """The sequences that wait with them and whose priority is worse: the worst first, the newest of equals."""
        found: list[Elsewhere] = []
        if not self.has_worse_than(priority):
            return found
        at = {name: i for i, name in enumerate(REQUEST_COLUMNS)}
        for reader in self._readers():
            rows = reader.roster_cells("requests")
            worse = (rows[:, 0] != 0) & (rows[:, at["eviction_rank"]] > eviction_rank(priority))
            found += [
                Elsewhere(
                    row[at["req_id"]],
                    row[at["worker"]],
                    row[at["eviction_rank"]] - 1 + _LOWEST,
                    row[at["submitted_ns"]],
                    row[at["prompt_tokens"]],
                )
                for row in rows[worse].tolist()
            ]
        found.sort(key=lambda each: (-each.priority, -each.submitted_ns))
        return found
