"""The metrics that routers and stock dashboards read under vLLM's and SGLang's names, made of the same numbers as our own.

Owns: which of our words is which of theirs. Sums over all processes of the instance, so that every front end says the same; label
`model_name`. Never: counts anything itself.

vLLM takes the time between tokens from its engine, and SGLang divides it among coalesced tokens; here it is what was written to the
sockets. `shmserve_itl_engine_seconds` is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from shmserve.boards import ENDINGS, REFUSALS
from shmserve.config import Config
from shmserve.http.instance_snapshot import Snapshot
from shmserve.rings.board import HistogramReading


@dataclass(frozen=True, slots=True)
class Stock:
    """One of their names. A counter's is without "_total"."""

    name: str
    text: str

    def __post_init__(self) -> None:
        assert self.text.endswith("."), self.name


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _usage(s: Snapshot) -> float:
    return _share(s.sum("worker", "kv_blocks_used"), s.sum("worker", "kv_blocks_total"))


def _worker(word: str) -> Callable[[Snapshot], float]:
    return lambda s: s.sum("worker", word)


GAUGES: Final[tuple[tuple[Stock, Callable[[Snapshot], float]], ...]] = (
    (Stock("vllm:num_requests_running", "Sequences in the running batch."), _worker("running")),
    (Stock("vllm:num_requests_waiting", "Sequences waiting for a run slot."), _worker("waiting")),
    (Stock("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1."), _usage),
    (Stock("sglang:num_running_reqs", "Sequences in the running batch."), _worker("running")),
    (Stock("sglang:num_queue_reqs", "Sequences waiting for a run slot."), _worker("waiting")),
    (Stock("sglang:token_usage", "Used share of the KV blocks, 0 to 1."), _usage),
    (
        Stock("sglang:utilization", "Share of the run slots that are taken, 0 to 1."),
        lambda s: _share(s.sum("worker", "running"), s.sum("worker", "max_num_seqs")),
    ),
    (
        Stock("sglang:cache_hit_rate", "Share of the prompt tokens so far that were cached."),
        lambda s: _share(
            s.sum("worker", "prefix_hit_tokens"), s.sum("worker", "prefix_query_tokens")
        ),
    ),
    (
        Stock("sglang:spec_accept_rate", "Share of the guessed tokens so far that were right."),
        lambda s: _share(
            s.sum("worker", "num_accepted_tokens"), s.sum("worker", "num_draft_tokens")
        ),
    ),
)

COUNTERS: Final[tuple[tuple[Stock, str, str], ...]] = (
    (Stock("vllm:num_preemptions", "Sequences preempted."), "worker", "num_preempted"),
    (Stock("vllm:prompt_tokens", "Prompt tokens of started requests."), "worker", "prompt_tokens"),
    (Stock("vllm:prompt_tokens_cached", "Prompt tokens that were found in the prefix cache."), "worker", "prefix_hit_tokens"),
    (Stock("vllm:generation_tokens", "Generated tokens."), "worker", "generation_tokens"),
    (Stock("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."), "worker", "prefix_query_tokens"),
    (Stock("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."), "worker", "prefix_hit_tokens"),
    (Stock("vllm:spec_decode_num_draft_tokens", "Tokens guessed and verified."), "worker", "num_draft_tokens"),
    (Stock("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right."), "worker", "num_accepted_tokens"),
    (Stock("sglang:prompt_tokens", "Prompt tokens of started requests."), "worker", "prompt_tokens"),
    (Stock("sglang:generation_tokens", "Generated tokens."), "worker", "generation_tokens"),
    (Stock("sglang:cached_tokens", "Prompt tokens found in the prefix cache."), "worker", "prefix_hit_tokens"),
    (Stock("sglang:num_requests", "Requests with a body."), "http", "num_requests"),
    (Stock("sglang:num_aborted_requests", "Sequences that were aborted."), "http", "num_aborted"),
    (Stock("sglang:num_retracted_requests", "Sequences preempted."), "worker", "num_preempted"),
)  # fmt: skip

_TTFT: Final = "From arrival to the first text written."
_ITL: Final = "Time between two tokens of a stream, as written to its socket."
_TPOT: Final = "Decode time by the tokens after the first."
_E2E: Final = "From arrival to the end, of requests that ended well."
_QUEUE: Final = "From arrival to the first step scheduled."

HISTOGRAMS: Final[tuple[tuple[Stock, str], ...]] = (
    (Stock("vllm:time_to_first_token_seconds", _TTFT), "ttft_us"),
    (Stock("vllm:inter_token_latency_seconds", _ITL), "itl_wire_us"),
    (Stock("vllm:request_time_per_output_token_seconds", _TPOT), "tpot_us"),
    (Stock("vllm:e2e_request_latency_seconds", _E2E), "e2e_us"),
    (Stock("vllm:request_queue_time_seconds", _QUEUE), "queue_us"),
    (Stock("vllm:request_prefill_time_seconds", "First step to the prompt's end."), "prefill_us"),
    (Stock("vllm:request_decode_time_seconds", "First token to the last."), "decode_us"),
    (Stock("vllm:request_prompt_tokens", "Tokens of a prompt."), "prompt_length"),
    (Stock("vllm:request_generation_tokens", "Tokens of a completion."), "completion_length"),
    (Stock("sglang:time_to_first_token_seconds", _TTFT), "ttft_us"),
    (Stock("sglang:inter_token_latency_seconds", _ITL), "itl_wire_us"),
    (Stock("sglang:e2e_request_latency_seconds", _E2E), "e2e_us"),
    (Stock("sglang:queue_time_seconds", _QUEUE), "queue_us"),
)

SUCCESS: Final = Stock("vllm:request_success", "Completions that ended, by finished_reason.")
REJECTIONS: Final = Stock(
    "vllm:admission_rejections", "Requests answered without being computed, by reason."
)
CACHE_CONFIG: Final = Stock(
    "vllm:cache_config_info", "Always 1; what the KV cache is like is in the labels."
)


def stock_metrics(snapshot: Snapshot, config: Config, model_name: str) -> Iterator[Metric]:
    """All of them, of one look."""
    for stock, gauge_of in GAUGES:
        gauge = GaugeMetricFamily(stock.name, stock.text, labels=["model_name"])
        gauge.add_metric([model_name], gauge_of(snapshot))
        yield gauge
    for stock, role, word in COUNTERS:
        counter = CounterMetricFamily(stock.name, stock.text, labels=["model_name"])
        counter.add_metric([model_name], snapshot.sum(role, word))
        yield counter
    for stock, name in HISTOGRAMS:
        reading = snapshot.histogram("http", name)
        if reading is not None:
            histogram = HistogramMetricFamily(stock.name, stock.text, labels=["model_name"])
            add_histogram(histogram, [model_name], reading, 1e6 if name.endswith("_us") else 1)
            yield histogram
    success = CounterMetricFamily(
        SUCCESS.name, SUCCESS.text, labels=["model_name", "finished_reason"]
    )
    for reason in ENDINGS:
        success.add_metric([model_name, reason], snapshot.sum("http", f"num_ended_{reason}"))
    yield success
    rejections = CounterMetricFamily(REJECTIONS.name, REJECTIONS.text, labels=["reason"])
    for reason in REFUSALS:
        rejections.add_metric([reason], snapshot.sum("http", f"num_refused_{reason}"))
    yield rejections
    labels = {
        "model_name": model_name,
        "block_size": str(config.worker.block_size),
        "num_gpu_blocks": str(snapshot.sum("worker", "kv_blocks_total")),
        "enable_prefix_caching": str(config.worker.prefix_cache),
    }
    info = GaugeMetricFamily(CACHE_CONFIG.name, CACHE_CONFIG.text, labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    yield info


def add_histogram(
    family: HistogramMetricFamily, labels: list[str], reading: HistogramReading, scale: float
) -> None:
    """Add one series: cumulative buckets, whose bounds and sum are divided by `scale`."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*reading.bounds, None), reading.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else repr(bound / scale), float(total)))
    family.add_metric(labels, buckets, sum_value=reading.sum / scale)


def all_stock() -> list[tuple[Stock, str]]:
    """Every name, and its kind."""
    named = [(stock, "gauge") for stock, _ in GAUGES] + [(CACHE_CONFIG, "gauge")]
    named += [(stock, "counter") for stock, _, _ in COUNTERS]
    named += [(SUCCESS, "counter"), (REJECTIONS, "counter")]
    return named + [(stock, "histogram") for stock, _ in HISTOGRAMS]
