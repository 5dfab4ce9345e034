"""The boards and rings of one instance, kept mapped between looks.

Owns: read-only mappings of what the instance has now, found by name. Never: writes, locks a role, or keeps the mapping of what is
gone for longer than one `refresh`. One thread at a time; any front end sees the same.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any, Final

from shmserve.boards import label_of
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError

_BOARD_NAME: Final = re.compile(r"\.(\d+)\.([a-z]+)(\d+)\.board$")
_RING_NAME: Final = re.compile(r"\.(\d+)\.(\d+)-(\d+)\.(submit|tokens)$")


@dataclass(slots=True)
class _Ring:
    """A ring, and the depths that were seen since the last snapshot."""

    view: RingView
    http: int
    worker: int
    kind: str
    depths: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Process:
    reader: BoardReader
    role: str
    index: int


class InstanceView:
    """`refresh` finds what is there; `look` notes the rings' depths, as often as one likes; `snapshot` tells all."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._processes: dict[str, _Process] = {}
        self._rings: dict[str, _Ring] = {}

    def refresh(self) -> None:
        """Map what is new and unmap what is gone."""
        boards, rings = set(boards_of(self._instance)), set(rings_of(self._instance))
        for name in self._processes.keys() - boards:
            self._processes.pop(name).reader.close()
        for name in self._rings.keys() - rings:
            self._rings.pop(name).view.close()
        for name in boards - self._processes.keys():
            if (match := _BOARD_NAME.search(name)) is not None:
                try:
                    reader = BoardReader.attach(name)
                except SegmentError:
                    continue  # it is being made, or went since the listing: the next look shows which
                self._processes[name] = _Process(reader, match[2], int(match[3]))
        for name in rings - self._rings.keys():
            if (match := _RING_NAME.search(name)) is not None:
                try:
                    view = RingView(name)
                except SegmentError:
                    continue
                self._rings[name] = _Ring(view, int(match[2]), int(match[3]), match[4])

    def look(self) -> None:
        """Note how deep each ring is now."""
        for ring in self._rings.values():
            ring.depths.append(ring.view.depth())

    def snapshot(self) -> dict[str, Any]:
        """What every process and ring shows, for JSON. Of a process that was replaced the newest board counts."""
        now_ns = time.monotonic_ns()
        newest: dict[tuple[str, int], _Process] = {}
        for process in self._processes.values():
            known = newest.get((process.role, process.index))
            if known is None or known.reader.epoch < process.reader.epoch:
                newest[process.role, process.index] = process
        return {
            "time_ms": now_ns / 1e6,
            "processes": [_told(newest[key], now_ns) for key in sorted(newest)],
            "rings": [_take(self._rings[name]) for name in sorted(self._rings)],
        }

    def close(self) -> None:
        for process in self._processes.values():
            process.reader.close()
        for ring in self._rings.values():
            ring.view.close()
        self._processes.clear()
        self._rings.clear()


def _told(process: _Process, now_ns: int) -> dict[str, Any]:
    words = process.reader.words()
    told: dict[str, Any] = {
        "role": process.role,
        "index": process.index,
        "epoch": process.reader.epoch,
        "heartbeat_age_ms": _age_ms(words["heartbeat_ns"], now_ns),
        "words": words,
        "histograms": {
            name: {"counts": reading.counts, "count": reading.count, "sum": reading.sum}
            for name, reading in process.reader.histograms().items()
        },
    }
    if "phase" in words:
        told["phase"] = label_of(words["phase"])
        told["phase_age_ms"] = _age_ms(words["phase_since_ns"], now_ns)
    return told


def _age_ms(then_ns: int, now_ns: int) -> float | None:
    """None for what has not happened yet."""
    return max(0, now_ns - then_ns) / 1e6 if then_ns else None


def _take(ring: _Ring) -> dict[str, Any]:
    stats = ring.view.stats()
    depths, ring.depths = ring.depths, []
    return {
        "http": ring.http,
        "worker": ring.worker,
        "kind": ring.kind,
        "epoch": stats.epoch,
        "capacity": stats.capacity,
        "slot_size": stats.slot_size,
        "depths": depths or [stats.depth],
        "has_producer": stats.has_producer,
        "has_consumer": stats.has_consumer,
        "num_torn": stats.num_torn,
        **stats.producer,
        **stats.consumer,
    }
