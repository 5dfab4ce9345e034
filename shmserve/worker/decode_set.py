"""The sequences that decode together, as arrays in the order of their batch, planned for as many steps as a block has tokens.

Owns: what the next batches of these rows are made of. Never: decides who decodes, or preempts anybody (the scheduler does), or
appends a token (the commit does).

Made from the columns when the set of decoding rows has changed, and carried on until it changes again: over steps that compute
prompts besides (mixed_batch.py), and over steps that are made before the one in front of them is known (overlap.py). A step of one
token each adds 1 to everything, but for those who enter a block. In the cold caches of a step that follows a sleep each small
operation costs several times what it costs in a loop, so a plan does the work of `block_size` steps at once: every
sequence gets the block that it will enter meanwhile, and the prefix cache gets the blocks that filled up at the plan's end. Where
free blocks are few, a plan is one step, and nobody gets a block before it is needed.

Laws
  - What has gone on is what a new set, made now, would be; with no step in flight `goes_on` says whether the columns still agree.
  - Whoever leaves takes its set along (the scheduler forgets it): a row that another sequence takes is not this set's row.

Worker's main thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listing

import numpy as np

from shmserve.worker.batch import I4, Batch
from shmserve.worker.block_tables import BlockTables, Index
from shmserve.worker.columns import Columns
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sequence import Sequence


class DecodeSet:
    """`rows` decode; each of them has its blocks for the coming step. `by_row` is the scheduler's.

    `positions` are those of the tokens that the coming step computes, where a step in flight computes the ones before them;
    None: nothing of these rows is in flight, and the columns know.
    """

    def __init__(
        self,
        rows: I4,
        info: RunnerInfo,
        columns: Columns,
        tables: BlockTables,
        by_row: Listing[Sequence | None],
        positions: I4 | None = None,
    ) -> None:
        self.rows = rows
        self._columns, self._tables, self._by_row = columns, tables, by_row
        self._size = info.block_size
        self._most_tokens = info.max_model_len
        self._lookahead = info.max_tokens_per_step - 1
        # numpy converts every other index type at every use, for three to nine times the price of the use.
        self._at: Index = rows.astype(np.intp)
        self._all_tokens = columns.token_ids.reshape(-1)
        self._row_starts = self._at * columns.token_ids.shape[1]
        self._cu_seqlens = np.arange(len(rows) + 1, dtype=np.int32)
        self._sample_seqs = self._cu_seqlens[:-1]
        self._sequences: list[Sequence] = []  # found when first needed
        # Batches that are not advanced over yet, oldest first, and whether each is its plan's last.
        self._made: deque[tuple[Batch, bool]] = deque()
        self._plan(columns.num_computed[self._at] if positions is None else positions, 1)

    def goes_on(self) -> bool:
        """Whether every sequence has made one token in each step since the set was made; asked with no step in flight."""
        kv_lens: I4 = self._positions[self._next + 1]
        num_tokens: I4 = self._columns.num_tokens[self._at]
        return num_tokens.tobytes() == kv_lens.tobytes()

    def made(self, batch: Batch) -> bool:
        """Whether `batch` is the oldest of the set's own that it was not advanced over."""
        return bool(self._made) and self._made[0][0] is batch

    def is_newest(self, batch: Batch) -> bool:
        """Whether the coming step is the one behind `batch`."""
        return bool(self._made) and self._made[-1][0] is batch

    def grow(self) -> bool:
        """Give a block to those who need one for the coming step; False, and nothing given, if too few are free."""
        if self._next < self._depth:
            return True
        num_free = self._tables.blocks.num_free
        lacking = self._lacking(self._size)
        depth = self._size
        if 2 * int(lacking.sum()) > num_free:
            lacking, depth = self._lacking(1), 1
            if int(lacking.sum()) > num_free:
                return False
        self._tables.grow_each(self._members(), self._at, lacking)
        self._plan(self._positions[self._next], depth)
        return True

    def batch(self, step: int) -> Batch:
        """The coming step's, which is made with it. Where a step is in flight, its `token_ids` mean nothing."""
        if self._num_edits != self._tables.num_edits:
            self._look_up_table()
        k = self._next
        batch = Batch(
            step=step,
            rows=self.rows,
            token_ids=self._all_tokens[self._token_at[k]],
            positions=self._positions[k],
            kv_slots=self._kv_slots[k],
            cu_seqlens=self._cu_seqlens,
            block_table=self._table,
            kv_lens=self._positions[k + 1],
            sample_seqs=self._sample_seqs,
            is_decode=True,
        )
        self._next += 1
        self._made.append((batch, self._next == self._depth))
        return batch

    def widened(self, batch: Batch) -> None:
        """The newest step computes others behind this set's rows: it is `batch`, which begins with them."""
        _, is_last = self._made.pop()
        self._made.append((batch, is_last))

    def advance(self) -> bool:
        """The oldest batch was computed; True at the end of a plan, when those who have filled a block are to be indexed.

        Called before the step's tokens are appended.
        """
        batch, is_last = self._made.popleft()
        self._columns.num_computed[self._at] = batch.kv_lens[: len(self.rows)]
        return is_last

    def index(self) -> None:
        """Let the prefix cache know the blocks that have filled up."""
        self._tables.index_each(self._members(), self._at)

    def _lacking(self, num_steps: int) -> I4:
        """How many blocks each is short of for the coming `num_steps`, and for what one step may add behind them."""
        columns, size = self._columns, self._size
        reach = self._positions[self._next] + (num_steps + self._lookahead)
        np.minimum(reach, self._most_tokens, out=reach)
        lacking: I4 = np.maximum(-(-reach // size) - columns.num_blocks[self._at], 0)
        return lacking

    def _plan(self, positions: I4, depth: int) -> None:
        """Lay out the coming `depth` steps, for which everybody has the blocks; `positions` are those of the first."""
        self._depth, self._next = depth, 0
        self._positions: I4 = positions + np.arange(depth + 2, dtype=np.int32)[:, None]
        self._token_at = self._row_starts + self._positions[:depth]
        self._look_up_table()

    def _look_up_table(self) -> None:
        columns, size, at = self._columns, self._size, self._at
        width = max(1, int(columns.num_blocks[at].max()))
        self._table = columns.block_table[at, :width]
        positions = self._positions[: self._depth]
        # Who ends before the plan does may have no block at its end.
        places = np.minimum(positions // size, width - 1)
        starts = np.arange(len(at)) * width
        blocks = self._table.reshape(-1)[starts + places]
        self._kv_slots: I4 = blocks * size + (positions - positions // size * size)
        self._num_edits = self._tables.num_edits

    def _members(self) -> list[Sequence]:
        if not self._sequences:
            for row in self.rows.tolist():
                sequence = self._by_row[row]
                assert sequence is not None, (row, "left, and is still in the set")
                self._sequences.append(sequence)
        return self._sequences
