"""Who is in: the places that requests hold, from the verdict on them to the last record of their last sequence.

Owns: the counts that a verdict needs (places taken, sequences and prompt tokens that wait), and the order in which those who wait would
have to go for somebody better. Never: judges (`admission.py` does), or asks the worker: what it knows is what the front end has
submitted, and the STARTED and FINISH records. Event loop's thread only.

    a request of n sequences holds n places:   held -> submitted, waiting -> started -> left
    num_places   all of them        num_waiting, num_tokens   those that are not started
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shmserve.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from shmserve.http.errors import ApiError
    from shmserve.http.in_flight import InFlight
    from shmserve.http.neighbours import Elsewhere


class Party:
    """The sequences of one request. `entries` are those that were submitted; `error` is set when it had to go."""

    __slots__ = (
        "_held_tokens",
        "_line",
        "_num_held",
        "_waiting",
        "entries",
        "error",
        "may_be_evicted",
        "num_over",
        "priority",
    )

    def __init__(self, line: WaitingLine, num_places: int, num_tokens: int, priority: int) -> None:
        self._line = line
        self._num_held = num_places  # without an entry
        self._held_tokens = num_tokens
        self._waiting: dict[int, int] = {}  # req_id -> prompt tokens, of those that are not started
        self.entries: dict[int, InFlight] = {}
        self.priority = priority  # lower is better
        self.num_over = 0
        """Places beyond what there is, which somebody worse has to give when this one is submitted."""
        self.error: ApiError | None = None
        self.may_be_evicted = True  # until one of its sequences is started, or it is gone

    @property
    def num_places(self) -> int:
        return self._num_held + len(self.entries)

    @property
    def num_tokens(self) -> int:
        return self._held_tokens + sum(self._waiting.values())

    def hold_tokens(self, num_tokens: int) -> None:
        """The prompts are known: they have so many tokens together."""
        self._line.num_tokens += num_tokens - self._held_tokens
        self._held_tokens = num_tokens

    def joined(self, entry: InFlight, num_tokens: int) -> None:
        """One of its sequences was put into the table."""
        self._num_held -= 1
        self._held_tokens -= num_tokens
        self._waiting[entry.req_id] = num_tokens
        self.entries[entry.req_id] = entry

    def started(self, entry: InFlight) -> None:
        """A worker computes it."""
        num_tokens = self._waiting.pop(entry.req_id, None)
        if num_tokens is None or self.error is not None:
            return
        self._line.num_waiting -= 1
        self._line.num_tokens -= num_tokens
        self._line.settle(self)

    def left(self, entry: InFlight) -> None:
        """It is forgotten: its FINISH came, or its channel ended."""
        if self.entries.pop(entry.req_id, None) is None:
            return
        if self.error is None:
            self.started(entry)
            self._line.num_places -= 1
        self._waiting.pop(entry.req_id, None)

    def close(self) -> None:
        """Nothing more will be submitted: the places without an entry are free. Silent the second time."""
        num_held, self._num_held = self._num_held, 0
        num_tokens, self._held_tokens = self._held_tokens, 0
        if self.error is None:
            self._line.give_back(num_held, num_held, num_tokens)
        self._line.settle(self)

    def evict(self, error: ApiError) -> None:
        """Its places are somebody else's from here on; whoever asked for it gets `error`."""
        self._line.give_back(self.num_places, self._num_held + len(self._waiting), self.num_tokens)
        self.error = error
        self._line.settle(self)


class WaitingLine:
    """All parties of one front end."""

    def __init__(self) -> None:
        self.num_places = 0
        self.num_waiting = 0
        self.num_tokens = 0
        self._unstarted: LazyHeap[Party] = LazyHeap()
        self._num_parties = 0

    def enter(self, num_places: int, num_tokens: int, priority: int) -> Party:
        """A party that holds `num_places`, and will have at least `num_tokens` of prompt."""
        party = Party(self, num_places, num_tokens, priority)
        self.num_places += num_places
        self.num_waiting += num_places
        self.num_tokens += num_tokens
        self._num_parties += 1
        self._unstarted.put((-priority, -self._num_parties), party)
        return party

    def settle(self, party: Party) -> None:
        """It is not to be sent away any more: one of its sequences was started, or it is gone."""
        party.may_be_evicted = False
        self._unstarted.discard(party)

    def give_back(self, num_places: int, num_waiting: int, num_tokens: int) -> None:
        self.num_places -= num_places
        self.num_waiting -= num_waiting
        self.num_tokens -= num_tokens

    def has_worse_than(self, priority: int) -> bool:
        """Whether somebody waits, wholly, whose priority is worse."""
        found = self._unstarted.first()
        return found is not None and -found[0][0] > priority

    @property
    def worst_priority(self) -> int | None:
        """Of who could be sent away; None if nobody could."""
        found = self._unstarted.first()
        return None if found is None else -found[0][0]

    def worse_than(
        self, priority: int, num_places: int, num_tokens: int, others: Sequence[Elsewhere] = ()
    ) -> list[Party | Elsewhere]:
        """Who would have to go, the worst first and the newest of equals, to free so much; empty if that is not enough.

        Only parties that wait wholly: who has a sequence that is computed keeps its place. `others` wait in other front ends, the
        worst first; of equals our own go before them.
        """
        chosen: list[Party | Elsewhere] = []
        taken: list[tuple[tuple[int, int], Party]] = []
        num_others = 0
        while num_places > 0 or num_tokens > 0:
            found = self._unstarted.first()
            worst = priority if found is None else max(priority, -found[0][0])
            if num_others < len(others) and others[num_others].priority > worst:
                chosen.append(others[num_others])
                num_others += 1
            elif found is not None and -found[0][0] > priority:
                chosen.append(found[1])
                taken.append(found)
                self._unstarted.discard(found[1])
            else:
                break
            num_places -= chosen[-1].num_places
            num_tokens -= chosen[-1].num_tokens
        for key, party in taken:
            self._unstarted.put(key, party)
        return chosen if num_places <= 0 and num_tokens <= 0 else []
