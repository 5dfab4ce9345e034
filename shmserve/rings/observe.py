"""Looking at rings from outside: depth, counters, liveness, last records. Read-only, by name, in any process.

Owns: nothing. Never: writes, takes a role lock, or makes either side slower. What it reads is a concurrent snapshot and
should be taken as an indication; `depth` re-reads until the two cursors agree and is clamped to the capacity.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from shmserve.rings import layout as L
from shmserve.rings.segment import Segment, SegmentError, is_locked, names

_MOST_REREADS = 8


@dataclass(frozen=True, slots=True)
class RingStats:
    """One look at a ring. Counters are since its creation; cursors count slots."""

    name: str
    epoch: int
    slot_size: int
    capacity: int
    depth: int
    producer: dict[str, int]
    consumer: dict[str, int]
    has_producer: bool
    has_consumer: bool
    num_torn: int  # slots whose copy had begun and not ended: after a death they are torn


@dataclass(frozen=True, slots=True)
class RingCopy:
    """What a ring said and held at one moment: its words, and the whole slots from `first` to the write cursor.

    `has_producer` is as of before the copy: without one, the slots between the cursors of `num_torn` will never be whole.
    """

    name: str
    epoch: int
    slot_size: int
    capacity: int
    words: dict[str, int]  # the producer's and the consumer's, by name
    has_producer: bool
    has_consumer: bool
    first: int
    slots: bytes

    @property
    def num_slots(self) -> int:
        return len(self.slots) // self.slot_size

    @property
    def num_torn(self) -> int:
        """Slots whose copy had begun and not ended."""
        torn = self.words["claim_cursor"] - self.words["write_cursor"]
        return min(max(0, torn), self.capacity)

    def slot(self, index: int) -> bytes:
        """Slot `first + index`."""
        return self.slots[index * self.slot_size : (index + 1) * self.slot_size]


class RingView:
    """A ring attached read-only."""

    def __init__(self, name: str) -> None:
        self.segment = Segment.attach_readonly(name)
        try:
            self._words = self.segment.words()
            fault = L.header_fault(self._words, self.segment.num_bytes)
            if fault:
                raise SegmentError(errno.EPROTO, f"shared memory {name} {fault}")
            self.slot_size = self._words[L.W_SLOT_SIZE]
            self.capacity = self._words[L.W_CAPACITY]
        except BaseException:
            self.segment.close()
            raise

    def depth(self) -> int:
        """Slots written and not yet handled: read_cursor, write_cursor, read_cursor until stable, clamped. An indication."""
        words = self._words
        read = words[L.W_READ_CURSOR]
        written = read
        for _ in range(_MOST_REREADS):
            written = words[L.W_WRITE_CURSOR]
            again = words[L.W_READ_CURSOR]
            if again == read:
                break
            read = again
        return max(0, min(self.capacity, written - read))

    def ends(self) -> tuple[bool, bool]:
        """Whether there is a producer, and a consumer."""
        fd = self.segment.fd
        return is_locked(fd, L.LOCK_PRODUCER), is_locked(fd, L.LOCK_CONSUMER)

    def stats(self) -> RingStats:
        words = self._words
        return RingStats(
            name=self.segment.name,
            epoch=words[L.W_EPOCH],
            slot_size=self.slot_size,
            capacity=self.capacity,
            depth=self.depth(),
            producer={name: words[index] for name, index in L.PRODUCER_WORDS.items()},
            consumer={name: words[index] for name, index in L.CONSUMER_WORDS.items()},
            has_producer=is_locked(self.segment.fd, L.LOCK_PRODUCER),
            has_consumer=is_locked(self.segment.fd, L.LOCK_CONSUMER),
            num_torn=max(0, words[L.W_CLAIM_CURSOR] - words[L.W_WRITE_CURSOR]),
        )

    def last(self, count: int) -> list[bytes]:
        """Copies of up to `count` of the newest whole slots, oldest first, handled or not: the ring is its own log.

        A slot that the producer overwrote during the copy is left out.
        """
        words = self._words
        written = words[L.W_WRITE_CURSOR]
        first = max(0, written - min(count, self.capacity))
        slots = []
        for cursor in range(first, written):
            at = L.HEADER_BYTES + (cursor & (self.capacity - 1)) * self.slot_size
            slots.append((cursor, self.segment.mapping[at : at + self.slot_size]))
        overwritten = words[L.W_CLAIM_CURSOR] - self.capacity
        return [slot for cursor, slot in slots if cursor >= overwritten]

    def copy(self) -> RingCopy:
        """All that the ring still holds, handled or not. A slot that the producer overwrote during the copy is left out."""
        words = self._words
        has_producer, has_consumer = self.ends()
        said = {**L.PRODUCER_WORDS, **L.CONSUMER_WORDS}
        # As they are before the copy: what is written meanwhile is the next look's.
        copied = {name: words[index] for name, index in said.items()}
        written = copied["write_cursor"]
        size, mapping = self.slot_size, self.segment.mapping
        first = max(0, written - self.capacity)
        at = L.HEADER_BYTES + (first & (self.capacity - 1)) * size
        end = L.HEADER_BYTES + (written & (self.capacity - 1)) * size
        if written - first < self.capacity:
            slots = mapping[at:end]  # it has not gone round yet
        else:
            slots = mapping[at:] + mapping[L.HEADER_BYTES : at]
        num_overwritten = max(0, words[L.W_CLAIM_CURSOR] - self.capacity - first)
        slots = slots[num_overwritten * size :]
        first = written - len(slots) // size
        return RingCopy(
            name=self.segment.name,
            epoch=words[L.W_EPOCH],
            slot_size=size,
            capacity=self.capacity,
            words=copied,
            has_producer=has_producer,
            has_consumer=has_consumer,
            first=first,
            slots=slots,
        )

    def close(self) -> None:
        self.segment.close()


def rings_of(instance: str) -> list[str]:
    """Names of the rings of `instance`, sorted."""
    return [n for n in names(f"shmserve.{instance}.") if n.endswith((".submit", ".tokens"))]


def boards_of(instance: str) -> list[str]:
    """Names of the boards of `instance`, sorted."""
    return [n for n in names(f"shmserve.{instance}.") if n.endswith(".board")]
