"""What `shmserve top` knows: the difference between two looks at an instance's shared memory.

Owns: the arithmetic of rates and quantiles. Never: attaches to anything (`watch.py` does), or draws (`top_screen.py` does). A front end
that is stopped is shown as it stands, with the age of its heartbeat. Commands only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shmserve.boards import Phase, label_of
from shmserve.recording import ring_place
from shmserve.rings.board import HistogramReading
from shmserve.rings.observe import RingStats
from shmserve.watch import Look

SILENT_AFTER_S: Final = 1.0
"""A process whose heartbeat is older is stopped, hung, or kept from running."""

LATENCIES: Final = {
    "hop_publish_us": "sampled -> published",
    "hop_pop_us": "published -> popped",
    "hop_frame_us": "popped -> framed",
    "hop_write_us": "framed -> written",
    "itl_engine_us": "ITL engine",
    "itl_wire_us": "ITL wire",
    "queue_us": "queue",
    "ttft_us": "TTFT",
    "e2e_us": "whole requests",
}
"""What histograms are called on the screen, in this order. Others of workers and front ends are in the JSON only."""
_OF_THE_WORKER: Final = "step_us"  # shown beside each worker


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process. `state` is its phase in words; `per_s` are differences of its words, by word."""

    role: str
    index: int
    pid: int
    epoch: int
    state: str
    heartbeat_age_s: float
    is_silent: bool
    words: dict[str, int]
    per_s: dict[str, float]
    step_p50_us: float = 0.0
    step_p99_us: float = 0.0


@dataclass(frozen=True, slots=True)
class RingRow:
    """One ring. Counters are since its creation; `per_s` is of slots written, `blocked_share` of time spent waiting for room."""

    http: int
    worker: int
    kind: str
    epoch: int
    depth: int
    capacity: int
    high_water: int
    per_s: float
    coalesced: int
    dropped: int
    refused: int
    pending: int
    blocked_share: float
    has_producer: bool
    has_consumer: bool
    num_claimed: int  # slots being written, or torn


@dataclass(frozen=True, slots=True)
class Spread:
    """`count` observations in microseconds; all 0 where there is none. A quantile of `most_us` is that or more: no bucket ends above it."""

    count: int
    mean_us: float
    p50_us: float
    p99_us: float
    most_us: float


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One histogram over all processes that live: in the interval, and since they began."""

    name: str
    per_s: float
    interval: Spread
    total: Spread


@dataclass(frozen=True, slots=True)
class SlowRow:
    """A client that does not keep up. `id` is "" for an answer that is no stream."""

    http: int
    id: str
    num_bytes: int
    text_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Report:
    """`seconds` is what lies between the looks; 0 where there is but one: then no rates, and latencies since the start."""

    instance: str
    at: float  # s since 1970
    seconds: float
    processes: tuple[ProcessRow, ...]
    rings: tuple[RingRow, ...]
    latencies: tuple[LatencyRow, ...]
    slow_clients: tuple[SlowRow, ...]


def report(instance: str, before: Look | None, now: Look) -> Report:
    """What happened between two looks. A segment that was not there before began at zero."""
    seconds = (now.at_ns - before.at_ns) / 1e9 if before is not None else 0.0
    old = before or Look(0, {}, {})
    processes = [_process(name, old, now, seconds) for name in now.boards]
    order = {"supervisor": 0, "worker": 1, "http": 2}
    processes.sort(key=lambda row: (order.get(row.role, 9), row.index, row.epoch))
    rings = [_ring(stats, old.rings.get(name), seconds) for name, stats in now.rings.items()]
    slow = [
        SlowRow(
            board.index,
            f"{row['req_id']:016x}" if row["req_id"] else "",
            row["num_bytes"],
            row["text_bytes"],
            max(0.0, (now.at_ns - row["since_ns"]) / 1e9),
        )
        for board in now.boards.values()
        for row in board.slow_clients
    ]
    slow.sort(key=lambda row: -row.num_bytes)
    rings.sort(key=lambda row: (row.worker, row.http, row.kind, row.epoch))
    return Report(
        instance,
        time.time(),
        seconds,
        tuple(processes),
        tuple(rings),
        tuple(_latencies(old, now, seconds)),
        tuple(slow),
    )


def _rate(now: int, before: int, seconds: float) -> float:
    return max(0, now - before) / seconds if seconds else 0.0


def _process(name: str, before: Look, now: Look, seconds: float) -> ProcessRow:
    board = now.boards[name]
    words = board.words
    old = before.boards.get(name)
    age_s = max(0, now.at_ns - words.get("heartbeat_ns", 0)) / 1e9
    is_young = not words.get("heartbeat_ns")
    per_s = {
        word: _rate(value, old.words.get(word, 0) if old else 0, seconds)
        for word, value in words.items()
        if word in _COUNTED
    }
    steps = board.histograms.get(_OF_THE_WORKER)
    if steps is not None:
        steps = _difference(steps, old.histograms.get(_OF_THE_WORKER) if old else None)
    return ProcessRow(
        board.role,
        board.index,
        words.get("pid", 0),
        board.epoch,
        _state(board.role, words, now.at_ns),
        0.0 if is_young else age_s,
        not is_young and age_s >= SILENT_AFTER_S,
        words,
        per_s,
        quantile(steps, 0.5) if steps else 0.0,
        quantile(steps, 0.99) if steps else 0.0,
    )


_COUNTED: Final = frozenset(
    (
        "step",
        "generation_tokens",
        "prompt_tokens",
        "tokens",
        "frames",
        "num_requests",
        "num_refused",
    )
)
"""Words whose rate is shown."""


def _state(role: str, words: Mapping[str, int], now_ns: int) -> str:
    phase = words.get("phase")
    if phase is None:
        return "draining" if words.get("draining") else "up"
    if role == "http" and phase == Phase.IDLE:
        return "serving"
    if phase in (Phase.STARTING, Phase.LOADING) and words.get("loading_permille"):
        return f"{label_of(phase)} {words['loading_permille'] // 10} %"
    return label_of(phase)


def _ring(stats: RingStats, old: RingStats | None, seconds: float) -> RingRow:
    epoch, http, worker, kind = ring_place(stats.name)
    producer = stats.producer
    old_producer = old.producer if old is not None else dict.fromkeys(producer, 0)
    blocked_ns = producer["blocked_ns"] - old_producer["blocked_ns"]
    return RingRow(
        http=http,
        worker=worker,
        kind=kind,
        epoch=epoch,
        depth=stats.depth,
        capacity=stats.capacity,
        high_water=producer["high_water"],
        per_s=_rate(producer["write_cursor"], old_producer["write_cursor"], seconds),
        coalesced=producer["coalesced"],
        dropped=producer["dropped"],
        refused=producer["refused"],
        pending=producer["pending"],
        blocked_share=min(1.0, blocked_ns / 1e9 / seconds) if seconds else 0.0,
        has_producer=stats.has_producer,
        has_consumer=stats.has_consumer,
        num_claimed=stats.num_torn,
    )


def _latencies(before: Look, now: Look, seconds: float) -> Iterable[LatencyRow]:
    sums: dict[str, HistogramReading] = {}
    totals: dict[str, HistogramReading] = {}
    for board_name, board in now.boards.items():
        old = before.boards.get(board_name)
        for name, reading in board.histograms.items():
            if board.role == "supervisor" or not name.endswith("_us"):
                continue  # sums over the dead; other units
            part = _difference(reading, old.histograms.get(name) if old else None)
            sums[name] = _sum(sums[name], part) if name in sums else part
            totals[name] = _sum(totals[name], reading) if name in totals else reading
    others = sorted(name for name in sums if name not in LATENCIES and name != _OF_THE_WORKER)
    for name in (*(name for name in LATENCIES if name in sums), *others):
        per_s = sums[name].count / seconds if seconds else 0.0
        yield LatencyRow(name, per_s, _spread(sums[name]), _spread(totals[name]))


def _spread(reading: HistogramReading) -> Spread:
    count = sum(reading.counts)
    mean_us = reading.sum / count if count else 0.0
    most_us = float(reading.bounds[-1])
    return Spread(count, mean_us, quantile(reading, 0.5), quantile(reading, 0.99), most_us)


def _difference(now: HistogramReading, before: HistogramReading | None) -> HistogramReading:
    if before is None or before.bounds != now.bounds:
        return now
    # Cells are read one after the other while the process writes: none may come out negative.
    counts = tuple(max(0, a - b) for a, b in zip(now.counts, before.counts, strict=True))
    return HistogramReading(now.bounds, counts, sum(counts), max(0, now.sum - before.sum))


def _sum(one: HistogramReading, other: HistogramReading) -> HistogramReading:
    if one.bounds != other.bounds:
        return one  # of another version, in the moment of an upgrade
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return HistogramReading(one.bounds, counts, one.count + other.count, one.sum + other.sum)


def quantile(reading: HistogramReading, share: float) -> float:
    """The value below which `share` of the observations lie, by straight lines within buckets; the last bound for all above it."""
    total = sum(reading.counts)
    if not total:
        return 0.0
    wanted, seen, low = share * total, 0, 0.0
    for bound, count in zip(reading.bounds, reading.counts, strict=False):
        if count and seen + count >= wanted:
            return low + (bound - low) * (wanted - seen) / count
        seen, low = seen + count, float(bound)
    return low
