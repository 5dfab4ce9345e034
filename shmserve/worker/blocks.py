"""KV cache blocks: who has which.

Owns: the free list and the reference counts. Never: touches KV memory. Block 0 is kept for padding rows and is never given
out. Law, stated by `check`: every block but 0 is either free, with no reference, or held, with at least one; none is both.
"""

from __future__ import annotations


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free: the scheduler must preempt first."""


class BlockAllocator:
    """`num_blocks` counts block 0. Worker's main thread only."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is used first, while the CPU's caches may still know it.
        self._free = list(range(num_blocks - 1, 0, -1))
        # A list: a step touches a few blocks, one by one, and numpy costs 100 ns for each.
        self.ref_count = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises OutOfBlocksError, and takes none, if fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        if not count:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            assert self.ref_count[block] == 0, (block, "is free and held")
            self.ref_count[block] = 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each of `blocks`; those without any are free."""
        for block in blocks:
            left = self.ref_count[block] - 1
            assert left >= 0, (block, "released more often than it was taken")
            self.ref_count[block] = left
            if left == 0:
                self._free.append(block)

    def check(self) -> None:
        """Raise AssertionError unless the law holds."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert 0 not in self._free, "block 0 is free"
        free = set(self._free)
        for block in range(1, self.num_blocks):
            is_held = self.ref_count[block] > 0
            assert is_held != (block in free), (
                block,
                "is lost" if not is_held else "is held and free",
            )
        assert self.ref_count[0] == 0
