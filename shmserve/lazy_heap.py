"""A heap whose items may leave from anywhere: what is least, when most items go before they are ever the least.

Owns: the order. Never: knows what an item is. An item that left stays in the heap as a stale pair until it comes up, or until half of the
heap is stale; so `put`, `discard` and `first` cost O(log n) amortised, and the memory is that of twice the items that are in it.
Pure; any process, one thread.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_STALE_ALLOWED: Final = 64


class LazyHeap(Generic[T]):
    """Items are told apart by identity, and each is in it once. Keys must be comparable; equal ones come in the order of `put`."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, T]] = []
        self._number: dict[int, int] = {}  # of the pair that counts, by the id of its item
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._number)

    def put(self, key: Any, item: T) -> None:
        """Put it in under `key`, or move it there."""
        self._num_puts += 1
        self._number[id(item)] = self._num_puts
        heapq.heappush(self._heap, (key, self._num_puts, item))
        if len(self._heap) > 2 * len(self._number) + _STALE_ALLOWED:
            self._heap = [pair for pair in self._heap if self._counts(pair)]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Take it out, if it is in."""
        if self._number.pop(id(item), None) is not None and not self._number:
            self._heap.clear()  # stale pairs would keep their items alive

    def first(self) -> tuple[Any, T] | None:
        """(key, item) of the least; None if it is empty."""
        heap = self._heap
        while heap and not self._counts(heap[0]):
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def _counts(self, pair: tuple[Any, int, T]) -> bool:
        return self._number.get(id(pair[2])) == pair[1]
