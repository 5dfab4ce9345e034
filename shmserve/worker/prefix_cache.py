"""Prefix cache: the KV blocks of earlier tokens, found again by the tokens themselves.

Owns: which blocks hold which tokens behind which others, and the order in which unused ones are given up. Never: touches KV
memory, counts references (`BlockAllocator` does), or takes two prefixes for one: tokens are compared, not a hash of them.

A cached block is a node. It is found by the uid of the node before it and its own tokens; the node before the first is the
request's `cache_salt`, so requests with different salts share nothing. Uids are never used again: what stood behind a
forgotten node cannot be found under a new one.

Who holds a node holds all nodes before it, and lets go of them last. So the least recently used node never has another one
behind it, and eviction takes sequences from their end.

    cached = held (`BlockAllocator.ref_count` > 0)  or  evictable, oldest first
Worker's main thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

TOKEN_BYTES = 4

Parent: TypeAlias = int | bytes
"""What stands before a block: the uid of a node, or the salt of a request where nothing does."""


class Node(NamedTuple):
    """A cached block: its `key`, the parent and the tokens (one block of i4), finds it; `uid` is the parent of those behind it.

    A tuple: one is made at every block boundary, and a frozen dataclass takes five times as long.
    """

    block: int
    uid: int
    key: tuple[Parent, bytes]

    @property
    def parent(self) -> Parent:
        return self.key[0]

    @property
    def tokens(self) -> bytes:
        return self.key[1]


class PrefixCache:
    """Nodes by what finds them and by block. Blocks have `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._num_bytes = TOKEN_BYTES * block_size
        # Insertion order is uid order: a node comes behind the one before it (`forget` relies on it).
        self._nodes: dict[tuple[Parent, bytes], Node] = {}
        self._by_block: dict[int, Node] = {}
        # The next to go first. A plain dict keeps the places of what was taken from its front, and to find the first behind them
        # took 30 ms a step once a server's cache had been full for a while.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._next_uid = 1

    @property
    def num_cached(self) -> int:
        return len(self._by_block)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def node_of(self, block: int) -> Node | None:
        """The node that `block` is, None if it is not cached."""
        return self._by_block.get(block)

    def is_evictable(self, block: int) -> bool:
        return block in self._evictable

    def match(self, parent: Parent, tokens: bytes) -> list[Node]:
        """The nodes behind `parent` for as many of the full blocks of `tokens` (i4) as are cached without a gap."""
        nodes: list[Node] = []
        size = self._num_bytes
        for end in range(size, len(tokens) + 1, size):
            node = self._nodes.get((parent, tokens[end - size : end]))
            if node is None:
                break
            nodes.append(node)
            parent = node.uid
        return nodes

    def insert(self, parent: Parent, tokens: bytes, block: int) -> Node:
        """The node of these tokens behind `parent`: `block`, which must be held, unless they are cached in another."""
        return self.insert_each([parent], [tokens], [block])[0]

    def insert_each(
        self, parents: list[Parent], tokens: list[bytes], blocks: list[int]
    ) -> list[Node]:
        """`insert` for each, in this order."""
        nodes, by_block, uid = self._nodes, self._by_block, self._next_uid
        found = []
        for key, block in zip(zip(parents, tokens, strict=True), blocks, strict=True):
            node = nodes.get(key)
            if node is None:
                assert len(key[1]) == self._num_bytes, (len(key[1]), self.block_size)
                assert block not in by_block, (block, "is cached as another")
                # Past the constructor that NamedTuple writes, which takes as long as all the rest.
                node = tuple.__new__(Node, (block, uid, key))
                uid += 1
                nodes[key] = by_block[block] = node
            found.append(node)
        self._next_uid = uid
        return found

    def retire(self, block: int) -> bool:
        """Nobody holds `block` any more: if it is cached it may be evicted, last of all. False if it is not cached."""
        if block not in self._by_block:
            return False
        self._evictable[block] = None
        return True

    def revive(self, block: int) -> None:
        """An evictable block is held again."""
        del self._evictable[block]

    def evict(self) -> int:
        """Forget the block that has been unused longest; it may be written."""
        block, _ = self._evictable.popitem(last=False)
        self._forget(self._by_block[block])
        return block

    def forget(self, blocks: Iterable[int]) -> list[int]:
        """Forget `blocks` and all that stands behind them; those that nobody holds, and so are free now."""
        dead = {self._by_block[block].uid for block in blocks if block in self._by_block}
        doomed = []
        for node in self._nodes.values():
            if node.uid in dead or node.parent in dead:
                dead.add(node.uid)
                doomed.append(node)
        return [node.block for node in doomed if self._forget(node)]

    def clear(self) -> list[int]:
        """Forget everything; the blocks that nobody holds, and so are free now."""
        unheld = list(self._evictable)
        self._nodes.clear()
        self._by_block.clear()
        self._evictable.clear()
        return unheld

    def _forget(self, node: Node) -> bool:
        """True if nobody holds its block."""
        del self._nodes[node.key]
        del self._by_block[node.block]
        is_unheld = node.block in self._evictable
        self._evictable.pop(node.block, None)
        return is_unheld

    def check(self) -> None:
        """Raise AssertionError unless both tables say the same, and nothing would be evicted before what stands behind it."""
        assert len(self._nodes) == len(self._by_block)
        uids = {node.uid for node in self._nodes.values()}
        assert list(uids) == [] or max(uids) < self._next_uid
        assert [node.uid for node in self._nodes.values()] == sorted(uids)
        order = {block: at for at, block in enumerate(self._evictable)}
        by_uid = {node.uid: node for node in self._nodes.values()}
        for (parent, tokens), node in self._nodes.items():
            assert (parent, tokens) == (node.parent, node.tokens)
            assert self._by_block.get(node.block) is node, (node, "is not found by its block")
            if isinstance(parent, bytes):
                continue
            assert parent in uids, (node, "cannot be found any more")
            before = by_uid[parent].block
            is_last = before not in order or order.get(node.block, len(order)) < order[before]
            assert is_last, (before, "would be evicted before", node.block)
        assert order.keys() <= self._by_block.keys(), "an evictable block is not cached"
