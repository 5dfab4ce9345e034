"""One instance, attached to read-only: every board and ring of it, as they come and go.

Owns: the attached segments of one observer. Never: computes (`top.py` does), writes, asks a process anything, or needs one to run: who
is stopped is seen as it stands. Commands only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from shmserve.recording import board_place
from shmserve.rings.board import BoardReader, HistogramReading
from shmserve.rings.layout import LOCK_OWNER
from shmserve.rings.observe import RingStats, RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError, is_locked


class EndedError(RuntimeError):
    """The instance is gone; the text says how."""


@dataclass(frozen=True, slots=True)
class BoardLook:
    """One board at one moment."""

    role: str
    index: int
    epoch: int
    words: dict[str, int]
    histograms: dict[str, HistogramReading]
    slow_clients: list[dict[str, int]]


@dataclass(frozen=True, slots=True)
class Look:
    """All segments at one moment (CLOCK_MONOTONIC), by name."""

    at_ns: int
    boards: dict[str, BoardLook]
    rings: dict[str, RingStats]


class Watch:
    """Attached to every segment of `instance`, read-only; `look` follows segments that come and go. One thread."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self._boards: dict[str, BoardReader] = {}
        self._rings: dict[str, RingView] = {}

    def look(self) -> Look:
        """Look at all that is there now. Raises EndedError if nothing is, or nobody who holds it."""
        self._follow()
        held = [reader.segment.fd for reader in self._boards.values()]
        held += [view.segment.fd for view in self._rings.values()]
        if not held:
            raise EndedError(f"instance {self.instance} has ended")
        if not any(is_locked(fd, LOCK_OWNER) for fd in held):
            raise EndedError(
                f"instance {self.instance} was killed; its rings are left: shmserve dump --instance {self.instance}"
            )
        boards = {}
        for name, reader in self._boards.items():
            epoch, role, index = board_place(name)
            boards[name] = BoardLook(
                role,
                index,
                epoch,
                reader.words(),
                reader.histograms(),
                reader.roster("slow_clients"),
            )
        rings = {name: view.stats() for name, view in self._rings.items()}
        return Look(time.monotonic_ns(), boards, rings)

    def _follow(self) -> None:
        """Attach what is new, let go of what is gone. A successor's segments have names of their own, those of an instance that was
        restarted may have the old ones."""
        boards, rings = set(boards_of(self.instance)), set(rings_of(self.instance))
        for gone in [name for name, one in self._boards.items() if not one.segment.is_named()]:
            self._boards.pop(gone).close()
        for gone in [name for name, one in self._rings.items() if not one.segment.is_named()]:
            self._rings.pop(gone).close()
        for name in sorted(boards - self._boards.keys()):
            try:
                self._boards[name] = BoardReader.attach(name)
            except SegmentError:
                continue  # about to be made, or removed since: the next look tells
        for name in sorted(rings - self._rings.keys()):
            try:
                self._rings[name] = RingView(name)
            except SegmentError:
                continue

    def close(self) -> None:
        for reader in self._boards.values():
            reader.close()
        for view in self._rings.values():
            view.close()
        self._boards.clear()
        self._rings.clear()
