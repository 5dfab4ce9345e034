"""The sequences that decode together, as arrays in the order of their batch: a step of one token each adds 1 to the last one.

Owns: what the next batch of these rows is made of. Never: decides who decodes, or preempts anybody (the scheduler does), or appends
a token (the commit does).

Made from the columns when the set of decoding rows has changed, and carried on from step to step until it changes again. Only a
sequence that enters a block needs more than that 1: which ones do is known from the start by their phase, the number of steps
(modulo the block size) after which it happens.

Law: what has gone on is what a new set, made now, would be; `goes_on` says whether the columns still agree. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np

from shmserve.worker.batch import I4, Batch
from shmserve.worker.block_tables import BlockTables
from shmserve.worker.columns import Columns
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sequence import Sequence


class DecodeSet:
    """`rows` decode; each of them has its blocks for the coming step. `by_row` is the scheduler's."""

    def __init__(
        self,
        rows: I4,
        info: RunnerInfo,
        columns: Columns,
        tables: BlockTables,
        by_row: Listing[Sequence | None],
    ) -> None:
        self.rows = rows
        self._columns, self._tables, self._by_row = columns, tables, by_row
        self._size = size = info.block_size
        self._most_tokens = info.max_model_len
        self._lookahead = info.max_tokens_per_step - 1
        # numpy converts every other index type at every use, for three times the price of the use.
        self._at = at = rows.astype(np.intp)
        self._all_tokens = columns.token_ids.reshape(-1)
        self._cu_seqlens = np.arange(len(rows) + 1, dtype=np.int32)
        self._sample_seqs = self._cu_seqlens[:-1]
        self._positions: I4 = columns.num_computed[at]
        self._kv_lens: I4 = self._positions + 1
        self._token_at = at * columns.token_ids.shape[1] + self._positions
        places = self._positions // size
        phases = self._positions - places * size
        self._kv_slots: I4 = columns.block_table[at, places] * size + phases
        self._by_phase = np.argsort(phases, kind="stable")
        self._phase_ends = [0, *np.bincount(phases, minlength=size).cumsum().tolist()]
        self._members: dict[int, list[tuple[int, Sequence]]] = {}
        self._age = 0
        self._batch: Batch | None = None
        self._num_edits = -1
        self._look_up_table()
        # Of a guess that was kept in the step before, a full block may wait to be indexed.
        behind = np.flatnonzero(self._kv_lens - columns.num_indexed[at] > size)
        self._behind = [(index, self._sequence(index)) for index in behind.tolist()]

    def goes_on(self) -> bool:
        """Whether every sequence has made one token in each step since the set was made."""
        return self._columns.num_tokens[self._at].tobytes() == self._kv_lens.tobytes()

    def made(self, batch: Batch) -> bool:
        """Whether `batch` is the set's own, and its newest."""
        return batch is self._batch

    def grow(self) -> bool:
        """Give a block to those who need one for the coming step; False, and nothing given, if too few are free."""
        kv_len, size = self._kv_lens.item, self._size
        # Who has blocks for the whole context needs no more; who guessed may have got this one before.
        needy = [
            (index, sequence)
            for index, sequence in self._at_phase(-self._age - self._lookahead)
            if len(sequence.blocks) * size < self._most_tokens
            and len(sequence.blocks) * size < kv_len(index) + self._lookahead
        ]
        if not needy:
            return True
        if len(needy) > self._tables.blocks.num_free:
            return False
        self._tables.grow_each([sequence for _, sequence in needy])
        table, width = self._table, self._table.shape[1]
        for index, sequence in needy:
            last = len(sequence.blocks) - 1
            if last < width:
                table[index, last] = sequence.blocks[last]
            else:
                self._num_edits = -1  # too narrow now: look it up again
        return True

    def batch(self, step: int) -> Batch:
        """The coming step's. Its block table is the set's own: it grows with the steps behind it."""
        if self._num_edits != self._tables.num_edits:
            self._look_up_table()
        if self._age:
            kv_slots, position, size = self._kv_slots, self._positions.item, self._size
            for index, sequence in self._at_phase(-self._age):
                kv_slots[index] = sequence.blocks[position(index) // size] * size
        self._batch = Batch(
            step=step,
            rows=self.rows,
            token_ids=self._all_tokens[self._token_at],
            positions=self._positions,
            kv_slots=self._kv_slots,
            cu_seqlens=self._cu_seqlens,
            block_table=self._table,
            kv_lens=self._kv_lens,
            sample_seqs=self._sample_seqs,
            is_decode=True,
        )
        return self._batch

    def advance(self) -> list[Sequence]:
        """The newest batch was computed; who has filled a block with it. Called before the step's tokens are appended."""
        self._columns.num_computed[self._at] = self._kv_lens
        # New arrays, not in place: a runner may still look at those of its batch.
        self._positions = self._kv_lens
        self._kv_lens = self._kv_lens + 1
        self._kv_slots = self._kv_slots + 1
        self._token_at += 1
        self._age += 1
        self._batch = None
        full = self._at_phase(-self._age)
        if self._behind:
            full = list(dict([*full, *self._behind]).items())
            self._behind = []
        return [sequence for _, sequence in full]

    def _at_phase(self, phase: int) -> list[tuple[int, Sequence]]:
        """The sequences whose first position here was at this place in its block, with their indices."""
        phase %= self._size
        found = self._members.get(phase)
        if found is None:
            indices = self._by_phase[self._phase_ends[phase] : self._phase_ends[phase + 1]]
            found = self._members[phase] = [(i, self._sequence(i)) for i in indices.tolist()]
        return found

    def _look_up_table(self) -> None:
        columns = self._columns
        width = max(1, int(columns.num_blocks[self._at].max()))
        self._table = columns.block_table[self._at, :width]
        self._num_edits = self._tables.num_edits

    def _sequence(self, index: int) -> Sequence:
        sequence = self._by_row[int(self.rows[index])]
        assert sequence is not None, (index, "left, and is still in the set")
        return sequence
