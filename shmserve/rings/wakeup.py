"""An eventfd as a counter that is handed from one side of a ring to the other.

Owns: the descriptor. Never: blocks, spins, or counts anything twice.

add(n)   adds n to the counter       pairs with   take()   reads the counter and sets it to 0, in one step of the kernel

The kernel's lock inside eventfd orders everything stored before `add` before everything loaded after the `take` that
returns it, on every CPU: this is the hand-over, and no flag or fence stands beside it.
"""

from __future__ import annotations

import os


class RingProtocolError(RuntimeError):
    """The peer's counter says what cannot be: the channel must be closed."""


class Counter:
    """One direction of a ring's traffic: slots written (data) or slots given back (credits)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Counter:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def add(self, count: int) -> None:
        """Add `count` and wake whoever polls the descriptor.

        The counter holds 2**64 - 2: only a peer that writes to its own side of it can fill it (RingProtocolError).
        """
        try:
            os.eventfd_write(self.fd, count)
        except BlockingIOError:
            raise RingProtocolError("the peer has filled its own counter") from None

    def take(self) -> int:
        """What was added since the last take; 0 if nothing."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.fd)
