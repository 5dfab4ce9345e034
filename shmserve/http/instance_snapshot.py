"""One look at the whole instance: every board and every ring, each process once, and what children that are gone had counted.

Owns: the way from names in /dev/shm to numbers. Never: keeps a segment open, writes, or knows a metric. Any thread.

A process that dies while it is looked at is either still here or already in the ledger, never both and never neither: the look is
repeated until the ledger did not change meanwhile (`shmserve/ledger.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from shmserve.rings.board import BoardReader, HistogramReading
from shmserve.rings.observe import RingStats, RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError

MOST_LOOKS: Final = 5
"""A ledger that changes at every look is not waited for: the numbers are then as of slightly different moments."""
LOOK_AGAIN_S: Final = 0.002

SUPERVISOR: Final = "supervisor0"
_VERSION: Final = "ledger_version"


@dataclass(frozen=True, slots=True)
class Process:
    """What one process shows: `name` is worker0, http0, supervisor0."""

    name: str
    epoch: int
    words: dict[str, int]
    histograms: dict[str, HistogramReading]

    @property
    def role(self) -> str:
        return self.name.rstrip("0123456789")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The instance at one moment, as nearly as can be. `rings` by name, http0-worker0.tokens."""

    processes: dict[str, Process]
    rings: dict[str, RingStats]
    taken_ns: int

    def of_role(self, role: str) -> list[Process]:
        return [process for process in self.processes.values() if process.role == role]

    def sum(self, role: str, word: str) -> int:
        """Of a counter, over all that live and all that are gone; of a gauge, over all that live."""
        supervisor = self.processes.get(SUPERVISOR)
        past = supervisor.words.get(f"past_{role}_{word}", 0) if supervisor is not None else 0
        return past + sum(process.words.get(word, 0) for process in self.of_role(role))

    def histogram(self, role: str, name: str) -> HistogramReading | None:
        """Over all that live and all that are gone; None if no process shows it."""
        readings = [p.histograms[name] for p in self.of_role(role) if name in p.histograms]
        supervisor = self.processes.get(SUPERVISOR)
        if supervisor is not None and f"past_{role}_{name}" in supervisor.histograms:
            readings.append(supervisor.histograms[f"past_{role}_{name}"])
        if not readings:
            return None
        return HistogramReading(
            readings[0].bounds,
            tuple(sum(counts) for counts in zip(*(r.counts for r in readings), strict=True)),
            sum(reading.count for reading in readings),
            sum(reading.sum for reading in readings),
        )


def take_snapshot(instance: str) -> Snapshot:
    """Look at everything. A few milliseconds: off the event loop."""
    names = boards_of(instance)
    supervisors = [name for name in names if name.endswith(f".{SUPERVISOR}.board")]
    ledger = _attached(BoardReader.attach, supervisors[-1]) if supervisors else None
    if ledger is None:  # it is about to end, or a front end is tested alone
        return _look(instance)
    try:
        for _ in range(MOST_LOOKS):
            version = ledger.get(_VERSION)
            look = _look(instance)
            if version % 2 == 0 and version == ledger.get(_VERSION):
                break
            time.sleep(LOOK_AGAIN_S)
        return look
    finally:
        ledger.close()


def _look(instance: str) -> Snapshot:
    processes: dict[str, Process] = {}
    for name in boards_of(instance):
        reader = _attached(BoardReader.attach, name)
        if reader is None:
            continue
        short = name.rsplit(".", 2)[1]
        found = Process(short, reader.epoch, reader.words(), reader.histograms())
        reader.close()
        former = processes.get(short)
        if former is None or former.epoch < found.epoch:  # a successor's board is the newer one
            processes[short] = found
    return Snapshot(processes, _rings(rings_of(instance)), time.monotonic_ns())


def _rings(names: Iterable[str]) -> dict[str, RingStats]:
    rings: dict[str, RingStats] = {}
    for name in names:
        view = _attached(RingView, name)
        if view is None:
            continue
        stats = view.stats()
        view.close()
        pair, kind = name.rsplit(".", 2)[1:]
        http, _, worker = pair.partition("-")
        short = f"http{http}-worker{worker}.{kind}"
        if short not in rings or rings[short].epoch < stats.epoch:
            rings[short] = stats
    return rings


_View = TypeVar("_View")


def _attached(attach: Callable[[str], _View], name: str) -> _View | None:
    try:
        return attach(name)
    except SegmentError:
        return None  # it was removed since the listing, or its writer damaged it: nobody's numbers
