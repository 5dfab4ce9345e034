"""The step loop: inbox -> scheduler -> batch -> runner -> sampler -> stop -> emitter, in that order, no I/O inside.

Owns: the sequences of all channels and the order of a step. Never: knows what text is, or waits for a front end (unless the
operator chose the policy that blocks).

The inbox is drained before `schedule`, and again between the forward pass and the commit, so an abort never waits a step. With a
runner that can, the step behind is launched before this one's tokens are looked at (overlap.py).
Laws: every SUBMIT is answered by exactly one FINISH, or by the end of its channel; blocks come back at the step boundary.
Worker's main thread only.
"""

from __future__ import annotations

import logging
import time

from shmserve.config import RingConfig, WorkerConfig
from shmserve.request import FinishReason
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel
from shmserve.wire.submit import Submit
from shmserve.wire.submit_slots import req_id_of_digest
from shmserve.wire.tokens import TokenKind
from shmserve.worker.answers import acknowledgement_of, end_of, refusal_of, state_of
from shmserve.worker.batch import Batch
from shmserve.worker.channels import Channels
from shmserve.worker.commit import Committer
from shmserve.worker.constraints import Constraints
from shmserve.worker.deadlines import Deadlines
from shmserve.worker.emission_log import EmissionLog
from shmserve.worker.overlap import Overlap
from shmserve.worker.pauses import Pauses
from shmserve.worker.refusal import fault_of
from shmserve.worker.runner import ModelRunner
from shmserve.worker.scheduler import NeverFitsError, Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.showing import Showing
from shmserve.worker.step_times import StepTimes
from shmserve.worker.stopping import Ending, StopConditions

log = logging.getLogger(__name__)

TOKEN_RING_FULL = "the token ring was full and its policy is drop"


class Engine:
    """All that the worker does between two waits. `board` shows what it does."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        conditions: StopConditions,
        rings: RingConfig,
        board: Board,
        emission_log: EmissionLog | None = None,
        constraints: Constraints | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.step_count = 0
        self._board = board
        self._overlap = Overlap(runner, scheduler)
        self._committer = Committer(scheduler, conditions)
        self._log = emission_log
        self._by_id: dict[int, Sequence] = {}
        self._constraints = constraints or Constraints(None, runner.info.vocab_size)
        self._pauses = Pauses(self._by_id, scheduler, self._constraints)
        self.channels = Channels(rings, self._pauses)
        self._deadlines = deadlines or Deadlines(WorkerConfig())
        self._num_arrived = 0
        self.step_times = StepTimes()
        self._showing = Showing(board, scheduler, self.step_times)

    # -- channels ---------------------------------------------------------------------------------------------------------

    def open_channel(self, channel: Channel) -> None:
        """Serve a front end. Raises SegmentError if somebody else holds the worker's ends."""
        self.channels.open(channel, self.step_count)

    def close_channel(self, http: int) -> None:
        """The front end is gone: its sequences are freed now, unanswered."""
        if http not in self.channels.inboxes:
            return
        for sequence in [s for s in self._by_id.values() if s.channel == http]:
            self._forget(sequence)
        self.channels.close(http)

    def poll_fds(self) -> list[int]:
        """Descriptors that wake an idle engine: data of every submit ring, credits of the token rings that are starved."""
        return self.channels.poll_fds() + self._constraints.poll_fds()

    def wait_ms(self) -> int | None:
        """How long an idle engine may sleep on them; None: until one wakes it."""
        return self._deadlines.wait_ms()

    # -- what the records ask for (Sink) ----------------------------------------------------------------------------------

    def submit(self, request: Submit, http: int) -> None:
        if request.req_id in self._by_id:
            log.warning("front end %d submitted %016x twice", http, request.req_id)
            return
        fault = fault_of(request, self.runner.info.vocab_size)
        if fault is not None:
            self.refuse(request.req_id, http, fault)
            return
        self._num_arrived += 1
        sequence = Sequence(
            req_id=request.req_id,
            channel=http,
            params=request.params,
            prompt_ids=request.prompt_ids,
            arrival_order=self._num_arrived,
            received_ns=time.monotonic_ns(),
            cache_salt=request.cache_salt,
            digest=request.digest,
        )
        try:
            self.scheduler.add(sequence)
        except NeverFitsError as error:
            self.refuse(request.req_id, http, str(error))
            return
        self._by_id[request.req_id] = sequence
        self._deadlines.arrived(sequence, request)
        if request.params.grammar:
            self._constraints.add(sequence)
            self._pauses.apply(sequence.req_id)

    def _take_compiled(self) -> None:
        for sequence, fault in self._constraints.ready():
            if fault:
                self._finish(sequence, Ending(FinishReason.ERROR, fault=fault))
            else:
                self._pauses.apply(sequence.req_id)

    def refuse(self, req_id: int, http: int, reason: str) -> None:
        """Answer a SUBMIT that cannot be served."""
        if req_id in self._by_id:  # it has its answer to come, and only one
            log.warning("front end %d submitted %016x twice", http, req_id)
            return
        unit = refusal_of(req_id, reason, step=self.step_count, now_ns=time.monotonic_ns())
        self.channels.emitters[http].keep(req_id, unit)

    def abort(self, req_id: int) -> None:
        """End a request; silent if it has ended already. Its blocks wait for the step that computes it."""
        sequence = self._by_id.get(req_id)
        if sequence is not None:
            self._finish(sequence, Ending(FinishReason.ABORT))

    def evict(self, req_id: int) -> None:
        """End a request of any front end if nothing of it was computed yet; silent if something was."""
        sequence = self._by_id.get(req_id)
        if sequence is not None and not sequence.admitted_ns:
            self._finish(sequence, Ending(FinishReason.EVICTED))

    def abort_by_digest(self, req_id: int, http: int, digest: bytes) -> None:
        """End every request of any front end that carries this digest, or that it stands for (all of them, if it is zero); the
        answer counts them."""
        is_all = not any(digest)
        found = [s.req_id for s in self._by_id.values() if is_all or s.digest == digest]
        if not is_all and (named := req_id_of_digest(digest)) in self._by_id:
            found.append(named)
        for each in found:
            self.abort(each)
        self._acknowledge(req_id, http, len(found))

    def set_paused(self, req_id: int, is_paused: bool) -> None:
        self._pauses.hold(req_id, is_paused)

    def flush_cache(self, req_id: int, http: int) -> None:
        """Forget all cached prefixes, and say so. What runs goes on, and leaves nothing to be found."""
        self.scheduler.flush_cache()
        self._acknowledge(req_id, http, 0)

    def note_bad(self) -> None:
        self._board.add("num_bad_records")

    def _acknowledge(self, req_id: int, http: int, count: int) -> None:
        """Answer a control record under its own req_id."""
        unit = acknowledgement_of(req_id, count, step=self.step_count, now_ns=time.monotonic_ns())
        self.channels.emitters[http].keep(req_id, unit)

    # -- the step ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> bool:
        """One iteration; False if there was nothing to compute."""
        begin = time.monotonic_ns()
        self.channels.drain(self)
        if self._deadlines.num_bounded:
            self._end_overdue(begin)
        self._take_compiled()
        # Behind all that answers somebody, since no step may follow; before the schedule: credits let paused sequences go on.
        self.channels.flush()
        for http in list(self.channels.broken):
            self.close_channel(http)
        if self._overlap.is_flying:
            self._show_begin(self._overlap.next_to_land, begin)
        elif not self._launch(begin):
            return False
        self.step_count += 1
        self._overlap.follow(self.step_count + 1)
        batch, output = self._overlap.collect()
        self.channels.drain(self)
        self.scheduler.advance(batch, output.time_ns, output.failed)
        committed = self._committer.commit(batch, output, time.monotonic_ns())
        if self._log is not None:
            self._log.write(self.step_count, output.time_ns, committed)
        for sequence, ending in committed.endings:
            self._finish(sequence, ending)
        self.channels.publish(committed, self._end_dropped)
        for sequence in self._overlap.landed():
            self.scheduler.remove(sequence)
        if batch.num_drafts is not None and output.counts is not None:
            has_guessed = batch.num_drafts > 0
            self._board.add("num_draft_tokens", batch.num_guessed)
            self._board.add("num_accepted_tokens", int((output.counts - 1)[has_guessed].sum()))
        self._showing.end(self.step_count, begin, committed, len(self._pauses))
        return True

    def _launch(self, begin_ns: int) -> bool:
        """Start the step that the scheduler says; False if there is none."""
        now = time.monotonic_ns()  # not `begin_ns`: nobody is admitted before it was received
        batch, started = self.scheduler.schedule(self.step_count + 1, now)
        if batch is None:
            return False
        if started:
            self._announce(started, now)
        self._show_begin(batch, begin_ns)
        self.scheduler.sampling.expect_masks(self._constraints.begin_masks(batch))
        self._overlap.launch(batch)
        return True

    def _show_begin(self, batch: Batch, begin_ns: int) -> None:
        has_prompts = batch.num_tokens > batch.num_seqs + batch.num_guessed
        self._showing.begin(has_prompts, batch.num_tokens, begin_ns)

    def _end_overdue(self, now_ns: int) -> None:
        for sequence in self._deadlines.due(now_ns):
            self._board.add("num_timed_out")
            self._finish(sequence, Ending(FinishReason.TIMEOUT))

    def _announce(self, started: list[Sequence], now_ns: int) -> None:
        for sequence in started:
            if not sequence.num_retractions:
                self._deadlines.started(sequence)
                unit = state_of(
                    TokenKind.STARTED,
                    sequence,
                    self.scheduler.columns,
                    step=self.step_count,
                    now_ns=now_ns,
                    ending=Ending(FinishReason.NONE),
                )
                self.channels.emitters[sequence.channel].keep(sequence.req_id, unit)
                self._board.add("prompt_tokens", sequence.num_prompt_tokens)
        self.channels.flush()

    def _end_dropped(self, req_id: int) -> bytes:
        """The drop policy threw a record of this request away: it ends with an error, never as a text with a hole."""
        sequence = self._by_id.get(req_id)
        if sequence is None:  # it had ended in this very step
            now = time.monotonic_ns()
            return refusal_of(req_id, TOKEN_RING_FULL, step=self.step_count, now_ns=now)
        unit = self._end(sequence, Ending(FinishReason.ERROR, fault=TOKEN_RING_FULL))
        self._board.add("num_finished")
        self._forget(sequence)
        return unit

    def _end(self, sequence: Sequence, ending: Ending) -> bytes:
        now, columns = time.monotonic_ns(), self.scheduler.columns
        return end_of(sequence, columns, step=self.step_count, now_ns=now, ending=ending)

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        """Free a sequence and answer it."""
        self.channels.emitters[sequence.channel].keep(sequence.req_id, self._end(sequence, ending))
        self._board.add("num_aborted" if ending.reason is FinishReason.ABORT else "num_finished")
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if self._overlap.holds(sequence):
            self._overlap.end(sequence)
        else:
            self.scheduler.remove(sequence)
        self._by_id.pop(sequence.req_id, None)
        self._pauses.forget(sequence.req_id)
        self._constraints.forget(sequence.req_id)
        self._deadlines.forget(sequence)

    # -- between steps ----------------------------------------------------------------------------------------------------

    def show_idle(self) -> None:
        """Nothing to compute: the gauges say so until the next step."""
        self._showing.idle(len(self._pauses))
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Write the log out and give the runner's memory back."""
        if self._log is not None:
            self._log.close()
        self.runner.close()
        self._constraints.close()
