"""What the other processes of these tests do. Run as `actors.py NAME ARGS...`; each says what it has done, one line at a time.

An actor stays until it is told or killed: the test, not a timer, decides when it ends.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from shmserve.rings import layout as L
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, Ring, RingShape
from shmserve.rings.segment import Segment, SegmentError


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def stay() -> None:
    """Wait to be told, or for the end of the test."""
    sys.stdin.readline()


def batch(first: int, count: int) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in range(first, first + count))


def ring_of(name: str, fds: str) -> Ring:
    return Ring.from_fds(name, 1, [int(fd) for fd in fds.split(",")])


def claim_role(name: str, fds: str, role: str) -> None:
    """Take a role of an inherited ring; say whether it was given."""
    ring = ring_of(name, fds)
    try:
        end = ring.producer() if role == "producer" else ring.consumer()
    except SegmentError as error:
        say({"errno": error.errno, "text": str(error)})
    else:
        say({"capacity": end.capacity})
    stay()


def hold(name: str, fd: str) -> None:
    """Hold an inherited segment, as any child of an instance does."""
    Segment.from_fd(name, int(fd))
    say("holding")
    stay()


def hold_through_a_child(name: str, fd: str) -> None:
    """Pass the segment on to a grandchild and end; the grandchild holds it."""
    if os.fork() == 0:
        hold(name, fd)
        os._exit(0)
    os._exit(0)


def own(*segments: str) -> None:
    """Create segments NAME:whole or NAME:unfinished and live as their owner."""
    made = []
    for spec in segments:
        name, _, kind = spec.partition(":")
        segment = Segment.create(name, 4096)
        if kind == "whole":
            segment.words()[L.W_MAGIC] = L.MAGIC
        made.append(segment)
    say("owning")
    stay()


def own_channel(instance: str, epoch: str) -> None:
    """Create a channel and live as its supervisor."""
    channel = Channel.create(instance, int(epoch), 0, 0, RingShape(64, 4), RingShape(8, 8))
    say(channel.names(instance, int(epoch), 0, 0))
    stay()


def write_readonly(name: str, how: str) -> None:
    """Attach read-only and try to write all the same; say what the kernel answered (or die of it)."""
    segment = Segment.attach_readonly(name)
    if how == "map":
        try:
            mmap.mmap(segment.fd, segment.num_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except PermissionError as error:
            say(errno.errorcode[error.errno])
    elif how == "write":
        try:
            os.pwrite(segment.fd, b"x", 0)
        except OSError as error:
            say(errno.errorcode[error.errno])
    else:
        address = np.frombuffer(segment.mapping, np.uint8).ctypes.data
        if how == "mprotect":
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            answer = libc.mprotect(address, segment.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
            say([answer, errno.errorcode[ctypes.get_errno()]])
        else:
            say("storing")
            ctypes.memset(address, 0xFF, 1)
            say("stored")


def small_shm(instance: str, num_bytes: str) -> None:
    """In a /dev/shm of `num_bytes`: ask for more, then take all there is, fill the rest, and write every slot."""
    free = int(num_bytes)
    try:
        Channel.create(instance, 1, 0, 0, RingShape(4096, 2), RingShape(128, free // 128))
    except SegmentError as error:
        say({"errno": error.errno, "text": str(error), "left": os.listdir("/dev/shm")})
    ring = Ring.create(f"/shmserve.{instance}.1.0-0.tokens", RingShape(128, 64), 1)
    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError as error:
            say({"filled": errno.errorcode[error.errno]})
    producer = ring.producer()
    for n in range(64):
        assert producer.try_write(bytes([n]) * 128, 1)
    say({"written": producer.write_cursor, "depth": ring.consumer().poll()})
    ring.segment.unlink()


def produce_and_stop_between(name: str, fds: str, whole: str, torn: str) -> None:
    """Write `whole` slots, then stop in the middle of copying `torn` more: after claim_cursor, before write_cursor."""
    ring = ring_of(name, fds)
    producer = ring.producer()
    assert producer.try_write(batch(0, int(whole)), int(whole))

    class Stopping:
        """Copies the first half of a batch, and no more."""

        def __init__(self, slots: memoryview) -> None:
            self.slots = slots

        def __setitem__(self, where: slice, data: bytes) -> None:
            half = len(data) // 2
            self.slots[where.start : where.start + half] = data[:half]
            say("torn")
            signal.pause()

    producer._slots = Stopping(producer._slots)  # type: ignore[assignment]
    producer.try_write(batch(int(whole), int(torn)), int(torn))


def produce_forever(name: str, fds: str) -> None:
    """Write numbers as fast as credits come."""
    ring = ring_of(name, fds)
    producer = ring.producer()
    say("producing")
    first = 0
    while True:
        if producer.try_write(batch(first, 3), 3):
            first += 3
        else:
            ring.wait_credits(10.0)


def consume(name: str, fds: str, count: str) -> None:
    """Handle `count` slots, say them, then take the next ones without handling them, and stay."""
    ring = ring_of(name, fds)
    consumer = ring.consumer()
    while consumer.poll() < int(count):
        os.sched_yield()
    got = []
    for _ in range(int(count)):
        got.append(int.from_bytes(consumer.view(1), "little"))
        consumer.release(1)
    say(got)
    stay()
    consumer.poll()
    say(consumer.owed)
    stay()


def join_channel(instance: str, epoch: str, sock_fd: str) -> None:
    """Receive a channel over a socket, be its front end: submit two requests, read tokens until 5 came."""
    with socket.socket(fileno=int(sock_fd)) as sock:
        _, fds, _, _ = socket.recv_fds(sock, 1, 6)
        channel = Channel.from_fds(instance, int(epoch), 0, 0, fds)
        submit, tokens = channel.submit.producer(), channel.tokens.consumer()
        assert submit.try_write(bytes([1]) * 64 + bytes([2]) * 64, 2)
        sock.send(b"s")
        sock.recv(1)
        tokens.poll()
        say(tokens.view(8).hex())
        tokens.release(tokens.owed)
        channel.close()
        sock.send(b"r")


def write_board(name: str, fd: str) -> None:
    """Be the process of a board: count and observe."""
    board = Board(Segment.from_fd(name, int(fd)))
    board["steps"] = 7
    board.add("steps", 2)
    board.histograms["step_us"].observe(np.array([5, 10, 11, 1000]))
    say("written")
    stay()


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "actors.py"
    globals()[sys.argv[1]](*sys.argv[2:])
