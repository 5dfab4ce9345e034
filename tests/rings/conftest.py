"""Rings to test: bare ones over plain memory for steps and orders, real ones under a name of their own, and other processes.

Every test that asks for `instance` proves on the way that nothing of it is left in /dev/shm.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmserve
from shmserve.rings import layout as L
from shmserve.rings.segment import names, unlink
from shmserve.rings.spsc import Consumer, Producer

ACTORS = Path(__file__).with_name("actors.py")
ROOT = Path(shmserve.__file__).parents[1]
_numbers = itertools.count()


class Tally:
    """A hand-over counter in plain memory that remembers how often it was read."""

    def __init__(self) -> None:
        self.value = 0
        self.num_takes = 0

    def add(self, count: int) -> None:
        self.value += count

    def take(self) -> int:
        self.num_takes += 1
        taken, self.value = self.value, 0
        return taken


class BareRing:
    """Both ends of a ring over one bytearray. `start` is where both cursors stand at the beginning."""

    def __init__(self, capacity: int, slot_size: int = 8, start: int = 0) -> None:
        self.capacity = capacity
        self.slot_size = slot_size
        self.memory = bytearray(L.ring_bytes(slot_size, capacity))
        self.words = memoryview(self.memory).cast("Q")
        self.slots = memoryview(self.memory)[L.HEADER_BYTES :]
        for word in (L.W_CLAIM_CURSOR, L.W_WRITE_CURSOR, L.W_READ_CURSOR):
            self.words[word] = start
        self.data = Tally()
        self.credits = Tally()
        self.producer = Producer(
            self.words, self.slots, slot_size, self.data.add, self.credits.take
        )
        self.consumer = Consumer(
            self.words, self.slots, slot_size, self.data.take, self.credits.add
        )

    def read(self, most: int | None = None) -> list[bytes]:
        """Poll, copy and release up to `most` slots (all that are owed by default)."""
        left = self.consumer.poll()
        left = left if most is None else min(left, most)
        out: list[bytes] = []
        while left:
            view = self.consumer.view(left)
            num = len(view) // self.slot_size
            out += [bytes(view[i * self.slot_size : (i + 1) * self.slot_size]) for i in range(num)]
            self.consumer.release(num)
            left -= num
        return out


@pytest.fixture
def bare_ring() -> type[BareRing]:
    return BareRing


@pytest.fixture
def instance() -> Iterator[str]:
    """An instance name that nobody else has; fails the test that leaves a segment of it behind."""
    name = f"test{os.getpid()}-{next(_numbers)}"
    yield name
    left = names(f"shmserve.{name}")
    for segment in left:
        unlink(segment)
    assert left == []


class Actor(subprocess.Popen[str]):
    """A child process that says one line at a time and is told one line at a time."""

    def hear(self) -> str:
        assert self.stdout is not None
        line = self.stdout.readline()
        assert line, f"the actor ended: {self.wait()}"
        return line.strip()

    def tell(self, line: str) -> None:
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()


@pytest.fixture
def act() -> Iterator[Callable[..., Actor]]:
    """Start `actors.py NAME ARGS...` with the descriptors `pass_fds`; killed at the end of the test if still there."""
    started: list[Actor] = []

    def start(name: str, *args: object, pass_fds: tuple[int, ...] | list[int] = ()) -> Actor:
        actor = Actor(
            [sys.executable, str(ACTORS), name, *map(str, args)],
            pass_fds=pass_fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(actor)
        return actor

    yield start
    for actor in started:
        with actor:  # closes the pipes and waits
            actor.kill()


@pytest.fixture
def num_fds() -> Callable[[], int]:
    """Counts the open descriptors of this process, without those that only wait for the garbage collector."""

    def count() -> int:
        gc.collect()  # else what earlier tests left behind is closed between two counts
        return len(os.listdir("/proc/self/fd"))

    return count
