"""KV cache blocks: who has which.

Owns: the free list and the reference counts; a block that is released and cached stays findable until a free one is missing.
Never: touches KV memory, or looks at a token. Block 0 is kept for padding rows and is never given out.

Law, stated by `check`: every block but 0 is exactly one of
    free        no reference, not cached
    held        at least one reference; perhaps cached
    evictable   no reference, cached: free for whoever asks, once the free list is empty
"""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.worker.prefix_cache import PrefixCache


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free: the scheduler must preempt first."""


class BlockAllocator:
    """`num_blocks` counts block 0. Worker's main thread only."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        # A stack: the block freed last is used first, while the CPU's caches may still know it.
        self._free = list(range(num_blocks - 1, 0, -1))
        # A list: a step touches a few blocks, one by one, and numpy costs 100 ns for each.
        self.ref_count = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, the evictable ones included."""
        return len(self._free) + self.cache.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - self.num_free

    def ensure_free(self, count: int) -> None:
        """Raises OutOfBlocksError if fewer are free."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocksError, and takes none, if fewer are free."""
        self.ensure_free(count)
        if not count:
            return []
        while len(self._free) < count:
            self._free.append(self.cache.evict())
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            assert self.ref_count[block] == 0, (block, "is free and held")
            self.ref_count[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One reference more on a cached block, which may be evictable."""
        assert self.cache.node_of(block) is not None, (block, "is not cached")
        if self.ref_count[block] == 0:
            self.cache.revive(block)
        self.ref_count[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each of `blocks`, the last first: of a sequence's blocks the end is to be evicted first."""
        for block in reversed(blocks):
            left = self.ref_count[block] - 1
            assert left >= 0, (block, "released more often than it was taken")
            self.ref_count[block] = left
            if left == 0 and not self.cache.retire(block):
                self._free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """`blocks`, and what is cached behind them, are cached no more; references stay."""
        self._free += self.cache.forget(blocks)

    def flush(self) -> None:
        """Nothing is cached any more; references stay."""
        self._free += self.cache.clear()

    def check(self) -> None:
        """Raise AssertionError unless the law holds."""
        self.cache.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free and not self.cache.node_of(0), "block 0 is free or cached"
        for block in range(1, self.num_blocks):
            is_held = self.ref_count[block] > 0
            is_evictable = self.cache.is_evictable(block)
            what = (block, is_held, block in free, is_evictable)
            assert is_held + (block in free) + is_evictable == 1, what
            assert not (block in free and self.cache.node_of(block)), (block, "is free and cached")
        assert self.ref_count[0] == 0
