"""What happens to a record when its ring is full: one class for each answer, named after what happens to the data.

    Coalescing   it waits outside the ring, folded into what its key already has waiting; the producer never waits
    Blocking     the producer waits for credits up to a deadline, counts the time, and past it coalesces
    Dropping     it is thrown away, and its key with it: the caller ends that key

Owns: the backlog of one ring, by key (a key is a request), oldest key first. Never: looks inside a record; the caller
supplies `fold` (merge a record into the pending one before it, without loss, or say no) and `weigh` (units of a record).

    offered = written + pending + coalesced + dropped        (slots; `coalesced` counts those folded into another, or cancelled)

A key with something pending never writes past it, so each key's records stay in order. A unit (several slots that belong
together) is written by one publish or not yet. Only a ring that is full ever costs more than one copy per batch.
One thread; the same thread as the ring's producer.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from shmserve.rings import layout as L
from shmserve.rings.spsc import Producer

Fold = Callable[[bytearray, memoryview], bool]
"""fold(pending, arriving): merge the slot `arriving` into the slot `pending` in place; False if it cannot be without loss."""

Weigh = Callable[[memoryview | bytearray], int]
"""Units (tokens, say) that a slot carries."""


def never_folds(pending: bytearray, arriving: memoryview) -> bool:
    """The fold of a ring whose records cannot be merged."""
    return False


Stamp = Callable[[bytearray, int], None]
"""stamp(slots, now_ns): told of slots that waited and are about to be written, to note how late they are."""


def one_each(slot: memoryview | bytearray) -> int:
    """The weight of a ring that counts slots."""
    return 1


def no_stamp(slots: bytearray, now_ns: int) -> None:
    """The stamp of a ring whose records do not carry their lateness."""


class Unit:
    """Slots of one key that wait together. `data` is mutable so that a later slot can be folded in."""

    __slots__ = ("data", "num_slots", "weight")

    def __init__(self, data: bytearray, num_slots: int, weight: int) -> None:
        self.data = data
        self.num_slots = num_slots
        self.weight = weight


class RingWriter:
    """The backlog that the three policies share, and the way out of it."""

    def __init__(
        self,
        producer: Producer,
        *,
        fold: Fold = never_folds,
        weigh: Weigh = one_each,
        stamp: Stamp = no_stamp,
    ) -> None:
        self.producer = producer
        self.pending_slots = 0
        self.pending_weight = 0
        self._fold = fold
        self._weigh = weigh
        self._stamp = stamp
        # The key that has waited longest first. An OrderedDict: a dict from whose front much was taken looks for it.
        self._backlog: OrderedDict[int, deque[Unit]] = OrderedDict()

    @property
    def is_starved(self) -> bool:
        """True while something waits for credits: only then does the credit descriptor belong in a poll set."""
        return bool(self._backlog)

    @property
    def pending_keys(self) -> list[int]:
        return list(self._backlog)

    def pending_of(self, key: int) -> int:
        """Weight that `key` has waiting."""
        return sum(unit.weight for unit in self._backlog.get(key, ()))

    def heaviest(self, count: int) -> list[int]:
        """The `count` keys with the most weight waiting, heaviest first."""
        return sorted(self._backlog, key=self.pending_of, reverse=True)[:count]

    def write(self, records: memoryview, keys: Sequence[int]) -> list[int]:
        """Write one slot for each of `keys`; what does not fit meets the policy. Returns the keys that were dropped by it."""
        if not self._backlog and self.producer.try_write(records, len(keys)):
            return []
        return self._write_crowded(records, keys)

    def _write_crowded(self, records: memoryview, keys: Sequence[int]) -> list[int]:
        self.flush()
        self._make_room(len(keys))
        size = self.producer.slot_size
        room = self.producer.free(len(keys))
        passed: list[memoryview] = []
        dropped: list[int] = []
        for i, key in enumerate(keys):
            slot = records[i * size : (i + 1) * size]
            if room > 0 and key not in self._backlog and key not in dropped:
                passed.append(slot)
                room -= 1
            elif not self._overflow(key, slot) and key not in dropped:
                dropped.append(key)
        if passed:
            written = self.producer.try_write(b"".join(passed), len(passed))
            assert written, "free slots do not vanish: the producer is their only taker"
        self._show()
        return dropped

    def _make_room(self, num_slots: int) -> None:
        """Overridden by the policy that waits."""

    def _overflow(self, key: int, slot: memoryview) -> bool:
        """A slot found no room: True if it waits now, False if it is gone."""
        raise NotImplementedError

    def try_unit(self, records: bytes | memoryview, num_slots: int) -> bool:
        """Write a unit if there is room now and nobody waits; False otherwise, with nothing kept."""
        if self._backlog:
            self.flush()
            if self._backlog:
                return False
        return self.producer.try_write(records, num_slots)

    def keep(self, key: int, unit: bytes) -> None:
        """Write a unit (whole slots) now, or when credits come: it is never dropped. The caller bounds how many such units there can be."""
        num_slots = len(unit) // self.producer.slot_size
        if not self._backlog and self.producer.try_write(unit, num_slots):
            return
        self._append(key, bytearray(unit), num_slots)
        self.flush()  # in its turn: credits that came meanwhile belong to those who waited longer
        self._show()

    def cancel(self, key: int) -> int:
        """Forget what `key` has waiting; the number of slots. They count as coalesced (into nothing)."""
        units = self._backlog.pop(key, None)
        if units is None:
            return 0
        slots = sum(unit.num_slots for unit in units)
        self.pending_slots -= slots
        self.pending_weight -= sum(unit.weight for unit in units)
        self.producer.count(L.W_COALESCED, slots)
        self._show()
        return slots

    def refuse(self) -> None:
        """Count one unit that was given back to the caller."""
        self.producer.count(L.W_REFUSED, 1)

    def flush(self) -> int:
        """Write what waits, oldest key first, as far as credits go, in one publish; the number of slots written."""
        if not self._backlog:
            return 0
        room = self.producer.free(self.pending_slots)
        out: list[bytearray] = []
        num_slots = 0
        now_ns = time.monotonic_ns()
        while self._backlog:
            key = next(iter(self._backlog))
            units = self._backlog[key]
            while units and units[0].num_slots <= room:
                unit = units.popleft()
                room -= unit.num_slots
                num_slots += unit.num_slots
                self.pending_weight -= unit.weight
                self._stamp(unit.data, now_ns)
                out.append(unit.data)
            if units:
                break
            del self._backlog[key]
        if num_slots:
            written = self.producer.try_write(b"".join(out), num_slots)
            assert written, "free slots do not vanish: the producer is their only taker"
            self.pending_slots -= num_slots
            self._show()
        return num_slots

    def _append(self, key: int, data: bytearray, num_slots: int) -> None:
        size = self.producer.slot_size
        # A unit larger than the ring would block every key behind it for ever.
        assert 0 < num_slots <= self.producer.capacity, (num_slots, self.producer.capacity)
        whole = memoryview(data)
        weight = sum(self._weigh(whole[i * size : (i + 1) * size]) for i in range(num_slots))
        self._backlog.setdefault(key, deque()).append(Unit(data, num_slots, weight))
        self.pending_slots += num_slots
        self.pending_weight += weight

    def _show(self) -> None:
        self.producer.set_gauge(L.W_PENDING, self.pending_slots)


class Coalescing(RingWriter):
    """A slot without room is folded into its key's last pending slot, or waits behind it. Lossless; never waits.

    Unbounded by itself: the caller pauses the sources of the heaviest keys when `pending_weight` passes its limit.
    """

    def _overflow(self, key: int, slot: memoryview) -> bool:
        units = self._backlog.get(key)
        if units and units[-1].num_slots == 1 and self._fold(units[-1].data, slot):
            weight = self._weigh(slot)
            units[-1].weight += weight
            self.pending_weight += weight
            self.producer.count(L.W_COALESCED, 1)
        else:
            self._append(key, bytearray(slot), 1)
        return True


class Blocking(Coalescing):
    """The producer waits for room up to `deadline_s`, then coalesces what still does not fit.

    `wait_credits(timeout_s)` sleeps until the credit counter is not zero.
    """

    def __init__(
        self,
        producer: Producer,
        *,
        wait_credits: Callable[[float], bool],
        deadline_s: float,
        fold: Fold = never_folds,
        weigh: Weigh = one_each,
        stamp: Stamp = no_stamp,
    ) -> None:
        super().__init__(producer, fold=fold, weigh=weigh, stamp=stamp)
        self._wait_credits = wait_credits
        self._deadline_s = deadline_s

    def _make_room(self, num_slots: int) -> None:
        # A batch larger than the ring can never fit whole: what is over goes the way of coalescing.
        wanted = min(num_slots, self.producer.capacity)
        begin = time.monotonic_ns()
        end = begin + int(self._deadline_s * 1e9)
        now = begin
        while self._backlog or self.producer.free(wanted) < wanted:
            if now >= end or not self._wait_credits((end - now) / 1e9):
                break
            self.flush()
            now = time.monotonic_ns()
        self.producer.count(L.W_BLOCKED_NS, time.monotonic_ns() - begin)


class Dropping(RingWriter):
    """A slot without room is thrown away and counted. What the caller must not lose goes through `keep`."""

    def _overflow(self, key: int, slot: memoryview) -> bool:
        self.producer.count(L.W_DROPPED, 1)
        return False
