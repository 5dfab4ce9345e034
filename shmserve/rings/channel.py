"""A channel: one submit ring and one token ring between one front end and one worker, with their four counters.

Owns: the two segments and the order of the six descriptors that travel over the control link. Never: knows what a slot says.
Created by the supervisor, which holds no end of it; each child builds its ends from the descriptors it was sent and takes
the role locks on them.

    front end  --submit-->  worker          submit: data signalled by the front end, credits by the worker
    front end  <--tokens--  worker          tokens: data signalled by the worker, credits by the front end
"""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shmserve.rings import layout as L
from shmserve.rings.segment import Segment, SegmentError
from shmserve.rings.spsc import Consumer, Producer
from shmserve.rings.wakeup import Counter


@dataclass(frozen=True, slots=True)
class RingShape:
    """slot_size in bytes; capacity in slots, a power of two."""

    slot_size: int
    capacity: int


class Ring:
    """One segment with its data and credit counters; gives at most one producer and one consumer per host."""

    def __init__(self, segment: Segment, data: Counter, credits: Counter) -> None:
        self.segment = segment
        self.data = data
        self.credits = credits
        self._words = segment.words()
        if self._words[L.W_MAGIC] != L.MAGIC or self._words[L.W_VERSION] != L.VERSION:
            raise SegmentError(
                errno.EPROTO,
                f"shared memory {segment.name} is not a ring of layout version {L.VERSION}",
            )
        self.slot_size = self._words[L.W_SLOT_SIZE]
        self.capacity = self._words[L.W_CAPACITY]
        self.epoch = self._words[L.W_EPOCH]
        if L.ring_bytes(self.slot_size, self.capacity) != segment.num_bytes:
            raise SegmentError(errno.EPROTO, f"shared memory {segment.name} has the wrong size")
        self._slots = segment.bytes_view(L.HEADER_BYTES, segment.num_bytes)

    @classmethod
    def create(cls, name: str, shape: RingShape, epoch: int) -> Ring:
        """Make the segment `name` and its counters. Raises SegmentError (name taken, no room)."""
        segment = Segment.create(name, L.ring_bytes(shape.slot_size, shape.capacity))
        words = segment.words()
        words[L.W_VERSION] = L.VERSION
        words[L.W_EPOCH] = epoch
        words[L.W_SLOT_SIZE] = shape.slot_size
        words[L.W_CAPACITY] = shape.capacity
        words[L.W_CREATED_NS] = time.monotonic_ns()
        words[L.W_MAGIC] = L.MAGIC  # last: the segment is whole
        return cls(segment, Counter.create(), Counter.create())

    def producer(self) -> Producer:
        """The writing end. Raises SegmentError if anybody, this process included, has it."""
        self._claim(L.LOCK_PRODUCER, "producer")
        return Producer(self._words, self._slots, self.slot_size, self.data.add, self.credits.take)

    def consumer(self) -> Consumer:
        """The reading end. Raises SegmentError if anybody, this process included, has it."""
        self._claim(L.LOCK_CONSUMER, "consumer")
        return Consumer(self._words, self._slots, self.slot_size, self.data.take, self.credits.add)

    def _claim(self, byte: int, role: str) -> None:
        if not self.segment.claim(byte):
            raise SegmentError(
                errno.EBUSY, f"the {role} end of {self.segment.name} is taken by another process"
            )

    def wait_credits(self, timeout_s: float) -> bool:
        """Sleep until credits have been given back or `timeout_s` is over; True if there are some. Takes none."""
        poll = select.poll()
        poll.register(self.credits.fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def fds(self) -> list[int]:
        return [self.segment.fd, self.data.fd, self.credits.fd]

    def close(self) -> None:
        self.segment.close()
        self.data.close()
        self.credits.close()


class Channel:
    """Two rings. `http` and `worker` are the indices of the pair, `epoch` the life of the channel."""

    def __init__(self, http: int, worker: int, epoch: int, submit: Ring, tokens: Ring) -> None:
        self.http = http
        self.worker = worker
        self.epoch = epoch
        self.submit = submit
        self.tokens = tokens

    @staticmethod
    def names(instance: str, epoch: int, http: int, worker: int) -> tuple[str, str]:
        """Segment names of the submit and the token ring."""
        stem = f"/shmserve.{instance}.{epoch}.{http}-{worker}"
        return f"{stem}.submit", f"{stem}.tokens"

    @classmethod
    def create(
        cls, instance: str, epoch: int, http: int, worker: int, submit: RingShape, tokens: RingShape
    ) -> Channel:
        """Make both rings, or none. Supervisor only."""
        submit_name, tokens_name = cls.names(instance, epoch, http, worker)
        first = Ring.create(submit_name, submit, epoch)
        try:
            second = Ring.create(tokens_name, tokens, epoch)
        except BaseException:
            first.close()
            first.segment.unlink()
            raise
        return cls(http, worker, epoch, first, second)

    @classmethod
    def from_fds(
        cls, instance: str, epoch: int, http: int, worker: int, fds: Sequence[int]
    ) -> Channel:
        """Build the channel from the six descriptors of `fds()`, in its order; takes them over. Children only."""
        submit_name, tokens_name = cls.names(instance, epoch, http, worker)
        submit = Ring(Segment.from_fd(submit_name, fds[0]), Counter(fds[1]), Counter(fds[2]))
        tokens = Ring(Segment.from_fd(tokens_name, fds[3]), Counter(fds[4]), Counter(fds[5]))
        return cls(http, worker, epoch, submit, tokens)

    def fds(self) -> list[int]:
        """The six descriptors, in the order that `from_fds` takes."""
        return self.submit.fds() + self.tokens.fds()

    def unlink(self) -> None:
        """Remove both names; who has the rings mapped goes on."""
        self.submit.segment.unlink()
        self.tokens.segment.unlink()

    def close(self) -> None:
        """Unmap both rings and close their descriptors. Views of slots must be gone."""
        self.submit.close()
        self.tokens.close()
