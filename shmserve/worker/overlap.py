"""Steps in flight: the next step is launched before the tokens of the one before it are known on the host.

Owns: which steps were launched and not yet collected (at most two), the batch that follows one in flight, and the sequences
that have their answer while their rows are still in flight. Never: runs a model, judges a token, or answers anybody.

A step can be followed ahead of time when whoever makes a token there may go on without the host seeing it: the token travels on
the device ("carried"). Chunks of prompts follow one another beside them, as the scheduler would cut them. Who comes, leaves, is
preempted or needs its token first is decided with nothing in flight, by the scheduler; `follow` says None then, and the engine
collects first. So the scheduler never sees a state that is half computed. A runner that only knows `run` is driven through the same
calls, and nothing is ever launched ahead.

Laws
  - A row and its blocks go back only when no step in flight computes it, and the step that was collected is committed. A sequence
    that ends in step N while step N + 1 computes it wastes one row there: `is_aborted` marks its column, the commit drops what
    comes, and `landed` hands it out afterwards.
  - Steps are computed one behind the other, never two at once. So a block that the prefix cache makes superfluous when step N is
    committed may be given out at once, though step N + 1 still reads it: whoever writes it is computed behind that.

Worker's main thread only.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

import numpy as np

from shmserve.worker.batch import I4, Batch, StepOutput
from shmserve.worker.decode_set import DecodeSet
from shmserve.worker.mixed_batch import Chunks, joined, ragged_batch
from shmserve.worker.runner import ModelRunner
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence


@runtime_checkable
class OverlappingRunner(Protocol):
    """What a runner has besides `ModelRunner` if steps can be launched ahead."""

    def can_carry(self, rows: I4, sampling: SamplingState) -> bool:
        """Whether these rows can go on without the host seeing the token that they make now."""

    def launch(self, batch: Batch, sampling: SamplingState, carried: I4 | None = None) -> None:
        """Start `batch`, computed when what was launched before is. At most two steps are ever launched and not collected.

        `carried` i4[S] is for each sequence the index into the output of the step launched before whose token it computes, as its
        only one; its own `token_ids` mean nothing then, and its draw is at one position further than `sampling` says. -1: it computes
        its own. None: all do.
        """

    def collect(self) -> StepOutput:
        """The output of the oldest step that was launched and not collected; blocks until it is on the host."""


class _OneByOne:
    """A runner that only knows `run`: it computes a step when it is collected, and carries nothing."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._launched: tuple[Batch, SamplingState] | None = None

    def can_carry(self, rows: I4, sampling: SamplingState) -> bool:
        return False

    def launch(self, batch: Batch, sampling: SamplingState, carried: I4 | None = None) -> None:
        assert self._launched is None and carried is None
        self._launched = batch, sampling

    def collect(self) -> StepOutput:
        assert self._launched is not None, "nothing was launched"
        launched, self._launched = self._launched, None
        return self._runner.run(*launched)


class Overlap:
    """The flights of one runner."""

    def __init__(self, runner: ModelRunner | OverlappingRunner, scheduler: Scheduler) -> None:
        self._can_follow = isinstance(runner, OverlappingRunner)
        self._runner: OverlappingRunner = (
            runner if isinstance(runner, OverlappingRunner) else _OneByOne(runner)
        )
        self._scheduler = scheduler
        self._flights: deque[Batch] = deque()
        self._ended: list[Sequence] = []
        self._collected: Batch | None = None  # and not committed yet
        self._held_rows: set[int] | None = (
            None  # of both; None: nobody has asked since they changed
        )
        self._refused: tuple[Sequence, int, int] | None = None
        self.num_followed = 0

    @property
    def is_flying(self) -> bool:
        return bool(self._flights)

    @property
    def next_to_land(self) -> Batch:
        """The oldest step in flight."""
        return self._flights[0]

    def holds(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes `sequence`, or one that was collected and is not committed yet."""
        if self._held_rows is None:
            batches = (
                [*self._flights] if self._collected is None else [self._collected, *self._flights]
            )
            self._held_rows = {row for batch in batches for row in batch.rows.tolist()}
        return sequence.row in self._held_rows

    def launch(self, batch: Batch) -> None:
        """Start a batch of the scheduler's, with nothing in flight."""
        assert not self._flights, "the scheduler was asked with a step in flight"
        if self._can_follow:
            self._note_who_waits(batch)
        self._start(batch, None)

    def follow(self, step: int) -> Batch | None:
        """Launch the step behind the one in flight, if all is settled for it."""
        if not self._can_follow:
            return None
        assert len(self._flights) == 1, len(self._flights)
        before, scheduler = self._flights[-1], self._scheduler
        columns = scheduler.columns
        if before.num_drafts is not None:
            return None
        ready = np.array([s.row for s in scheduler.running if not s.is_paused], np.int32)
        ready = ready[~columns.is_aborted[ready]]
        is_ready = np.zeros(scheduler.max_num_seqs, np.bool_)
        is_ready[ready] = True
        samples = before.sample_seqs
        makes_all = len(samples) == before.num_seqs
        sampled = before.rows if makes_all else before.rows[samples]
        kv_lens = before.kv_lens if makes_all else before.kv_lens[samples]
        goes_on = is_ready[sampled]
        num_others = len(ready) - np.count_nonzero(goes_on)
        # What ends by its length ends in the step in flight, whatever its token will be.
        goes_on &= kv_lens + 1 < columns.max_total[sampled]
        carried = np.flatnonzero(goes_on).astype(np.int32)
        budget = scheduler.max_num_batched_tokens - len(carried)
        chunks: Chunks = []
        firsts: list[int] = []
        if num_others:
            is_ready[sampled] = False
            prompts = [s for s in scheduler.prefilling if is_ready[s.row]]
            if len(prompts) < num_others:
                return None  # somebody may decode who is not in flight
            if any(s.params.prompt_logprobs >= 0 for s in prompts):
                return None  # the runner waits for scores
            chunks, firsts = self._next_chunks(before, prompts, budget)
            budget -= sum(count for _, count in chunks)
        if budget > 0 and self._can_admit():
            return None
        # The same array as long as the same go on: whoever has prepared for these rows sees that they are the same.
        rows = sampled if len(carried) == len(sampled) else sampled[carried]
        completed = [
            s
            for (s, count), first in zip(chunks, firsts, strict=True)
            if first + count == columns.num_tokens[s.row]
        ]
        if any(s.grammar is not None for s in completed):
            return None  # there are masks for those only who sample in the step in flight
        drawn = rows
        if completed:
            drawn = np.concatenate((rows, np.array([s.row for s in completed], np.int32)))
        if not (len(rows) or chunks) or not self._runner.can_carry(drawn, scheduler.sampling):
            return None
        decode_set = None
        if len(rows):
            decode_set = scheduler.set_behind(before, rows, kv_lens[carried])
            if decode_set is None:
                return None
        if chunks:
            batch = self._with_chunks(step, decode_set, chunks, firsts)
            carried = np.concatenate((carried, np.full(len(chunks), -1, np.int32)))
        else:
            assert decode_set is not None, "neither rows nor chunks"
            batch = decode_set.batch(step)
        self._start(batch, carried)
        self.num_followed += 1
        return batch

    def _with_chunks(
        self, step: int, decode_set: DecodeSet | None, chunks: Chunks, firsts: list[int]
    ) -> Batch:
        """The coming step of a set and of chunks, whose blocks others may share from now on."""
        scheduler = self._scheduler
        for (sequence, count), first in zip(chunks, firsts, strict=True):
            scheduler.tables.index(sequence, first + count, is_computed=False)
        nobody, begins = np.zeros(0, np.int32), np.array(firsts, np.int32)
        size = scheduler.info.block_size
        part = ragged_batch(step, nobody, chunks, scheduler.columns, size, firsts=begins)
        if decode_set is None:
            return part
        batch = joined(decode_set.batch(step), part)
        decode_set.widened(batch)
        return batch

    def _next_chunks(
        self, before: Batch, prompts: list[Sequence], budget: int
    ) -> tuple[Chunks, list[int]]:
        """What the scheduler would compute of `prompts` behind `before`, and where each chunk begins."""
        scheduler, columns = self._scheduler, self._scheduler.columns
        in_flight = dict(zip(before.rows.tolist(), before.kv_lens.tolist(), strict=True))
        chunks: Chunks = []
        firsts: list[int] = []
        for sequence in prompts:
            if budget <= 0:
                break
            first = in_flight.get(sequence.row)
            if first is None:
                scheduler.tables.skip_ahead(sequence)
                first = int(columns.num_computed[sequence.row])
            count = scheduler.chunk_tokens(sequence, first, budget)
            chunks.append((sequence, count))
            firsts.append(first)
            budget -= count
        return chunks, firsts

    def collect(self) -> tuple[Batch, StepOutput]:
        """The oldest step in flight and what it gave; its sequences are held until it is committed, and `landed` asked."""
        assert self._collected is None, "collected, and not committed"
        output = self._runner.collect()
        batch = self._collected = self._flights.popleft()
        return batch, output

    def end(self, sequence: Sequence) -> None:
        """`sequence`, which is held, has its answer: nothing that comes is for it any more."""
        assert self.holds(sequence)
        self._scheduler.columns.is_aborted[sequence.row] = True
        self._ended.append(sequence)

    def landed(self) -> list[Sequence]:
        """What was collected is committed. Of those that `end` was told of, the ones that are held no more, each once."""
        self._collected = self._held_rows = None
        if not self._ended:
            return []
        done = [s for s in self._ended if not self.holds(s)]
        self._ended = [s for s in self._ended if self.holds(s)]
        return done

    def _start(self, batch: Batch, carried: I4 | None) -> None:
        self._runner.launch(batch, self._scheduler.sampling, carried)
        self._flights.append(batch)
        self._held_rows = None

    def _note_who_waits(self, batch: Batch) -> None:
        """Whom the scheduler has just left waiting for want of a row or of blocks: nothing changes that but a free one."""
        scheduler = self._scheduler
        first = next((s for s in scheduler.waiting if not s.is_paused), None)
        self._refused = None
        if first is not None and batch.num_tokens < scheduler.max_num_batched_tokens:
            num_rows = scheduler.columns.num_free_rows
            self._refused = (first, scheduler.blocks.num_free, num_rows)

    def _can_admit(self) -> bool:
        """Whether the scheduler might admit somebody, as far as one can tell without asking it."""
        scheduler = self._scheduler
        first = next((s for s in scheduler.waiting if not s.is_paused), None)
        if first is None:
            return False
        if self._refused is None or first is not self._refused[0]:
            return bool(scheduler.columns.num_free_rows) or any(s.yields for s in scheduler.running)
        _, num_blocks, num_rows = self._refused
        has_more = scheduler.blocks.num_free > num_blocks
        has_more |= scheduler.columns.num_free_rows > num_rows
        return has_more or any(s.yields for s in scheduler.running)
