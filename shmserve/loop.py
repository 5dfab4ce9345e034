"""The supervisor's event loop: descriptors, timers and signals, in one thread that sleeps until one of them is due.

Owns: the selector, the timer heap, the signal dispositions while it lives. Never: polls. A callback runs to its end before
the next; what it raises ends `turn`.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from types import FrameType
from typing import Protocol

Callback = Callable[[], None]


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Loop:
    """`turn` waits for the next event and runs everything that is due."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callback]] = []
        self._order = count()  # timers of one moment run in the order they were set
        self._wake_fd, self._signal_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_signal: dict[int, Callback] = {}
        self.add(self._wake_fd, self._take_signals)

    def add(self, source: int | HasFileno, on_readable: Callback) -> None:
        """Call `on_readable` while `source` has something to read, or is at its end."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def remove(self, source: int | HasFileno) -> None:
        """Forget `source`; it must still be open."""
        self._selector.unregister(source)

    def after(self, seconds: float, callback: Callback) -> None:
        """Call `callback` once, `seconds` from now. There is no cancelling: a callback looks whether it is still wanted."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), callback))

    def watch_signals(self, actions: Mapping[signal.Signals, Callback]) -> None:
        """From now on these signals do nothing but call their action from `turn`. Main thread only.

        A signal that was ignored when the process started (nohup) stays ignored.
        """
        self._on_signal = {int(number): action for number, action in actions.items()}
        signal.set_wakeup_fd(self._signal_fd, warn_on_full_buffer=False)
        for number in actions:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _leave_it_to_the_pipe)

    def turn(self) -> None:
        """Sleep until something is due; run it."""
        timeout = None
        if self._timers:
            timeout = max(0.0, self._timers[0][0] - time.monotonic())
        for key, _ in self._selector.select(timeout):
            # An earlier callback of this turn may have closed this source.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _take_signals(self) -> None:
        for number in os.read(self._wake_fd, 4096):  # a byte a signal: two SIGTERM are two calls
            action = self._on_signal.get(number)
            if action is not None:
                action()

    def close(self) -> None:
        """Close; signals that were watched are ignored from now on, so that a late one cannot break the tidying up."""
        if self._on_signal:
            ignore_signals(n for n in self._on_signal if n != signal.SIGCHLD)
            signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._wake_fd)
        os.close(self._signal_fd)


def _leave_it_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """Does nothing: set_wakeup_fd has already written the number."""


def ignore_signals(numbers: Iterable[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def exit_on_signals(numbers: Iterable[int]) -> None:
    """Until `watch_signals`, the first of these signals raises SystemExit(128 + number) in the main thread, later ones nothing.

    For the time before the loop turns, when one long call runs that must be left at once and cleanly.
    """
    watched = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        ignore_signals(watched)
        raise SystemExit(128 + number)

    for number in watched:
        signal.signal(number, leave)
