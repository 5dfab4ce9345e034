"""Iteration-level scheduling over a paged KV cache: which tokens the next step computes.

Owns: the waiting list, the running sequences, their rows and blocks. Never: does I/O, reads a clock for a decision, or looks at
a token's meaning.

Each step takes one token of every decoding sequence, then prompt chunks, oldest first, as far as the token budget goes
(chunked prefill), then admits from the waiting list while rows and blocks last. When a decoding sequence needs a block and
none is free, the sequence that comes last (paused ones first, then by priority and arrival) is preempted: its blocks are
freed and it waits again with all its tokens, to be recomputed. One that its client has paused is preempted for whoever waits,
too. A sequence that could not run alone is refused at `add`, so the first in line always finishes: there is no livelock.
What decodes may guess (speculation.py): its guesses are computed with its token in the same step, and verified by it.
Full blocks of earlier tokens are found in the prefix cache and not computed again (block_tables.py); so is what a preempted
sequence had computed, as far as nobody needed the room.

Law (`check`): rows and blocks held by running sequences, the free and the evictable, are all there are; nobody waits and runs.
Worker's main thread only.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from shmserve.stop_regex import stop_scan
from shmserve.worker.batch import Batch
from shmserve.worker.block_tables import BlockTables
from shmserve.worker.columns import Columns
from shmserve.worker.decode_set import DecodeSet
from shmserve.worker.mixed_batch import Chunks, joined, ragged_batch
from shmserve.worker.prefix_cache import Node
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sequence import Sequence
from shmserve.worker.speculation import Speculation


class NeverFitsError(ValueError):
    """The sequence could not run even alone; the text is for the client."""


def _order(sequence: Sequence) -> tuple[int, int]:
    """Who comes first: lower priority value, then earlier arrival. Survives a preemption."""
    return (sequence.params.priority, sequence.arrival_order)


class Scheduler:
    """`eos_ids` end a sequence unless it ignores EOS. `max_num_batched_tokens` bounds the tokens of one step.

    `chunks_prompts` False: a prompt is computed whole, in the step that admits it, and the last one of a step may pass the bound.
    """

    def __init__(
        self,
        info: RunnerInfo,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_ids: tuple[int, ...],
        caches_prefixes: bool = True,
        chunks_prompts: bool = True,
    ) -> None:
        self.info = info
        self.max_num_seqs = max_num_seqs
        # Every running sequence may decode in every step, whatever the budget for prompts.
        self.max_num_batched_tokens = max(max_num_batched_tokens, max_num_seqs)
        self.columns = Columns(max_num_seqs, info.max_model_len, info.block_size)
        self.sampling = SamplingState(max_num_seqs, info.vocab_size)
        self.tables = BlockTables(info, self.columns, is_caching=caches_prefixes)
        self.blocks = self.tables.blocks
        self.speculation = Speculation(info, self.columns, self.tables)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # in order of admission
        self._prefilling: list[Sequence] = []  # those of `running` that still compute their prompt
        self.by_row: list[Sequence | None] = [None] * max_num_seqs
        self.num_preempted = 0
        self.num_admitted = 0
        self._chunks_prompts = chunks_prompts
        self._eos_ids = frozenset(eos_ids)
        self._lookahead = info.max_tokens_per_step - 1
        self._decode_rows: npt.NDArray[np.int32] | None = (
            None  # None: a sequence came, left or changed
        )
        self._decode_set: DecodeSet | None = None  # of those rows, unless it was overtaken

    @property
    def prefilling(self) -> tuple[Sequence, ...]:
        """Of the running sequences those that still compute their prompt, in the order in which they do."""
        return tuple(self._prefilling)

    @property
    def has_work(self) -> bool:
        """False when a step would compute nothing: nobody runs, or all who could are paused."""
        return any(not s.is_paused for s in self.running) or any(
            not s.is_paused for s in self.waiting
        )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting list. Raises NeverFitsError if it could not run even alone."""
        limit = self.capacity_tokens
        if sequence.num_prompt_tokens >= limit:
            raise NeverFitsError(
                f"a prompt of {sequence.num_prompt_tokens} tokens does not fit: at most {limit - 1} "
                f"(context {self.info.max_model_len}, KV cache {(self.info.num_blocks - 1) * self.info.block_size} tokens)"
            )
        sequence.token_ids = sequence.prompt_ids
        stop_ids = set(sequence.params.stop_token_ids)
        if not sequence.params.ignore_eos:
            stop_ids |= self._eos_ids
        sequence.stop_ids = frozenset(stop_ids)
        sequence.matcher = stop_scan(sequence.params.stop, sequence.params.stop_regex)
        bisect.insort(self.waiting, sequence, key=_order)

    @property
    def capacity_tokens(self) -> int:
        """Tokens, prompt and completion together, that one sequence may reach."""
        kv = (self.info.num_blocks - 1) * self.info.block_size - self._lookahead
        return min(self.info.max_model_len, kv)

    def schedule(self, step: int, now_ns: int) -> tuple[Batch | None, list[Sequence]]:
        """The next step's batch (None if there is nothing to compute) and the sequences that it schedules first."""
        decode_rows = self._ready_to_decode()
        budget = self.max_num_batched_tokens - len(decode_rows)
        guesses = self.speculation.guesses(decode_rows, budget, len(self.running))
        budget -= sum(map(len, guesses.values()))
        chunks: Chunks = []
        for sequence in self._prefilling:
            if budget > 0 and not sequence.is_paused:
                self.tables.skip_ahead(sequence)
                chunks.append((sequence, self._take_chunk(sequence, budget)))
                budget -= chunks[-1][1]
        started = []
        while budget > 0 and (admissible := self._admissible()) is not None:
            first, found = admissible
            self._admit(first, found, now_ns)
            started.append(first)
            chunks.append((first, self._take_chunk(first, budget)))
            budget -= chunks[-1][1]
        if not (chunks or len(decode_rows)):
            return None, started
        return self._batch(step, decode_rows, guesses, chunks), started

    def _ready_to_decode(self) -> npt.NDArray[np.int32]:
        """Rows that decode in this step, each with room for its token; preempts until that is so."""
        known = self._decode_set
        if known is not None and self._decode_rows is None:
            found = self._rows_that_decode()
            # They may be the same as before, or as a set has them that was made with a step in flight.
            self._decode_rows = known.rows if np.array_equal(found, known.rows) else found
        is_same = known is not None and known.rows is self._decode_rows
        if known is not None and is_same and known.goes_on() and known.grow():
            return known.rows
        if known is not None:
            self._index_running()
        self._decode_set = None
        while True:
            rows = self._decode_rows
            if rows is None:
                rows = self._decode_rows = self._rows_that_decode()
            columns = self.columns
            more = self._blocks_for(columns.num_tokens[rows]) - columns.num_blocks[rows]
            for index in np.flatnonzero(more > 0).tolist():
                sequence = self.by_row[int(rows[index])]
                assert sequence is not None
                while self.blocks.num_free < more[index]:
                    victim = max(self.running, key=lambda s: (s.is_paused, _order(s)))
                    self._preempt(victim)
                    if victim is sequence:
                        break
                if self._decode_rows is None:
                    break  # somebody was preempted, perhaps one of `rows`: look again
                self.tables.grow(sequence, int(more[index]))
            else:
                return rows

    def _rows_that_decode(self) -> npt.NDArray[np.int32]:
        rows = [s.row for s in self.running if not (s.is_paused or s.is_prefilling)]
        return np.array(rows, np.int32)

    def _take_chunk(self, sequence: Sequence, budget: int) -> int:
        """How many tokens of a prompt this step computes; whoever is scheduled behind may share their blocks."""
        row = sequence.row
        computed = int(self.columns.num_computed[row])
        count = self.chunk_tokens(sequence, computed, budget)
        self.tables.index(sequence, computed + count, is_computed=False)
        return count

    def chunk_tokens(self, sequence: Sequence, first: int, budget: int) -> int:
        """How many tokens from position `first` on its next chunk has."""
        count = int(self.columns.num_tokens[sequence.row]) - first
        return min(count, budget) if self._chunks_prompts else count

    def set_behind(
        self, before: Batch, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]
    ) -> DecodeSet | None:
        """The set of `rows`, which decode at `positions` behind `before`, a step in flight; all have their blocks for it.

        None, and nothing given to anybody, where that would need a preemption.
        """
        known = self._decode_set
        if known is not None and known.is_newest(before) and np.array_equal(rows, known.rows):
            return known if known.grow() else None
        columns = self.columns
        more = self._blocks_for(positions + 1) - columns.num_blocks[rows]
        needy = np.flatnonzero(more > 0).tolist()
        if sum(more[needy].tolist()) > self.blocks.num_free:
            return None
        for index in needy:
            sequence = self.by_row[int(rows[index])]
            assert sequence is not None, rows[index]
            self.tables.grow(sequence, int(more[index]))
        self._decode_set = DecodeSet(rows, self.info, columns, self.tables, self.by_row, positions)
        return self._decode_set

    def _admissible(self) -> tuple[Sequence, list[Node]] | None:
        """The first in line and what is cached of it, if there is a row and blocks for it: nobody passes it meanwhile."""
        first = next((s for s in self.waiting if not s.is_paused), None)
        if first is None:
            return None
        yielding = sorted((s for s in self.running if s.yields), key=_order)
        if not yielding and not self.columns.num_free_rows:
            return None
        needed = int(self._blocks_for(len(first.token_ids)))
        if self._decode_set is not None:
            self._index_running()
        found = self.tables.found_for(first)
        if self.tables.num_missing(found, needed) > self.tables.num_gained(yielding, found):
            return None
        while not self.columns.num_free_rows or self.tables.num_missing(found, needed) > 0:
            self._preempt(yielding.pop())
        return first, found

    def _index_running(self) -> None:
        """What a decode set has left for the end of its plan: whoever comes now shall find it."""
        rows = np.array([s.row for s in self.running], np.intp)
        self.tables.index_each(self.running, rows)

    def _blocks_for(self, num_tokens: npt.NDArray[np.int32] | int) -> npt.NDArray[np.int32]:
        """Blocks for the keys and values of so many tokens, and of those that one step may add to them."""
        reach = np.minimum(np.add(num_tokens, self._lookahead), self.info.max_model_len)
        return -(-reach // self.info.block_size)

    def _admit(self, sequence: Sequence, found: list[Node], now_ns: int) -> None:
        self.waiting.remove(sequence)
        row = self.columns.enter(sequence, self.capacity_tokens)
        num_tokens, num_prompt = len(sequence.token_ids), sequence.num_prompt_tokens
        self.sampling.set(
            row,
            sequence.params,
            tuple(sequence.stop_ids),
            num_tokens - num_prompt,
            self.columns.token_ids[row],
            num_prompt,
        )
        self.tables.enter(sequence, found, int(self._blocks_for(num_tokens)))
        self.speculation.enter(sequence)
        sequence.is_prefilling = True
        self._prefilling.append(sequence)
        if not sequence.admitted_ns:
            sequence.admitted_ns = sequence.scheduled_ns = now_ns
            self.num_admitted += 1
        self.by_row[row] = sequence
        self.running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        row = sequence.row
        num_tokens = int(self.columns.num_tokens[row])
        sequence.token_ids = self.columns.token_ids[row, :num_tokens].copy()
        sequence.last_time_ns = int(self.columns.last_time_ns[row])
        sequence.num_retractions += 1
        self.num_preempted += 1
        self._leave(sequence)
        bisect.insort(self.waiting, sequence, key=_order)

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence off its row; its blocks are free at once. Never under a running forward pass."""
        row = sequence.row
        self.running.remove(sequence)
        if self._decode_set is not None and row in self._decode_set.rows:
            self._index_running()
            self._decode_set = None
        if sequence.is_prefilling:
            self._prefilling.remove(sequence)
            sequence.is_prefilling = False
        self.by_row[row] = None
        self.tables.leave(sequence)
        sequence.row = -1
        self.sampling.clear(row)
        self.speculation.leave(row)
        self.columns.give_row(row)
        self._decode_rows = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Between steps only."""
        if sequence.row >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def set_paused(self, sequence: Sequence, is_paused: bool, *, yields: bool = False) -> None:
        """A paused sequence computes nothing. It keeps its blocks unless others run out, or wait while it `yields`."""
        sequence.is_paused = is_paused
        sequence.yields = is_paused and yields
        self._decode_rows = None

    def flush_cache(self) -> None:
        """Forget all cached prefixes; those who run keep their blocks, and nobody will find them."""
        self.tables.flush(self.running)

    def advance(self, batch: Batch, now_ns: int, failed: tuple[int, ...] = ()) -> None:
        """The batch was computed, its tokens known at `now_ns`: its keys and values are in the cache.

        `failed` is as in `StepOutput`. Called before the step's tokens are appended.
        """
        decode_set, num_in_set, has_ended = self._decode_set, 0, False
        if decode_set is not None and decode_set.made(batch):
            has_ended, num_in_set = decode_set.advance(), len(decode_set.rows)
            if num_in_set == batch.num_seqs:
                self._distrust(batch, failed)
                if has_ended:
                    decode_set.index()
                return
        columns = self.columns
        rows, kv_lens = batch.rows[num_in_set:], batch.kv_lens[num_in_set:]
        # A guessed token is not known yet: if it is kept, the commit says that it was computed, and the step after that indexes it.
        known = np.minimum(kv_lens, columns.num_tokens[rows])
        columns.num_computed[rows] = known
        self._distrust(batch, failed)
        if decode_set is not None and has_ended:
            decode_set.index()
        is_due = known - columns.num_indexed[rows] >= self.info.block_size
        for index in np.flatnonzero(is_due).tolist():
            sequence = self.by_row[int(rows[index])]
            if sequence is not None:
                self.tables.index(sequence, int(known[index]), is_computed=True)
        if batch.is_decode or not self._prefilling:
            return
        for index in batch.sample_seqs[batch.sample_seqs >= num_in_set].tolist():
            sequence = self.by_row[int(batch.rows[index])]
            if sequence is not None and sequence.is_prefilling:
                sequence.is_prefilling = False
                sequence.prefill_end_ns = sequence.prefill_end_ns or now_ns
                sequence.first_token_ns = sequence.first_token_ns or now_ns
                self._prefilling.remove(sequence)
                self._decode_rows = None

    def _distrust(self, batch: Batch, failed: tuple[int, ...]) -> None:
        for index in failed:
            broken = self.by_row[int(batch.rows[batch.sample_seqs[index]])]
            if broken is not None:
                self.distrust(broken)

    def distrust(self, sequence: Sequence) -> None:
        """Logits of a running sequence were not finite: nothing that it has computed shall be found."""
        self.tables.distrust(sequence, self.running)

    def _batch(
        self,
        step: int,
        decode_rows: npt.NDArray[np.int32],
        guesses: dict[int, list[int]],
        chunks: Chunks,
    ) -> Batch:
        columns, size = self.columns, self.info.block_size
        if chunks and self._decode_set is None and self._completes_one(chunks):
            # Whoever completes its prompt decodes in the step behind this one: a set of the others would be of no use there.
            return ragged_batch(step, decode_rows, chunks, columns, size, guesses)
        if guesses or not len(decode_rows):
            return ragged_batch(step, decode_rows, chunks, columns, size, guesses)
        if self._decode_set is None:
            self._decode_set = DecodeSet(decode_rows, self.info, columns, self.tables, self.by_row)
        batch = self._decode_set.batch(step)
        if chunks:
            batch = joined(batch, ragged_batch(step, decode_rows[:0], chunks, columns, size))
            self._decode_set.widened(batch)
        return batch

    def _completes_one(self, chunks: Chunks) -> bool:
        """Whether the last token that one of them knows is in its chunk."""
        columns = self.columns
        return any(
            columns.num_computed[s.row] + count == columns.num_tokens[s.row] for s, count in chunks
        )

    def check(self) -> None:
        """Raise AssertionError unless the law holds."""
        self.tables.check(self.running)
        assert self.columns.num_free_rows + len(self.running) == self.max_num_seqs
        for sequence in self.running:
            row = sequence.row
            assert self.by_row[row] is sequence
            num_slots = len(sequence.blocks) * self.info.block_size
            assert self.columns.num_computed[row] <= min(self.columns.num_tokens[row], num_slots)
            assert sequence.is_prefilling == (sequence in self._prefilling)
        for sequence in self.waiting:
            assert sequence.row == -1 and not sequence.blocks
            assert sequence not in self.running
        assert self.waiting == sorted(self.waiting, key=_order)
