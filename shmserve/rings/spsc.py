"""A single-producer single-consumer ring of fixed-size slots in shared memory.

Owns: the hand-over of slots. Never: spins, waits, allocates per record, or looks inside a record.

    read_cursor <= write_cursor <= read_cursor + capacity            (u64, free-running, compared by difference)

Producer.try_write   store claim_cursor; copy slots;                 pairs with   Consumer.poll     take n from data: they are
                     store write_cursor; add n to data                                              whole; view them
Consumer.release     store read_cursor; add n to credits             pairs with   Producer.free     take credits before reuse

The eventfd counters carry the hand-over, so the order holds on every CPU; the cursors are for observers and for recovery.
Each end keeps its own cursors in Python integers and never reads the other side's words to decide what it owns, so a broken
peer can lie to observers only (and delay its own records: `Consumer.seems_empty`); what it can do to the counters is checked
(`RingProtocolError`).
Safe in one thread per end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shmserve.rings import layout as L
from shmserve.rings.wakeup import RingProtocolError as RingProtocolError


class Words(Protocol):
    """u64 words that are loaded and stored one at a time (a memoryview of format "Q")."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Producer:
    """The writing end. `slots` is the slot area; `signal` adds to the data counter; `credits` takes from the credit counter."""

    def __init__(
        self,
        words: Words,
        slots: memoryview,
        slot_size: int,
        signal: Callable[[int], None],
        take_credits: Callable[[], int],
    ) -> None:
        self.slot_size = slot_size
        self.capacity = len(slots) // slot_size
        self._words = words
        self._slots = slots
        self._mask = self.capacity - 1
        self._signal = signal
        self._take_credits = take_credits
        self._write_cursor = words[L.W_WRITE_CURSOR]
        self._num_free = self.capacity
        self._high_water = words[L.W_HIGH_WATER]
        self._num_publishes = words[L.W_PUBLISHES]

    @property
    def num_free(self) -> int:
        """Slots known to be free. More may be: `free` looks."""
        return self._num_free

    @property
    def write_cursor(self) -> int:
        return self._write_cursor

    def free(self, wanted: int) -> int:
        """Free slots, at least `wanted` if the consumer has given so many back. Reads the counter only when it must."""
        if self._num_free < wanted:
            num_free = self._num_free + self._take_credits()
            if num_free > self.capacity:
                # Nothing of it is free: who tries once more must not write over what the consumer still reads.
                raise RingProtocolError(
                    f"the consumer gave back {num_free - self.capacity} slots more than it was sent"
                )
            self._num_free = num_free
        return self._num_free

    def try_write(self, records: memoryview | bytes, num_slots: int) -> bool:
        """Write `num_slots` whole slots from `records` and signal once; False, and nothing is written, if they do not fit.

        `records` is a contiguous buffer of num_slots * slot_size bytes. Does not wait. Nothing to write is no publish.
        """
        if not num_slots:
            return True
        if self.free(num_slots) < num_slots:
            return False
        size = self.slot_size
        assert len(records) == num_slots * size, (len(records), num_slots, size)
        words = self._words
        cursor = self._write_cursor
        after = cursor + num_slots
        words[L.W_CLAIM_CURSOR] = (
            after  # before the copy: what lies above write_cursor is torn if we die now
        )
        first = cursor & self._mask
        run = self.capacity - first
        if num_slots <= run:
            self._slots[first * size : (first + num_slots) * size] = records
        else:
            cut = run * size
            self._slots[first * size :] = records[:cut]
            self._slots[: (num_slots - run) * size] = records[cut:]
        words[L.W_WRITE_CURSOR] = after
        self._write_cursor = after
        self._num_free -= num_slots
        self._num_publishes += 1
        words[L.W_PUBLISHES] = self._num_publishes
        depth = after - words[L.W_READ_CURSOR]
        # An indication only: read_cursor is the other side's word, and a depth above capacity would be its fault.
        if self._high_water < depth <= self.capacity:
            self._high_water = depth
            words[L.W_HIGH_WATER] = depth
        self._signal(num_slots)  # after the cursor and the slots: pairs with Consumer.poll
        return True

    def count(self, word: int, amount: int) -> None:
        """Add to one of the producer's counters (refused, coalesced, dropped, blocked_ns)."""
        self._words[word] += amount

    def set_gauge(self, word: int, value: int) -> None:
        """Store one of the producer's gauges (pending)."""
        self._words[word] = value


class Consumer:
    """The reading end. `owed` slots are announced and not yet released."""

    def __init__(
        self,
        words: Words,
        slots: memoryview,
        slot_size: int,
        take_data: Callable[[], int],
        give_credits: Callable[[int], None],
    ) -> None:
        self.slot_size = slot_size
        self.capacity = len(slots) // slot_size
        self.owed = 0
        self._words = words
        self._slots = slots
        self._mask = self.capacity - 1
        self._take_data = take_data
        self._give_credits = give_credits
        self._read_cursor = words[L.W_READ_CURSOR]
        self._num_wakeups = words[L.W_WAKEUPS]
        self._num_empty = words[L.W_EMPTY_WAKEUPS]
        self._largest = words[L.W_LARGEST_BATCH]

    @property
    def read_cursor(self) -> int:
        return self._read_cursor

    def poll(self) -> int:
        """Take what the producer announced; the slots owed now. Reading zeroes the counter: `owed` keeps what is left over."""
        words = self._words
        announced = self._take_data()
        if announced:
            if self.owed + announced > self.capacity:
                # Nothing of it is owed: who polls once more must not find slots that are not there.
                raise RingProtocolError(
                    f"the producer announced {self.owed + announced} slots, the ring holds {self.capacity}"
                )
            self.owed += announced
            self._num_wakeups += 1
            words[L.W_WAKEUPS] = self._num_wakeups
            if announced > self._largest:
                self._largest = announced
                words[L.W_LARGEST_BATCH] = announced
        else:
            self._num_empty += 1
            words[L.W_EMPTY_WAKEUPS] = self._num_empty
        return self.owed

    def seems_empty(self) -> bool:
        """Whether nothing was published since the last `poll`, as far as the producer's cursor tells: no system call.

        An indication only: on weakly ordered CPUs it may come late, and a broken peer may never store its cursor. Who goes by
        it polls all the same after a while, or when the data counter is readable.
        """
        return self._words[L.W_WRITE_CURSOR] == self._read_cursor + self.owed

    def view(self, most: int) -> memoryview:
        """The next owed slots, at most `most` and only up to the end of the slot area, without a copy.

        They stay as they are until `release`; call again after it for those beyond the wrap. Empty if none is owed.
        """
        first = self._read_cursor & self._mask
        count = min(self.owed, most, self.capacity - first)
        return self._slots[first * self.slot_size : (first + count) * self.slot_size]

    def peek(self, offset: int) -> memoryview:
        """The owed slot at `offset` from the read cursor, without a copy."""
        assert offset < self.owed, (offset, self.owed)
        first = (self._read_cursor + offset) & self._mask
        return self._slots[first * self.slot_size : (first + 1) * self.slot_size]

    def release(self, count: int) -> None:
        """The next `count` owed slots are handled: the producer may reuse them. Views of them are invalid from here on."""
        assert 0 <= count <= self.owed, (count, self.owed)
        if not count:
            return
        self.owed -= count
        self._read_cursor += count
        self._words[L.W_READ_CURSOR] = self._read_cursor
        self._give_credits(count)  # pairs with Producer.free
