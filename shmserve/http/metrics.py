"""GET /metrics: the boards and the rings of the whole instance as Prometheus text, the same from any front end.

Owns: names and help texts. Reads shared memory at scrape time; nothing is counted twice, and no metric is kept here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shmserve.rings.board import BoardReader, HistogramReading
from shmserve.rings.observe import RingStats, RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError

_GAUGES: Final = {
    "running", "waiting", "paused", "kv_blocks_total", "kv_blocks_used", "max_num_seqs", "max_model_len",
    "in_flight", "connections", "mailbox_bytes", "mailbox_high_water_bytes", "phase", "loading_permille",
    "step", "slowest_step_ns", "loop_lag_ns", "heartbeat_ns", "phase_since_ns", "pid", "draining",
}  # fmt: skip


class InstanceCollector(Collector):
    """Every board and ring of `instance`, attached read-only for the length of one scrape."""

    def __init__(self, instance: str, model_name: str) -> None:
        self._instance = instance
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        boards: list[tuple[str, dict[str, int], dict[str, HistogramReading]]] = []
        for name in boards_of(self._instance):
            try:
                reader = BoardReader.attach(name)
            except SegmentError:
                continue  # it was swept or replaced since the listing
            boards.append((name.rsplit(".", 2)[1], reader.words(), reader.histograms()))
            reader.close()
        rings: list[RingStats] = []
        for name in rings_of(self._instance):
            try:
                view = RingView(name)
            except SegmentError:
                continue
            rings.append(view.stats())
            view.close()
        yield from _board_metrics(boards)
        yield from _ring_metrics(rings)
        yield from self._stock_metrics(boards)

    def _stock_metrics(
        self, boards: Sequence[tuple[str, dict[str, int], dict[str, HistogramReading]]]
    ) -> Iterator[Metric]:
        """The vLLM and SGLang names that routers and stock dashboards read."""
        workers = [words for process, words, _ in boards if process.startswith("worker")]
        running = sum(words["running"] for words in workers)
        waiting = sum(words["waiting"] for words in workers)
        total = sum(words["kv_blocks_total"] for words in workers)
        usage = sum(words["kv_blocks_used"] for words in workers) / total if total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the running batch.", running),
            ("vllm:num_requests_waiting", "Sequences waiting for a run slot.", waiting),
            ("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", usage),
            ("sglang:num_running_reqs", "Sequences in the running batch.", running),
            ("sglang:num_queue_reqs", "Sequences waiting for a run slot.", waiting),
            ("sglang:token_usage", "Used share of the KV blocks, 0 to 1.", usage),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        asked = sum(words["prefix_query_tokens"] for words in workers)
        hit = sum(words["prefix_hit_tokens"] for words in workers)
        drafts = sum(words["num_draft_tokens"] for words in workers)
        accepted = sum(words["num_accepted_tokens"] for words in workers)
        for name, text, count in (
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed and verified.", drafts),
            ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right.", accepted),
            ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", asked),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hit),
            ("sglang:cached_tokens", "Prompt tokens found in the prefix cache.", hit),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], count)
            yield counter


def _board_metrics(
    boards: Sequence[tuple[str, dict[str, int], dict[str, HistogramReading]]],
) -> Iterator[Metric]:
    words: dict[str, list[tuple[str, int]]] = {}
    histograms: dict[str, list[tuple[str, HistogramReading]]] = {}
    for process, values, readings in boards:
        for name, value in values.items():
            words.setdefault(name, []).append((process, value))
        for name, reading in readings.items():
            histograms.setdefault(name, []).append((process, reading))
    for name, samples in words.items():
        text = f"The word {name} of each process's board."
        family: GaugeMetricFamily | CounterMetricFamily
        if name in _GAUGES:
            family = GaugeMetricFamily(f"shmserve_{name}", text, labels=["process"])
        else:
            family = CounterMetricFamily(
                f"shmserve_{name.removeprefix('num_')}", text, labels=["process"]
            )
        for process, value in samples:
            family.add_metric([process], value)
        yield family
    for name, observed in histograms.items():
        metric = HistogramMetricFamily(
            f"shmserve_{name.removesuffix('_us')}_seconds",
            f"The histogram {name} of each process's board.",
            labels=["process"],
        )
        for process, reading in observed:
            metric.add_metric([process], _cumulative(reading), sum_value=reading.sum / 1e6)
        yield metric


def _cumulative(reading: HistogramReading) -> list[tuple[str, float]]:
    buckets = []
    total = 0
    for bound, count in zip((*reading.bounds, None), reading.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else repr(bound / 1e6), float(total)))
    return buckets


def _ring_metrics(rings: Sequence[RingStats]) -> Iterator[Metric]:
    gauges = {
        "depth": GaugeMetricFamily(
            "shmserve_ring_depth", "Slots written and not yet handled.", labels=["ring"]
        ),
        "capacity": GaugeMetricFamily(
            "shmserve_ring_capacity", "Slots of the ring.", labels=["ring"]
        ),
    }
    by_word: dict[str, Metric] = {}
    for ring in rings:
        label = [".".join(ring.name.rsplit(".", 2)[1:])]
        gauges["depth"].add_metric(label, ring.depth)
        gauges["capacity"].add_metric(label, ring.capacity)
        for name, value in {**ring.producer, **ring.consumer}.items():
            metric = by_word.get(name)
            if metric is None:
                kind = (
                    GaugeMetricFamily
                    if name in ("high_water", "pending", "largest_batch")
                    else CounterMetricFamily
                )
                metric = by_word[name] = kind(
                    f"shmserve_ring_{name}",
                    f"The header word {name} of each ring.",
                    labels=["ring"],
                )
            metric.add_metric(label, value)  # type: ignore[attr-defined]  # both families have it
    yield from gauges.values()
    yield from by_word.values()


def render(collector: InstanceCollector) -> bytes:
    """The exposition text. Takes a few milliseconds: call it off the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
