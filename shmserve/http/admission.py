"""Who may come in: the verdict on a request, before any work is done for it.

Owns: the rules. Never: asks the worker; the front end's own counts (`waiting_line.py`) are what it judges by, so a burst in one tick
is judged right, and each verdict costs the same however many wait. Event loop's thread only.

    in while   places + n <= run slots + max_queued_requests      and   waiting tokens + its own <= max_queued_tokens
               (who would be alone in the line is let in, however long its prompt is)

The verdict falls in two steps. `enter`, before anything is rendered or tokenised, takes the places; `settle`, when all of the request
was found valid, knows its tokens exactly. A request with a better priority than somebody who waits passes the first step above the bound,
and sends the worst one away in the second: the newest, among equals. What a worker has started stays; since its word takes a moment, one
whose STARTED is on its way may still be sent away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import web

from shmserve.http.deadlines import deadline_exceeded, waited_too_long
from shmserve.http.drain_rate import DrainRate
from shmserve.http.errors import ApiError, queue_full
from shmserve.http.neighbours import eviction_rank
from shmserve.http.waiting_line import Party, WaitingLine
from shmserve.request import FinishReason

if TYPE_CHECKING:
    from shmserve.config import HttpConfig
    from shmserve.http.client import WorkerClient
    from shmserve.http.in_flight import InFlight
    from shmserve.http.neighbours import Neighbours

PARTY: Final[web.RequestKey[Party]] = web.RequestKey("party", Party)
EVICTED: Final = "The request is aborted by a higher priority request."  # SGLang's words


class Admission:
    """`slots_each` is how many sequences a worker computes at once. The bounds hold over all front ends together: `neighbours` are the
    others, None if there are none."""

    def __init__(
        self,
        client: WorkerClient,
        slots_each: int,
        config: HttpConfig,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._client = client
        self._slots_each = slots_each
        self._neighbours = neighbours
        self._max_queued = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._full_status = config.queue_full_status
        self._rate = DrainRate()
        self.line = WaitingLine()
        self.is_draining = False
        client.on_started = self.started
        client.on_left = self.left

    @property
    def run_slots(self) -> int:
        """Sequences that the workers which serve compute at once; of one, at least."""
        num_serving = sum(link.state == "ready" for link in self._client.links.values())
        return self._slots_each * max(1, num_serving)

    @property
    def most_places(self) -> int:
        return self.run_slots + self._max_queued

    @property
    def _most_ever(self) -> int:
        """The places that there are when all workers serve."""
        return self._slots_each * max(1, len(self._client.links)) + self._max_queued

    @property
    def num_places(self) -> int:
        """Places that are taken, in all front ends."""
        return self.line.num_places + (self._neighbours.num_places if self._neighbours else 0)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens that wait, in all front ends."""
        return self.line.num_tokens + (self._neighbours.num_tokens if self._neighbours else 0)

    def enter(self, num_sequences: int, *, priority: int = 0, least_tokens: int = 0) -> Party:
        """Places for `num_sequences`, whose prompts have `least_tokens` at least; lower priorities are better.

        Raises ApiError, always before anything else was done for the request.
        """
        self.check_open()
        most = self.most_places
        if num_sequences > most and num_sequences > self._most_ever:
            raise ApiError(
                400,
                f"{num_sequences} completions were asked for at once; this server runs {self.run_slots} "
                f"and queues {self._max_queued}",
                param="n",
                code="invalid_value",
            )
        line = self.line
        num_over = self.num_places + num_sequences - most
        is_over = num_over > 0 or self._tokens_over(least_tokens) > 0
        if is_over and not self._has_worse_than(priority):
            if num_over > 0:
                raise self._full("queue_full", num_over)
            raise self._too_many_tokens(least_tokens)
        if not line.num_waiting:
            self._rate.formed()
        party = line.enter(num_sequences, least_tokens, priority)
        party.num_over = min(num_sequences, max(0, num_over))
        self._show_line()
        return party

    def _has_worse_than(self, priority: int) -> bool:
        others = self._neighbours
        return self.line.has_worse_than(priority) or (
            others is not None and others.has_worse_than(priority)
        )

    def settle(self, party: Party, num_tokens: int) -> None:
        """The prompts of `party` have `num_tokens` together, and it is about to be submitted. Raises ApiError."""
        if party.error is not None:
            raise party.error
        self.check_open()
        party.hold_tokens(0)
        places_over = max(0, min(party.num_over, self.num_places - self.most_places))
        tokens_over = self._tokens_over(num_tokens)
        if places_over or tokens_over > 0:
            others = self._neighbours.worse_than(party.priority) if self._neighbours else ()
            worse = self.line.worse_than(party.priority, places_over, tokens_over, others)
            # Who is sent away has its place in the table until the worker has let it go.
            if not worse or self._client.num_free < party.num_places:
                if places_over:
                    raise self._full("queue_full", places_over)
                raise self._too_many_tokens(num_tokens)
            for victim in worse:
                if isinstance(victim, Party):
                    self._evict(victim)
                else:
                    self._client.evict(victim)
        party.num_over = 0
        party.hold_tokens(num_tokens)
        self._show_line()

    def _tokens_over(self, num_tokens: int) -> int:
        """By how many tokens a request with so many would pass the bound; it may if nobody else's wait."""
        if not self._max_tokens:
            return 0
        waiting = self.num_waiting_tokens
        return waiting + num_tokens - self._max_tokens if waiting else 0

    def _evict(self, party: Party) -> None:
        entries = list(party.entries.values())
        party.evict(self._full("evicted", party.num_places, EVICTED))
        assert party.error is not None
        for entry in entries:
            if self._neighbours is not None:
                self._client.show_rank(entry, 0)  # it is on its way out
            self._client.refuse(entry, party.error)

    def close(self, party: Party) -> None:
        """The request of `party` submits nothing more."""
        party.close()
        self._note_line()

    def started(self, entry: InFlight) -> None:
        """A worker computes `entry`."""
        if entry.party is not None:
            party = entry.party
            if self._neighbours is not None and party.may_be_evicted:
                for each in party.entries.values():
                    self._client.show_rank(each, 0)
            party.started(entry)
            self._note_line()

    def left(self, entry: InFlight) -> None:
        """`entry` is forgotten."""
        if entry.party is None:
            return
        if self.line.num_waiting and entry.started is not None and entry.finish is not None:
            self._rate.finished()
        finish = entry.finish
        is_evicted = finish is not None and finish.finish == FinishReason.EVICTED
        if is_evicted and not entry.is_aborted:
            # Another front end had a better one: all of the request goes.
            if entry.party.error is None:
                self._evict(entry.party)
            entry.error = entry.party.error
        entry.party.left(entry)
        self._note_line()
        if finish is not None and finish.finish == FinishReason.TIMEOUT and not finish.scheduled_ns:
            is_own = 0 < entry.deadline_ns <= finish.time_ns
            self.refused("deadline" if is_own else "waiting_timeout")
            entry.expiry = (
                deadline_exceeded("while it waited")
                if is_own
                else waited_too_long(self.retry_after_s())
            )

    def _note_line(self) -> None:
        if not self.line.num_waiting:
            self._rate.dissolved()
        self._show_line()

    def _show_line(self) -> None:
        """Tell the other front ends, whose verdicts count with it: at once, at every change."""
        if self._neighbours is not None:
            worst = self.line.worst_priority
            self._client.show_line(self.line, 0 if worst is None else eviction_rank(worst))

    # -- refusals ---------------------------------------------------------------------------------------------------------

    def refused(self, reason: str) -> None:
        """Count a refusal; `reason` is one of boards.REFUSALS."""
        self._client.note_refusal(reason)

    def retry_after_s(self, num_places: int = 1) -> int:
        """Whole seconds until so many places should be free, by the rate of the last finishes; 1 if there were none."""
        return self._retry_after_s(max(self.num_places + num_places - self.most_places, num_places))

    def _retry_after_s(self, num_over: int) -> int:
        """The rate is of our own finishes: the other front ends' are as many each, since the kernel spreads connections evenly."""
        num_fronts = 1 + (len(self._neighbours) if self._neighbours is not None else 0)
        return self._rate.retry_after_s(-(-num_over // num_fronts))

    def _full(self, reason: str, num_over: int, message: str = "") -> ApiError:
        self.refused(reason)
        text = {"message": message} if message else {}
        return queue_full(self._retry_after_s(num_over), status=self._full_status, **text)

    def _too_many_tokens(self, num_tokens: int) -> ApiError:
        return self._full(
            "tokens",
            max(1, self.line.num_waiting // 2),
            f"The request queue is full: {self.num_waiting_tokens} prompt tokens wait, and {num_tokens} more would pass "
            f"{self._max_tokens} (--max-queued-tokens).",
        )

    def check_open(self) -> None:
        """Raise ApiError (503) while the server drains, or no worker serves."""
        if self.is_draining:
            self.refused("draining")
            raise ApiError(
                503,
                "The server is shutting down.",
                code="draining",
                retry_after_s=self.retry_after_s(),
            )
        if self._client.serving() is None:
            error = self.not_serving()
            self.refused(str(error.code))
            raise error

    def not_serving(self) -> ApiError:
        """503 that says what the workers are doing instead."""
        links = list(self._client.links.values())
        for link in links:
            if link.state == "loading":
                return ApiError(
                    503,
                    f"The model is loading ({link.phase or 'starting'}, {link.fraction:.0%}).",
                    code="loading",
                    retry_after_s=1,
                )
        states = (
            ", ".join(f"worker {link.worker} is {link.state}" for link in links) or "no worker yet"
        )
        return ApiError(503, f"No worker serves: {states}.", code="no_worker", retry_after_s=1)
