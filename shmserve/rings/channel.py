"""A channel: one submit ring and one token ring between one front end and one worker, with their four counters.

Owns: the two segments and the order of the six descriptors that travel over the control link. Never: knows what a slot says.
Created by the supervisor, which holds no end of it; each child builds its ends from the descriptors it was sent and takes
the role locks on them.

    front end  --submit-->  worker          submit: data signalled by the front end, credits by the worker
    front end  <--tokens--  worker          tokens: data signalled by the worker, credits by the front end
"""

from __future__ import annotations

import errno
import os
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
    """One segment with its data and credit counters; gives one producer and one consumer in its whole life."""

    def __init__(self, segment: Segment, data: Counter, credits: Counter) -> None:
        self.segment = segment
        self.data = data
        self.credits = credits
        self._words = segment.words()
        fault = L.header_fault(self._words, segment.num_bytes)
        if fault:
            raise SegmentError(errno.EPROTO, f"shared memory {segment.name} {fault}")
        self.slot_size = self._words[L.W_SLOT_SIZE]
        self.capacity = self._words[L.W_CAPACITY]
        self.epoch = self._words[L.W_EPOCH]
        self._slots = segment.bytes_view(L.HEADER_BYTES, segment.num_bytes)

    @classmethod
    def create(cls, name: str, shape: RingShape, epoch: int) -> Ring:
        """Make the segment `name` and its counters. Raises SegmentError (name taken, no room)."""
        segment = Segment.create(name, L.ring_bytes(shape.slot_size, shape.capacity))
        counters: list[Counter] = []
        try:
            counters.append(Counter.create())
            counters.append(Counter.create())
            words = segment.words()
            words[L.W_VERSION] = L.VERSION
            words[L.W_EPOCH] = epoch
            words[L.W_SLOT_SIZE] = shape.slot_size
            words[L.W_CAPACITY] = shape.capacity
            words[L.W_CREATED_NS] = time.monotonic_ns()
            words[L.W_MAGIC] = L.MAGIC  # last: the segment is whole
            return cls(segment, *counters)
        except BaseException:
            segment.unlink()
            segment.close()
            for counter in counters:
                counter.close()
            raise

    @classmethod
    def from_fds(cls, name: str, epoch: int, fds: Sequence[int]) -> Ring:
        """Build the ring from the three descriptors of `fds()`; takes them over, also when it raises SegmentError."""
        data, credits = Counter(fds[1]), Counter(fds[2])
        segment: Segment | None = None
        try:
            segment = Segment.from_fd(name, fds[0])
            ring = cls(segment, data, credits)
            if ring.epoch != epoch:
                raise SegmentError(
                    errno.EPROTO,
                    f"shared memory {name} is of epoch {ring.epoch}, the channel of epoch {epoch}",
                )
            return ring
        except BaseException:
            if segment is not None:
                segment.close()
            data.close()
            credits.close()
            raise

    def producer(self) -> Producer:
        """The writing end. Raises SegmentError if anybody, this process included, has it or ever wrote with it."""
        self._claim(L.LOCK_PRODUCER, "producer")
        words = self._words
        if words[L.W_PUBLISHES] or words[L.W_CLAIM_CURSOR] != words[L.W_WRITE_CURSOR]:
            raise self._used_up("producer")
        return Producer(self._words, self._slots, self.slot_size, self.data.add, self.credits.take)

    def consumer(self) -> Consumer:
        """The reading end. Raises SegmentError if anybody, this process included, has it or ever read with it."""
        self._claim(L.LOCK_CONSUMER, "consumer")
        if self._words[L.W_WAKEUPS]:
            raise self._used_up("consumer")
        return Consumer(self._words, self._slots, self.slot_size, self.data.take, self.credits.add)

    def _claim(self, byte: int, role: str) -> None:
        if not self.segment.claim(byte):
            raise SegmentError(
                errno.EBUSY, f"the {role} end of {self.segment.name} is taken by another process"
            )

    def _used_up(self, role: str) -> SegmentError:
        # What the dead end had taken from its counter died with it: a second life would overwrite or lose slots.
        return SegmentError(
            errno.ESTALE,
            f"{self.segment.name} has had a {role}: a new life needs a new channel (epoch + 1)",
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
            first.segment.unlink()
            first.close()
            raise
        return cls(http, worker, epoch, first, second)

    @classmethod
    def from_fds(
        cls, instance: str, epoch: int, http: int, worker: int, fds: Sequence[int]
    ) -> Channel:
        """Build the channel from the six descriptors of `fds()`, in its order. Children only.

        Takes them over, also when it raises SegmentError (a segment that is no ring, or of another epoch).
        """
        submit_name, tokens_name = cls.names(instance, epoch, http, worker)
        try:
            submit = Ring.from_fds(submit_name, epoch, fds[:3])
        except BaseException:
            for fd in fds[3:]:
                os.close(fd)
            raise
        try:
            tokens = Ring.from_fds(tokens_name, epoch, fds[3:])
        except BaseException:
            submit.close()
            raise
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
