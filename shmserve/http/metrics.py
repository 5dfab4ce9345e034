"""GET /metrics: the boards and the rings of the whole instance as Prometheus text, the same from any front end.

Owns: one look as metric families. Reads shared memory at scrape time; nothing is counted twice, and no metric is kept here. Names and
their meanings are in `metric_table.py`, those of other servers in `stock_metrics.py`.

A process that died takes its own series (label `process`) with it, and its successor's begin at 0: a reset, as rate() knows it. Sums
over processes go on: what the dead had counted is in them (`shmserve/ledger.py`). A ring's counters are as old as its channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shmserve.boards import DEATH_CAUSES, ENDINGS, REFUSALS, Phase
from shmserve.config import Config
from shmserve.http import metric_table as table
from shmserve.http.instance_snapshot import SUPERVISOR, Process, Snapshot, take_snapshot
from shmserve.http.metric_table import Shown
from shmserve.http.stock_metrics import add_histogram, stock_metrics
from shmserve.rings.observe import RingStats

_SERVING: Final = (Phase.IDLE, Phase.PREFILL, Phase.DECODE)


class InstanceCollector(Collector):
    """Every board and ring of `instance`, attached read-only for the length of one scrape."""

    def __init__(self, instance: str, model_name: str, config: Config) -> None:
        self._instance = instance
        self._model_name = model_name
        self._config = config

    def collect(self) -> Iterator[Metric]:
        snapshot = take_snapshot(self._instance)
        yield from _derived(snapshot, self._config)
        yield from _words(snapshot)
        yield from _histograms(snapshot)
        yield from _rings(snapshot)
        yield from stock_metrics(snapshot, self._config, self._model_name)


def _family(shown: Shown, *labels: str) -> GaugeMetricFamily | CounterMetricFamily:
    kind = GaugeMetricFamily if shown.kind == "gauge" else CounterMetricFamily
    return kind(shown.name, shown.text, labels=labels)


def _is_ready(process: Process) -> bool:
    return process.words.get("phase") in _SERVING


def _derived(snapshot: Snapshot, config: Config) -> Iterator[Metric]:
    """What no single word says."""
    wanted = _family(table.WORKERS)
    wanted.add_metric([], config.num_workers)
    yield wanted
    num_ready = _family(table.WORKERS_READY)
    num_ready.add_metric([], sum(map(_is_ready, snapshot.of_role("worker"))))
    yield num_ready
    ready = _family(table.READY, "process")
    for process in snapshot.of_role("worker") + snapshot.of_role("http"):
        ready.add_metric([process.name], int(_is_ready(process)))
    yield ready
    restarts = _family(table.RESTARTS, "role", "cause")
    supervisor = snapshot.processes.get(SUPERVISOR)
    for role in ("worker", "http"):
        for cause in DEATH_CAUSES:
            if supervisor is not None:
                count = supervisor.words.get(f"{role}_restarts_{cause}", 0)
                restarts.add_metric([role, cause], count)
    yield restarts
    for shown, stem, reasons in (
        (table.REFUSALS, "num_refused", REFUSALS),
        (table.COMPLETIONS, "num_ended", ENDINGS),
    ):
        family = _family(shown, "reason")
        for reason in reasons:
            family.add_metric([reason], snapshot.sum("http", f"{stem}_{reason}"))
        yield family


def _words(snapshot: Snapshot) -> Iterator[Metric]:
    for word, shown in table.WORDS.items():
        family = _family(shown, "process")
        for process in snapshot.processes.values():
            raw = process.words.get(word)
            if raw is not None and (raw or shown.unit != "age"):  # 0: it never happened
                family.add_metric([process.name], shown.value(raw, snapshot.taken_ns))
        yield family


def _histograms(snapshot: Snapshot) -> Iterator[Metric]:
    for name, shown in table.HISTOGRAMS.items():
        family = HistogramMetricFamily(shown.name, shown.text, labels=["process"])
        scale = 1e6 if shown.unit == "us" else 1
        for process in snapshot.processes.values():
            if name in process.histograms:
                add_histogram(family, [process.name], process.histograms[name], scale)
        yield family


def _rings(snapshot: Snapshot) -> Iterator[Metric]:
    numbers = {name: _numbers_of(ring) for name, ring in snapshot.rings.items()}
    for word, shown in table.RING_WORDS.items():
        family = _family(shown, "ring")
        for name, values in numbers.items():
            family.add_metric([name], shown.value(values[word], snapshot.taken_ns))
        yield family


def _numbers_of(ring: RingStats) -> dict[str, int]:
    return {
        **ring.producer,
        **ring.consumer,
        "depth": ring.depth,
        "capacity": ring.capacity,
        "torn": ring.num_torn,
        "has_producer": int(ring.has_producer),
        "has_consumer": int(ring.has_consumer),
    }


def render(collector: InstanceCollector) -> bytes:
    """The exposition text. Takes a few milliseconds: call it off the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
