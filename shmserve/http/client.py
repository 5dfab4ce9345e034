"""The front end's side of the channels: the table of requests in flight, and every record that goes to a worker.

Owns: req_ids, the table, the submit rings' writing ends under the operator's policy. Never: knows HTTP or text.

Laws: every SUBMIT that was written is in the table until its FINISH or its channel's end; the table bounds what can wait
outside a ring. An ABORT is never lost: it waits in the writer's backlog, one per request.
Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shmserve.boards import REQUEST_COLUMNS
from shmserve.config import RingConfig
from shmserve.http.direct import DirectTable
from shmserve.http.endings import Endings
from shmserve.http.errors import ApiError, worker_died
from shmserve.http.hop_times import HopTimes
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.logprobs import LogprobLog
from shmserve.http.neighbours import Elsewhere, eviction_rank
from shmserve.http.pump import Pump
from shmserve.http.routing import Router
from shmserve.http.step_send import StepSender
from shmserve.http.timing import TokenTimes
from shmserve.http.waiting_line import Party, WaitingLine
from shmserve.request import SamplingParams
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel
from shmserve.rings.policy import Dropping
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SubmitKind, pack_control

log = logging.getLogger(__name__)


class WorkerLink:
    """One worker, as this front end sees it: its state, and the channel to it while there is one."""

    def __init__(self, worker: int, client: WorkerClient) -> None:
        self.worker = worker
        self.state = "loading"
        self.phase = ""
        self.fraction = 0.0
        self.info: dict[str, Any] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.channel: Channel | None = None
        self._client = client
        self._pump: Pump | None = None
        self._waiters: deque[Signal] = deque()
        self._is_watching = False
        self._is_broken = False

    @property
    def is_serving(self) -> bool:
        return self.channel is not None and self.state == "ready"

    @property
    def is_behind(self) -> bool:
        return self._pump is not None and self._pump.is_behind

    def open(self, channel: Channel) -> None:
        """A new life of the worker: its rings are empty."""
        self.channel = channel
        self._is_broken = False
        # The writer keeps what must not be lost; whether a SUBMIT waits or is refused is decided in `submit`.
        self._writer = Dropping(channel.submit.producer())
        self._pump = Pump(
            channel.tokens,
            self.in_flight,
            self._client.table,
            self._client.board,
            self._client.times,
            self._client.forget,
            self.break_off,
            self._client.vocab_size,
            self._client.step_sender,
        )

    def close(self, reason: str) -> None:
        """The worker is gone: what it had announced is handled, then whatever is left gets its error end."""
        if self.channel is None or self._pump is None:
            return
        self._watch_credits(False)
        self._pump.close()
        for entry in list(self.in_flight.values()):
            entry.fail(worker_died(reason))
            self._client.forget(entry)
        self._client.router.forget(self.worker)
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.set()
        self._pump = None
        self.channel.close()
        self.channel = None

    def break_off(self, reason: str) -> None:
        """The worker's end of a ring cannot be believed any more: the channel ends here, and the worker is started anew."""
        if self.channel is None or self._is_broken:
            return
        self._is_broken = True
        log.error("worker %d: %s", self.worker, reason)
        self.state = "dead"
        self._client.on_broken(self.worker, self.channel.epoch, reason)
        asyncio.get_running_loop().call_soon(self.close, reason)

    def fold_times(self) -> None:
        if self._pump is not None:
            self._client.times.fold()

    async def submit(self, entry: InFlight, record: bytes, num_slots: int) -> None:
        """Write a SUBMIT under the submit ring's policy. Raises ApiError (413, 503) with nothing written."""
        channel = self.channel
        if channel is None:
            raise worker_died("it is restarting")
        rings = self._client.rings
        if num_slots > channel.submit.capacity // 2:
            size = channel.submit.slot_size
            raise ApiError(
                413,
                f"The request takes {num_slots * size} bytes of the submit ring, at most "
                f"{channel.submit.capacity // 2 * size} are allowed (--submit-ring-slots).",
                code="request_too_large",
            )
        try:
            if not self._waiters and self._writer.try_unit(record, num_slots):
                entry.is_submitted = True
                return
            if rings.submit_policy == "coalesce":
                # It waits in the table's entry: the table bounds how many, and an abort before it is written undoes it.
                self._writer.keep(entry.req_id, record)
                entry.is_submitted = not self._writer.pending_of(entry.req_id)
                self._watch_credits(True)
                return
            if rings.submit_policy == "block" and await self._wait_for_room(
                entry, record, num_slots
            ):
                entry.is_submitted = True
                return
        except RingProtocolError as error:
            self.break_off(str(error))
            raise worker_died(str(error)) from None
        self._writer.refuse()
        self._client.note_refusal("submit_ring")
        raise ApiError(
            503,
            "The worker does not take requests fast enough: its submit ring is full.",
            type="overloaded_error",
            code="submit_ring_full",
            retry_after_s=1,
        )

    async def _wait_for_room(self, entry: InFlight, record: bytes, num_slots: int) -> bool:
        """Wait, first come first served, until the record is written or the deadline is over. Raises the entry's error if it ends first."""
        deadline = time.monotonic() + self._client.rings.submit_deadline_s
        channel, turn = self.channel, Signal()
        self._waiters.append(turn)
        self._watch_credits(True)
        try:
            while True:
                if entry.error is not None:  # withdrawn
                    raise entry.error
                if self._waiters[0] is turn and self._writer.try_unit(record, num_slots):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                await turn.wait(left)
                if self.channel is not channel:  # `close` has emptied the queue
                    raise worker_died("it is restarting")
        finally:
            turn.close()
            if self.channel is channel:
                self._waiters.remove(turn)
                self._wake_first()

    def control(self, entry: InFlight, kind: SubmitKind, digest: bytes = b"") -> None:
        """Send ABORT, PAUSE or RESUME for an entry; it waits for credits if it must, replacing what this entry had waiting."""
        self._keep_control(entry.req_id, kind, digest)

    def evict(self, req_id: int) -> None:
        """Ask the worker to end a sequence of another front end, unless it has begun it."""
        self._keep_control(req_id, SubmitKind.EVICT)

    def _keep_control(self, req_id: int, kind: SubmitKind, digest: bytes = b"") -> None:
        if self.channel is None:
            return
        self._writer.cancel(req_id)
        try:
            self._writer.keep(
                req_id,
                pack_control(kind, req_id, time_ns=time.monotonic_ns(), digest=digest),
            )
        except RingProtocolError as error:  # it ends the channel, not whoever aborts here
            self.break_off(str(error))
            return
        self._watch_credits(self._writer.is_starved or bool(self._waiters))

    def withdraw(self, entry: InFlight) -> bool:
        """Take back a SUBMIT that still waits outside the ring; True if it was."""
        if entry.is_submitted:
            return False
        if self._client.rings.submit_policy == "coalesce":
            return self._writer.cancel(entry.req_id) > 0
        for waiter in self._waiters:  # one of them is its own, and finds its error
            waiter.set()
        return True

    def _watch_credits(self, wanted: bool) -> None:
        if wanted == self._is_watching or self.channel is None:
            return
        loop, fd = asyncio.get_running_loop(), self.channel.submit.credits.fd
        if wanted:
            loop.add_reader(fd, self._on_credits)
        else:
            loop.remove_reader(fd)
        self._is_watching = wanted

    def _on_credits(self) -> None:
        try:
            self._writer.producer.free(self._writer.producer.capacity)
            self._writer.flush()
        except RingProtocolError as error:
            self._watch_credits(False)
            self.break_off(str(error))
            return
        if self._client.rings.submit_policy == "coalesce":
            waiting = set(self._writer.pending_keys)
            for req_id, entry in self.in_flight.items():
                if not entry.is_submitted and req_id not in waiting:
                    entry.is_submitted = True
                    self._client.was_written(entry)
        self._wake_first()
        self._watch_credits(self._writer.is_starved or bool(self._waiters))

    def _wake_first(self) -> None:
        if self._waiters:
            self._waiters[0].set()

    def started(self, entry: InFlight) -> None:
        """Its STARTED came."""
        self._client.on_started(entry)

    def abort(self, entry: InFlight) -> None:
        """End an entry whose client is gone, or whose output could not be used."""
        self._client.abort(entry)


def _note_nothing(entry: InFlight) -> None:
    """Admission puts its own in place of this."""


MOST_TOKEN_IDS = 1 << 31
EVICTION_RANK = REQUEST_COLUMNS.index("eviction_rank")
_IS_BEHIND = operator.attrgetter("is_behind")


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
        self.links[victim.worker].evict(victim.req_id)

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
            link.control(entry, kind, digest)
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
            entry.link.control(entry, SubmitKind.ABORT)

    def refuse(self, entry: InFlight, error: ApiError) -> None:
        """End an entry whose request is answered with `error`."""
        if entry.is_over:
            return
        self.abort(entry)
        entry.error = error  # in place of the one that says that its client has gone
        entry.signal.set()

    def set_paused(self, entry: InFlight, is_paused: bool) -> bool:
        """Pause or resume one sequence in the scheduler (its client is slow); False if it has ended, or will."""
        if entry.is_over or entry.is_aborted:  # an ABORT that still waits must not be replaced
            return False
        entry.link.control(entry, SubmitKind.PAUSE if is_paused else SubmitKind.RESUME)
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
