"""Steps in flight: the next step is launched before the tokens of the one before it are known on the host.

Owns: which steps were launched and not yet collected (at most two), the batch that follows one in flight, and the sequences
that have their answer while their rows are still in flight. Never: runs a model, judges a token, or answers anybody.

A step can be followed ahead of time when each of its sequences makes one token there and may go on without the host seeing
it: the token travels on the device ("carried"). Who comes, leaves, is preempted or needs its token first is decided with
nothing in flight, by the scheduler; `follow` says None then, and the engine collects first. So the scheduler never sees a state
that is half computed. A runner that only knows `run` is driven through the same calls, and nothing is ever launched ahead.

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

        `carried` i4[S] is for each sequence the index into the output of the step launched before whose token it computes;
        its own `token_ids` mean nothing then, and its draw is at one position further than `sampling` says. None: nothing is.
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
        before = self._flights[-1]
        columns = self._scheduler.columns
        if len(before.sample_seqs) != before.num_seqs or before.num_drafts is not None:
            return None
        if self._can_admit():
            return None
        rows = np.array([s.row for s in self._scheduler.running if not s.is_paused], np.int32)
        rows = rows[~columns.is_aborted[rows]]
        is_ready = np.zeros(self._scheduler.max_num_seqs, np.bool_)
        is_ready[rows] = True
        goes_on = is_ready[before.rows]
        if np.count_nonzero(goes_on) < len(rows):
            return None  # somebody may compute who is not in flight
        # What ends by its length ends in the step in flight, whatever its token will be.
        goes_on &= before.kv_lens + 1 < columns.max_total[before.rows]
        carried = np.flatnonzero(goes_on).astype(np.int32)
        # The same array as long as the same go on: whoever has prepared for these rows sees that they are the same.
        rows = before.rows if goes_on.all() else before.rows[carried]
        positions = before.kv_lens[carried]
        if not len(rows) or not self._runner.can_carry(rows, self._scheduler.sampling):
            return None
        if not self._grow(rows, positions):
            return None
        batch = self._batch(step, rows, positions)
        self._start(batch, carried)
        self.num_followed += 1
        return batch

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

    def _grow(self, rows: I4, positions: I4) -> bool:
        """Give each row a block for the token at its position; False, and nothing given, if that needs a preemption."""
        scheduler = self._scheduler
        columns = scheduler.columns
        lacks = positions // scheduler.info.block_size >= columns.num_blocks[rows]
        needy = rows[lacks].tolist()
        if len(needy) > scheduler.blocks.num_free:
            return False
        for row in needy:
            sequence = scheduler.by_row[row]
            assert sequence is not None, row
            scheduler.tables.grow(sequence, 1)
        return True

    def _batch(self, step: int, rows: I4, positions: I4) -> Batch:
        columns, size = self._scheduler.columns, self._scheduler.info.block_size
        num_seqs = len(rows)
        table = columns.block_table[rows, : max(1, int(columns.num_blocks[rows].max()))]
        cu = np.arange(num_seqs + 1, dtype=np.int32)
        return Batch(
            step=step,
            rows=rows,
            token_ids=np.zeros(num_seqs, np.int32),
            positions=positions,
            kv_slots=table[cu[:-1], positions // size] * size + positions % size,
            cu_seqlens=cu,
            block_table=table,
            kv_lens=positions + 1,
            sample_seqs=cu[:-1],
            is_decode=True,
        )
