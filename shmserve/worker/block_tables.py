"""Block tables: which KV blocks each running sequence holds, its own and those that it found in the prefix cache.

Owns: `Sequence.blocks` and its columns (`block_table`, `num_blocks`, `num_indexed`), and the counts of tokens looked for and
found. Never: decides who runs, or when.

    [0, num_indexed)              in blocks that the prefix cache knows; any number of sequences may hold them, nobody writes
                                  them any more (but for the step that computes them, see below)
    [num_indexed, ...)            in blocks of this sequence alone

A prompt's full blocks are indexed when they are scheduled, so that another row of the same step may already share them.
That is right since every runner computes a step layer by layer, and in each layer writes the keys and values of all rows
before any row attends: `Decoder.hidden_states` calls `KVCache.write` before `attend`; in kernels.c the phase ROTARY ends
for all rows before ATTEND begins. A runner that cannot promise it says `supports_prefix_cache=False`. Generated tokens' blocks
are indexed when they are full: those of a decode set at the end of its plan (decode_set.py), or before anybody looks. Where
another block with the same tokens was indexed first, that one is held instead.

A sequence whose logits were not finite takes its blocks, and all that was cached behind them, out of the cache; whoever shares
them keeps them and is outside the cache from then on (`num_indexed` is OUTSIDE), as after a flush. Worker's main thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from shmserve.worker.batch import I4
from shmserve.worker.blocks import BlockAllocator
from shmserve.worker.columns import Columns
from shmserve.worker.prefix_cache import TOKEN_BYTES, Node, Parent, PrefixCache
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sequence import Sequence

Index = npt.NDArray[np.intp]
OUTSIDE = 1 << 30
"""`num_indexed` of a sequence that the prefix cache has nothing to do with: no token count reaches it."""


class BlockTables:
    """Blocks of the sequences that have a row. `is_caching` False: nobody finds or leaves anything."""

    def __init__(self, info: RunnerInfo, columns: Columns, *, is_caching: bool) -> None:
        self.is_caching = is_caching and info.supports_prefix_cache
        self.cache = PrefixCache(info.block_size)
        self.blocks = BlockAllocator(info.num_blocks, self.cache)
        self.num_query_tokens = 0  # of prompts admitted for the first time
        self.num_hit_tokens = 0  # of them, found in the cache
        self.num_edits = 0  # of block tables
        self._columns = columns
        self._size = info.block_size
        self._token_blocks = sliding_window_view(columns.token_ids.reshape(-1), info.block_size)

    # -- admission --------------------------------------------------------------------------------------------------------

    def found_for(self, sequence: Sequence) -> list[Node]:
        """What the cache has for a waiting sequence. Its last token is always computed: it makes the next one."""
        if not self.is_caching or sequence.skips_cache:
            return []
        tokens = np.ascontiguousarray(sequence.token_ids[:-1], np.int32)
        return self.cache.match(sequence.cache_salt, tokens.tobytes())

    def num_missing(self, found: list[Node], num_blocks: int) -> int:
        """How many more blocks must become free before a sequence of `num_blocks` that has `found` can be admitted."""
        num_revived = sum(self.blocks.ref_count[node.block] == 0 for node in found)
        return num_blocks - len(found) - (self.blocks.num_free - num_revived)

    def num_gained(self, leaving: Iterable[Sequence], found: list[Node]) -> int:
        """How much `num_missing` would fall if `leaving` gave their blocks back."""
        held = Counter(block for sequence in leaving for block in sequence.blocks)
        kept = {node.block for node in found}
        counts = self.blocks.ref_count
        return sum(counts[block] == n for block, n in held.items() if block not in kept)

    def enter(self, sequence: Sequence, found: list[Node], num_blocks: int) -> None:
        """Give a sequence that has just got its row `found` and as many new blocks as make `num_blocks`."""
        for node in found:  # before anything is allocated, and so evicted
            self.blocks.share(node.block)
        columns, row = self._columns, sequence.row
        num_found = len(found) * self._size
        sequence.cache_parent = found[-1].uid if found else sequence.cache_salt
        columns.num_indexed[row] = num_found if self.is_caching else OUTSIDE
        columns.num_computed[row] = num_found
        columns.num_blocks[row] = 0
        self._append(sequence, [node.block for node in found])
        self.grow(sequence, num_blocks - len(found))
        if not sequence.admitted_ns and self.is_caching:
            self.num_query_tokens += sequence.num_prompt_tokens
            self._count_hit(sequence, num_found)

    def grow(self, sequence: Sequence, count: int) -> None:
        """`count` blocks more. Raises OutOfBlocksError."""
        self._append(sequence, self.blocks.allocate(count))

    def grow_each(self, sequences: list[Sequence], rows: Index, counts: I4) -> None:
        """So many blocks more for each, whose rows are `rows`. Raises OutOfBlocksError, and gives none, if there are too few."""
        which = np.flatnonzero(counts)
        if not which.size:
            return
        if counts.max() > 1:
            self.blocks.ensure_free(int(counts.sum()))
            for index in which.tolist():
                self.grow(sequences[index], int(counts[index]))
            return
        blocks = self.blocks.allocate(len(which))
        self.num_edits += 1
        columns, rows = self._columns, rows[which]
        places = columns.num_blocks[rows]
        columns.block_table[rows, places] = blocks
        columns.num_blocks[rows] = places + 1
        for index, block in zip(which.tolist(), blocks, strict=True):
            sequences[index].blocks.append(block)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        self.num_edits += 1
        row, have = sequence.row, len(sequence.blocks)
        sequence.blocks += blocks
        self._columns.block_table[row, have : have + len(blocks)] = blocks
        self._columns.num_blocks[row] = have + len(blocks)

    def _count_hit(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.cached_tokens += num_tokens
        self.num_hit_tokens += num_tokens

    # -- while it runs ----------------------------------------------------------------------------------------------------

    def skip_ahead(self, sequence: Sequence) -> None:
        """Before a chunk of its prompt is scheduled: take over what others have indexed of it since it was admitted."""
        columns, row = self._columns, sequence.row
        first = int(columns.num_indexed[row])
        if first >= OUTSIDE or sequence.skips_cache:
            return
        tokens = columns.token_ids[row, first : columns.num_tokens[row] - 1].tobytes()
        found = self.cache.match(sequence.cache_parent, tokens)
        if not found:
            return
        for at, node in enumerate(found, first // self._size):
            self._replace(sequence, at, node)
        computed = int(columns.num_computed[row])
        columns.num_indexed[row] = columns.num_computed[row] = first + len(found) * self._size
        sequence.cache_parent = found[-1].uid
        if not sequence.num_retractions:
            self._count_hit(sequence, int(columns.num_computed[row]) - computed)

    def index(self, sequence: Sequence, num_tokens: int, *, is_computed: bool) -> None:
        """Let the cache know the full blocks of the first `num_tokens` tokens, which have been computed or will be in this step."""
        columns, row, size = self._columns, sequence.row, self._size
        first = int(columns.num_indexed[row])
        while first + size <= num_tokens:
            tokens = columns.token_ids[row, first : first + size].tobytes()
            at = first // size
            node = self.cache.insert(sequence.cache_parent, tokens, sequence.blocks[at])
            if node.block != sequence.blocks[at]:
                if not is_computed:
                    break  # this step still writes the sequence's own block: only then can it be given up
                self._replace(sequence, at, node)
            sequence.cache_parent = node.uid
            first += size
        columns.num_indexed[row] = first

    def index_each(self, sequences: list[Sequence], rows: Index) -> None:
        """`index` of what each of them, whose rows are `rows`, has computed: a block that was filled, for most of them."""
        columns, size = self._columns, self._size
        firsts = columns.num_indexed[rows]
        num_due = columns.num_computed[rows] - firsts  # far below 0 for who is OUTSIDE
        is_one = (num_due >= size) & (num_due < 2 * size)
        for index in np.flatnonzero(num_due >= 2 * size).tolist():
            first = int(firsts[index])
            self.index(sequences[index], first + int(num_due[index]), is_computed=True)
        if not is_one.all():
            firsts, rows = firsts[is_one], rows[is_one]
            sequences = [sequences[index] for index in np.flatnonzero(is_one).tolist()]
        starts = rows * columns.token_ids.shape[1] + firsts
        # As a list of opaque values of a block's bytes: what numpy makes `bytes` of by itself.
        tokens = self._token_blocks[starts].view(f"V{size * TOKEN_BYTES}").ravel().tolist()
        places = (firsts // size).tolist()
        blocks = columns.block_table[rows, firsts // size].tolist()
        nodes = self.cache.insert_each([s.cache_parent for s in sequences], tokens, blocks)
        columns.num_indexed[rows] = firsts + size
        for sequence, at, block, node in zip(sequences, places, blocks, nodes, strict=True):
            if node.block != block:
                self._replace(sequence, at, node)
            sequence.cache_parent = node.uid

    def _replace(self, sequence: Sequence, at: int, node: Node) -> None:
        """Hold the block of `node` in the place of one that is the sequence's own."""
        self.num_edits += 1
        own = sequence.blocks[at]
        self.blocks.share(node.block)
        sequence.blocks[at] = node.block
        self._columns.block_table[sequence.row, at] = node.block
        self.blocks.release([own])

    # -- leaving ----------------------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> None:
        """Give all its blocks back; what it has computed stays in the cache as long as nobody needs the room."""
        columns, row = self._columns, sequence.row
        # Behind num_tokens there may be keys and values of tokens that were guessed and not kept.
        known = min(int(columns.num_computed[row]), int(columns.num_tokens[row]))
        self.index(sequence, known, is_computed=True)
        self.blocks.release(sequence.blocks)
        columns.block_table[row, : len(sequence.blocks)] = 0
        sequence.blocks = []

    def distrust(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """What `sequence` holds may not be numbers: nobody shall find it, nor what was computed behind it."""
        if self._columns.num_indexed[sequence.row] < OUTSIDE:
            self.blocks.forget(sequence.blocks)
            self._columns.num_indexed[sequence.row] = OUTSIDE
        for other in running:
            first = int(self._columns.num_indexed[other.row])
            if 0 < first < OUTSIDE and not self.cache.node_of(
                other.blocks[first // self._size - 1]
            ):
                self._columns.num_indexed[other.row] = OUTSIDE

    def flush(self, running: Iterable[Sequence]) -> None:
        """Nothing that has been computed up to now will be found, nor what those that run now will compute."""
        self.blocks.flush()
        for sequence in running:
            self._columns.num_indexed[sequence.row] = OUTSIDE

    # -- the law ----------------------------------------------------------------------------------------------------------

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless references, tables and cache say the same of every running sequence."""
        self.blocks.check()
        sequences, size, columns = list(running), self._size, self._columns
        held = Counter(block for sequence in sequences for block in sequence.blocks)
        counts = self.blocks.ref_count
        assert held == Counter({block: n for block, n in enumerate(counts) if n}), "references"
        num_outside: Counter[int] = Counter()
        for sequence in sequences:
            row, blocks = sequence.row, sequence.blocks
            assert len(set(blocks)) == len(blocks), (blocks, "holds a block twice")
            assert columns.num_blocks[row] == len(blocks)
            assert columns.block_table[row, : len(blocks)].tolist() == blocks
            first = int(columns.num_indexed[row])
            if first >= OUTSIDE:
                assert not any(map(self.cache.node_of, blocks)), "outside, with a cached block"
                num_outside.update(blocks)
                continue
            assert first % size == 0 and first <= len(blocks) * size
            parent: Parent = sequence.cache_salt
            for at, block in enumerate(blocks):
                node = self.cache.node_of(block)
                if at * size >= first:
                    assert counts[block] == 1 and node is None, (block, "is not its own")
                    continue
                tokens = columns.token_ids[row, at * size : (at + 1) * size].tobytes()
                assert node is not None, (block, "is not cached")
                assert (node.parent, node.tokens) == (parent, tokens), (block, "holds others")
                parent = node.uid
            assert parent == sequence.cache_parent
        for block, n in held.items():
            assert n == 1 or self.cache.node_of(block) or num_outside[block] == n, block
