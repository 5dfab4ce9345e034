"""The front end's table of requests in flight, of all workers: who gets a place, what is sent, and when the place is free again.

Owns: req_ids, the table, one link a worker (worker_link.py: the channel to it). Never: knows HTTP or text.

Laws: every SUBMIT that was written is in the table until its FINISH or its channel's end; the table bounds what can wait
outside a ring. An ABORT is never lost: it waits in the writer's backlog, one per request.
Event loop's thread only.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shmserve.boards import REQUEST_COLUMNS
from shmserve.config import RingConfig
from shmserve.http.direct import DirectTable
from shmserve.http.endings import Endings
from shmserve.http.errors import ApiError, aborted, worker_died
from shmserve.http.hop_times import HopTimes
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.logprobs import LogprobLog
from shmserve.http.neighbours import Elsewhere, eviction_rank
from shmserve.http.routing import Router
from shmserve.http.step_send import StepSender
from shmserve.http.timing import TokenTimes
from shmserve.http.waiting_line import Party, WaitingLine
from shmserve.http.worker_link import WorkerLink
from shmserve.request import SamplingParams
from shmserve.rings.board import Board
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SubmitKind

MOST_TOKEN_IDS = 1 << 31
EVICTION_RANK = REQUEST_COLUMNS.index("eviction_rank")
_IS_BEHIND = operator.attrgetter("is_behind")


def _note_nothing(entry: InFlight) -> None:
    """Admission puts its own in place of this."""


def _tell_nobody(worker: int, epoch: int, fault: str) -> None:
    """Whoever runs the client puts its own in place of this."""


class WorkerClient:
    """All workers, and the one table of what is in flight to them. `on_drained` is called when it runs empty while draining."""

    def __init__(self, http_index: int, rings: RingConfig, board: Board) -> None:
        self.rings = rings
        self.board = board
        self.links: dict[int, WorkerLink] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.table = DirectTable(rings.table_size)
        self.times = HopTimes(board)
        self.step_sender: StepSender | None = None  # without one, tokens are sent one by one
        self._endings = Endings(board)
        self.on_drained: Callable[[], None] | None = None
        self.on_broken: Callable[[int, int, str], None] = _tell_nobody
        self.vocab_size = MOST_TOKEN_IDS  # until whoever knows the tokenizer says
        self.on_started: Callable[[InFlight], None] = _note_nothing
        self.on_left: Callable[[InFlight], None] = _note_nothing
        self.http_index = http_index
        self._roster = board.rosters["requests"]
        self._workers = board.rosters["workers"]
        self.router = Router(self.links, board)  # until whoever knows the settings says
        self._free_slots = deque(range(rings.table_size))
        # Generations go on across restarts (one per ms of the clock, at least), so that response ids stay unique.
        self._generations = itertools.count(time.time_ns() // 1_000_000 & 0xFFFF_FFFF)

    def link(self, worker: int) -> WorkerLink:
        if worker not in self.links:
            self.links[worker] = WorkerLink(worker, self)
            self._workers.enter(worker, worker + 1, 0)
        return self.links[worker]

    def serving(self) -> WorkerLink | None:
        """The serving worker with the fewest requests in flight; None if none serves."""
        ready = [link for link in self.links.values() if link.is_serving]
        return min(ready, key=lambda link: len(link.in_flight)) if ready else None

    def is_behind(self) -> bool:
        """True while announced token records wait for this event loop."""
        return any(map(_IS_BEHIND, self.links.values()))  # asked in each turn of a busy loop

    def note_refusal(self, reason: str) -> None:
        """Count it; `reason` is one of boards.REFUSALS."""
        self.board.add("num_refused")
        self.board.add(f"num_refused_{reason}")

    @property
    def num_free(self) -> int:
        """Places of the table that nobody has."""
        return len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Requests in flight that no worker has started."""
        return sum(1 for entry in self.in_flight.values() if entry.started is None)

    async def submit(
        self,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        index: int,
        signal: Signal,
        arrival_ns: int,
        digest: bytes = b"",
        cache_salt: bytes = b"",
        deadline_ns: int = 0,
        party: Party | None = None,
        timing: TokenTimes | None = None,
        rank: int | None = None,
    ) -> InFlight:
        """Put one sequence into the table and its SUBMIT into a ring: of the worker that `rank` names, if it is given.

        Raises ApiError with nothing left behind.
        """
        link = self.router.choose(prompt_ids, cache_salt, rank)
        if link is None:
            raise worker_died("it is restarting")
        entry = self._enter(link, index, signal, arrival_ns)
        entry.deadline_ns = deadline_ns
        entry.timing = timing
        shown = link.worker, arrival_ns, entry.submitted_ns, len(prompt_ids)
        # It is to be sent away from elsewhere once the ring has it, not before.
        self._roster.enter(entry.req_id & 0xFFFF, entry.req_id, *shown, 0)
        if party is not None:
            entry.party = party
            party.joined(entry, len(prompt_ids))
        if params.num_logprobs >= 0 or params.prompt_logprobs >= 0:
            entry.logprobs = LogprobLog()
        try:
            record, num_slots = pack_submit(
                Submit(
                    req_id=entry.req_id,
                    prompt_ids=prompt_ids,
                    params=params,
                    arrival_ns=arrival_ns,
                    submitted_ns=entry.submitted_ns,
                    deadline_ns=deadline_ns,
                    cache_salt=cache_salt,
                    digest=digest,
                )
            )
            await link.submit(entry, record, num_slots)
        except BaseException:
            self.forget(entry)
            raise
        if entry.is_submitted:
            self.was_written(entry)
        return entry

    def was_written(self, entry: InFlight) -> None:
        """Its SUBMIT is in the ring: from now on the other front ends may send it away."""
        party = entry.party
        if party is not None and party.may_be_evicted and not entry.is_over:
            self.show_rank(entry, eviction_rank(party.priority))

    def _enter(self, link: WorkerLink, index: int, signal: Signal, arrival_ns: int) -> InFlight:
        """A new entry of the table. Raises ApiError (503) if it has no place."""
        if not self._free_slots:
            self.note_refusal("table")
            raise ApiError(
                503,
                f"All {self.rings.table_size} places of the request table are taken.",
                type="overloaded_error",
                code="table_full",
                retry_after_s=1,
            )
        slot = self._free_slots.popleft()
        req_id = (next(self._generations) & 0xFF_FFFF_FFFF) << 24 | self.http_index << 16 | slot
        entry = InFlight(req_id, index, link, signal, arrival_ns, self.table)
        entry.submitted_ns = time.monotonic_ns()
        self.in_flight[req_id] = link.in_flight[req_id] = entry
        self._show_counts(link)
        return entry

    def _show_counts(self, link: WorkerLink) -> None:
        self.board["in_flight"] = len(self.in_flight)
        self._workers.set(link.worker, 1, len(link.in_flight))

    def show_rank(self, entry: InFlight, rank: int) -> None:
        """How readily the other front ends may send it away; 0: not at all."""
        self._roster.set(entry.req_id & 0xFFFF, EVICTION_RANK, rank)

    def show_line(self, line: WaitingLine, worst_rank: int) -> None:
        """What the other front ends count with."""
        board = self.board
        board["places"] = line.num_places
        board["waiting_tokens"] = line.num_tokens
        board["worst_waiting"] = worst_rank

    def evict(self, victim: Elsewhere) -> None:
        """Send away a sequence of another front end; its worker says so to that one, and has the last word."""
        self.links[victim.worker].control(victim.req_id, SubmitKind.EVICT)

    async def flush_cache(self) -> None:
        """Wait until every serving worker has forgotten its cached prefixes. Raises ApiError if one dies meanwhile."""
        await self._tell_all(SubmitKind.FLUSH_CACHE)
        self.router.clear()

    async def abort_by_digest(self, digest: bytes) -> int:
        """End the requests, of any front end, that carry this digest (16 zero bytes: all); how many there were."""
        answers = await self._tell_all(SubmitKind.ABORT_BY_ID, digest)
        return sum(entry.finish.matched_token for entry in answers if entry.finish is not None)

    async def _tell_all(self, kind: SubmitKind, digest: bytes = b"") -> list[InFlight]:
        """Send a control record to every serving worker and wait for the answers. Raises ApiError if one dies meanwhile."""
        signal = Signal()
        entries: list[InFlight] = []
        for link in [link for link in self.links.values() if link.is_serving]:
            entry = self._enter(link, len(entries), signal, time.monotonic_ns())
            entry.is_submitted = True  # a control record waits for credits itself
            link.control(entry.req_id, kind, digest)
            entries.append(entry)
        while not all(entry.is_over for entry in entries):
            await signal.wait()
        for entry in entries:
            if entry.error is not None:
                raise entry.error
        return entries

    def abort(self, entry: InFlight) -> None:
        """Nobody wants this entry's output any more. It leaves the table at its FINISH."""
        entry.direct = None
        entry.on_tokens = None
        entry.token_ids = []
        if entry.is_over or entry.is_aborted:
            return
        entry.is_aborted = True
        entry.aborted_ns = time.monotonic_ns()
        self.board.add("num_aborted")
        if entry.link.withdraw(entry):
            entry.fail(ApiError(499, "The client has gone."))
            self.forget(entry)
        else:
            entry.link.control(entry.req_id, SubmitKind.ABORT)

    def refuse(self, entry: InFlight, error: ApiError) -> None:
        """End an entry whose request is answered with `error`."""
        if entry.is_over:
            return
        self.abort(entry)
        entry.error = error  # in place of the one that says that its client has gone
        entry.signal.set()

    def end(self, entry: InFlight) -> None:
        """Somebody else wants this request to end: whoever asked for it is told so."""
        if entry.is_submitted:
            entry.link.control(entry.req_id, SubmitKind.ABORT)
        else:
            self.refuse(entry, aborted())

    def set_paused(self, entry: InFlight, is_paused: bool) -> bool:
        """Pause or resume one sequence in the scheduler (its client is slow); False if it has ended, or will, or is not there yet."""
        if entry.is_over or entry.is_aborted:  # an ABORT that still waits must not be replaced
            return False
        if not entry.is_submitted:  # nor a SUBMIT
            return False
        entry.link.control(entry.req_id, SubmitKind.PAUSE if is_paused else SubmitKind.RESUME)
        return True

    def forget(self, entry: InFlight) -> None:
        """The entry's FINISH came, or its channel ended: its place in the table is free."""
        if self.in_flight.pop(entry.req_id, None) is None:
            return
        entry.link.in_flight.pop(entry.req_id, None)
        self._show_counts(entry.link)
        entry.forgotten()
        self._endings.note(entry)
        self.on_left(entry)
        self._roster.leave(entry.req_id & 0xFFFF)
        self._free_slots.append(entry.req_id & 0xFFFF)
        if not self.in_flight and self.on_drained is not None:
            self.on_drained()
