"""What every metric is called, and what it means: one line for each word, histogram and ring counter.

Owns: the names, kinds, units and help texts of the `shmserve_*` metrics. Never: reads a board or a ring (`metrics.py` does). docs/metrics.md
is made of these tables and of those of `stock_metrics.py` by tools/metrics_page.py; tests compare all three with a live /metrics.

Times are shown in seconds and shares from 0 to 1, by Prometheus' convention, whatever their word counts in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter", "histogram"]
Unit = Literal["", "ns", "us", "permille", "age"]


@dataclass(frozen=True, slots=True)
class Shown:
    """How one number is shown. A counter's `name` is without "_total". `unit` is what the number is counted in; "age": it is a
    CLOCK_MONOTONIC stamp, and how long ago that was is shown."""

    name: str
    kind: Kind
    text: str
    unit: Unit = ""

    def value(self, raw: int, now_ns: int) -> float:
        """The number for people: seconds, shares, counts."""
        if self.unit == "ns":
            return raw / 1e9
        if self.unit == "permille":
            return raw / 1000
        if self.unit == "age":
            return max(0, now_ns - raw) / 1e9
        return raw

    @property
    def sample_name(self) -> str:
        """As PromQL names it: counters end in _total, histograms in _bucket, _sum and _count."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _gauge(name: str, text: str, unit: Unit = "") -> Shown:
    return Shown(f"shmserve_{name}", "gauge", text, unit)


def _counter(name: str, text: str, unit: Unit = "") -> Shown:
    return Shown(f"shmserve_{name}", "counter", text, unit)


def _histogram(name: str, text: str, unit: Unit = "us") -> Shown:
    return Shown(f"shmserve_{name}", "histogram", text, unit)


# Words of the boards, whatever process shows them: label "process" (worker0, http0, supervisor0).
WORDS: Final[dict[str, Shown]] = {
    "heartbeat_ns": _gauge("heartbeat_age_seconds", "Time since the process last said that it lives; twice a second at least is usual.", "age"),
    "pid": _gauge("process_id", "Process id."),
    "phase": _gauge("phase", "What the process does: 0 starting, 1 loading, 2 warming up, 3 idle, 4 prefill, 5 decode, 6 draining, 7 stopped."),
    "phase_since_ns": _gauge("phase_age_seconds", "How long that takes so far; while a worker computes, the age of its step. Without meaning in phase 3.", "age"),
    "loading_permille": _gauge("loading_ratio", "How far a worker has loaded its model, 0 to 1.", "permille"),
    "step": _gauge("step", "Number of the worker's last step."),
    "slowest_step_ns": _gauge("slowest_step_seconds", "The longest step of the worker's life.", "ns"),
    "expected_step_ns": _gauge("expected_step_seconds", "What the step that runs may take, by what its like has taken; ten times that is a hang.", "ns"),
    "running": _gauge("running", "Sequences in the running batch."),
    "waiting": _gauge("waiting", "Sequences that are not started: in a worker's queue; of a front end, all that it has submitted or is about to."),
    "paused": _gauge("paused", "Sequences that are not computed for now: their client or the token ring is full, or their grammar is compiled."),
    "kv_blocks_total": _gauge("kv_blocks", "Blocks of the KV cache that can be allocated."),
    "kv_blocks_used": _gauge("kv_blocks_used", "Blocks of the KV cache that sequences hold. Blocks kept for later prompts are free and do not count."),
    "max_num_seqs": _gauge("max_running", "Sequences that the worker computes at once, at most."),
    "max_model_len": _gauge("max_model_len", "Tokens of a prompt and its completion together, at most."),
    "num_admitted": _counter("admitted", "Sequences that the scheduler gave a run slot; one that was preempted counts again."),
    "num_finished": _counter("finished", "Sequences that ended in the worker, however, but by an abort."),
    "num_aborted": _counter("aborted", "Sequences that were aborted: as the front end decided it, and as the worker did it."),
    "num_timed_out": _counter("timed_out", "Sequences that the worker ended by a deadline or a timeout. They count as finished, too."),
    "num_preempted": _counter("preempted", "Sequences whose blocks were taken for one that came before them; they are computed again."),
    "num_bad_records": _counter("bad_records", "Records of the other side of a ring that cannot be. Anything above 0 is a fault."),
    "prompt_tokens": _counter("prompt_tokens", "Tokens of the prompts that were started."),
    "generation_tokens": _counter("generation_tokens", "Tokens that the worker generated."),
    "prefix_query_tokens": _counter("prefix_query_tokens", "Prompt tokens that were looked for in the prefix cache."),
    "prefix_hit_tokens": _counter("prefix_hit_tokens", "Prompt tokens that were found there, and not computed."),
    "num_draft_tokens": _counter("draft_tokens", "Tokens that speculation guessed."),
    "num_accepted_tokens": _counter("accepted_tokens", "Guessed tokens that were right."),
    "in_flight": _gauge("in_flight", "Sequences of a front end from their SUBMIT to their FINISH."),
    "connections": _gauge("connections", "Open connections of a front end."),
    "num_requests": _counter("requests", "Requests with a body that a front end began to read, whatever became of them."),
    "num_refused": _counter("refused", "Requests that a front end answered without computing them. shmserve_refusals_total says why."),
    "waiting_tokens": _gauge("waiting_tokens", "Prompt tokens of the sequences that are not started."),
    "body_bytes": _gauge("body_bytes", "Bodies of requests that are being read or answered."),
    "num_denied": _counter("denied", "Requests turned away by their key, Host or Origin."),
    "num_errors": _counter("errors", "Requests whose handler ended with an error status, refusals and bad input among them."),
    "num_slow_clients": _counter("slow_clients", "Streams and answers that ended because their client took nothing for too long, or too much waited for it."),
    "num_congestions": _counter("congestions", "How often a client did not take all that was written to it."),
    "num_client_coalesced_tokens": _counter("client_coalesced_tokens", "Tokens that waited for their client and went out as one event with others."),
    "num_clients_paused": _counter("clients_paused", "How often a sequence was paused because its client did not read (--slow-client block)."),
    "num_clients_dropped": _counter("clients_dropped", "Streams cut because their client did not read (--slow-client drop)."),
    "clients_congested": _gauge("clients_congested", "Clients that have not taken what was written to them."),
    "client_backlog_bytes": _gauge("client_backlog_bytes", "What waits for them all, as of the last look: in mailboxes, transports and the kernel's socket buffers."),
    "client_backlog_high_water_bytes": _gauge("client_backlog_high_water_bytes", "The most that ever waited for one client."),
    "frames": _counter("frames", "Server-sent events that a front end wrote."),
    "tokens": _counter("tokens", "Tokens that a front end took from its token rings."),
    "mailbox_bytes": _gauge("mailbox_bytes", "Text and ids that wait in front of the transports of congested clients."),
    "mailbox_high_water_bytes": _gauge("mailbox_high_water_bytes", "The most that ever waited there."),
    "loop_lag_ns": _gauge("loop_lag_seconds", "How late the event loop ran its last timer, four times a second (twice while idle). A stall between two is in shmserve_hop_pop_seconds.", "ns"),
    "debug_listeners": _gauge("debug_listeners", "Clients of /debug/stream."),
    "places": _gauge("places", "Sequences of all requests that are in, from the verdict on them to their last record; the bound is on these."),
    "worst_waiting": _gauge("worst_waiting_rank", "The rank of the request that would have to go first for a better one; 0: none waits."),
    "routing_blocks": _gauge("routing_blocks", "Blocks of prompts of which it is known which worker was sent them; bounded."),
    "num_routed_by_prefix": _counter("routed_by_prefix", "Requests sent to the worker that had most of their prompt."),
    "num_routed_by_load": _counter("routed_by_load", "Requests sent to another than that, since it was too busy."),
    "num_debug_skipped": _counter("debug_skipped", "Samples that a client of /debug/stream was too slow for."),
    "log_bytes": _gauge("log_bytes", "Lines of the log that stderr has not taken yet; bounded."),
    "num_log_lines_lost": _counter("log_lines_lost", "Lines of the log that did not fit into that bound: stderr took nothing."),
    "spans_waiting": _gauge("spans_waiting", "Traces of ended requests that are still to be sent (--otlp-traces-endpoint); bounded."),
    "num_spans_sent": _counter("spans_sent", "Traces that the collector took."),
    "num_spans_dropped": _counter("spans_dropped", "Traces that did not fit into the bound: the collector is too slow."),
    "num_spans_failed": _counter("spans_failed", "Traces that the collector did not take."),
    "io_uring": _gauge("io_uring", "1 while a front end sends the tokens of a step in one system call; 0 with --no-io-uring, or where the kernel refused: each is sent by itself."),
    "draining": _gauge("draining", "1 once the instance is about to end."),
    "num_crash_dumps": _counter("crash_dumps", "Dumps of processes that died while they served: written."),
    "num_crash_dumps_lost": _counter("crash_dumps_lost", "Dumps of processes that died while they served: not written."),
    "crash_dumps_waiting": _gauge("crash_dumps_waiting", "Dumps that are still to be written."),
}  # fmt: skip

# Histograms of the boards: label "process".
HISTOGRAMS: Final[dict[str, Shown]] = {
    "step_us": _histogram("step_seconds", "Steps of the worker, from draining its inbox to publishing the tokens."),
    "itl_engine_us": _histogram("itl_engine_seconds", "Time between two tokens of a sequence, as the worker made them."),
    "itl_wire_us": _histogram("itl_wire_seconds", "Time between two tokens of a stream, as they were written to the socket; tokens that came with another count as 0."),
    "hop_publish_us": _histogram("hop_publish_seconds", "A token's way from sampled to published in the ring. Late: the ring was full, and the token waited outside it."),
    "hop_pop_us": _histogram("hop_pop_seconds", "From published to popped by the front end. Late: the event loop was busy."),
    "hop_frame_us": _histogram("hop_frame_seconds", "From popped to framed: the tokens of its batch that were written before it."),
    "hop_write_us": _histogram("hop_write_seconds", "From framed to written: building the event and the socket's send. Late: a client did not read, and its tokens waited. Of tokens sent in one call: an equal share of it."),
    "queue_us": _histogram("queue_seconds", "From a request's arrival to the first step that its sequence is scheduled in."),
    "ttft_us": _histogram("ttft_seconds", "From a request's arrival to the first bytes of its answer's text being written."),
    "e2e_us": _histogram("e2e_seconds", "From a request's arrival to its end; of requests that ended well."),
    "prefill_us": _histogram("prefill_seconds", "From a sequence's first step to the end of its prompt."),
    "decode_us": _histogram("decode_seconds", "From a sequence's first token to its last."),
    "tpot_us": _histogram("tpot_seconds", "The same, by the number of tokens after the first."),
    "abort_us": _histogram("abort_seconds", "From the decision to abort a sequence (its client left) to the worker's word that it has ended."),
    "prompt_length": _histogram("prompt_length_tokens", "Tokens of a prompt, of sequences that ended.", ""),
    "completion_length": _histogram("completion_length_tokens", "Tokens of a completion, of sequences that ended.", ""),
}  # fmt: skip

# Words of the rings' headers, and what is derived from them: label "ring" (http0-worker0.tokens).
RING_WORDS: Final[dict[str, Shown]] = {
    "depth": _gauge("ring_depth", "Slots that are written and not yet handled."),
    "capacity": _gauge("ring_capacity", "Slots of the ring."),
    "torn": _gauge("ring_torn", "Slots whose copy has begun and not ended: for a moment, or for ever if the writer died in it."),
    "has_producer": _gauge("ring_has_producer", "1 while a process holds the writing end."),
    "has_consumer": _gauge("ring_has_consumer", "1 while a process holds the reading end."),
    "high_water": _gauge("ring_high_water", "The greatest depth that a publish of the writer saw."),
    "pending": _gauge("ring_pending", "Slots that wait outside the ring, since it was full."),
    "largest_batch": _gauge("ring_largest_batch", "Most slots that one wakeup of the reader found."),
    "write_cursor": _counter("ring_written", "Slots written."),
    "read_cursor": _counter("ring_read", "Slots handled. By wakeups: the mean batch."),
    "refused": _counter("ring_refused", "Units that did not fit and were given back to the caller."),
    "coalesced": _counter("ring_coalesced", "Slots merged into another before they were written; no token is lost by that."),
    "dropped": _counter("ring_dropped", "Slots thrown away by the drop policy; their requests end with an error."),
    "blocked_ns": _counter("ring_blocked_seconds", "Time that the writer waited for room (policy block).", "ns"),
    "publishes": _counter("ring_publishes", "Batches written, one signal each."),
    "wakeups": _counter("ring_wakeups", "Reads of the ring's counter that found something."),
    "empty_wakeups": _counter("ring_empty_wakeups", "Reads that found nothing."),
}  # fmt: skip
RING_WORDS_LEFT_OUT: Final = ("claim_cursor",)  # `torn` says what it is for

WORKERS: Final = _gauge("workers", "Workers that the instance is to have.")
WORKERS_READY: Final = _gauge("workers_ready", "Workers that can compute: loaded, and not draining. One that is dead or was not started anew yet is not ready.")  # fmt: skip
READY: Final = _gauge("ready", "1 for a process that has started up and does not drain. Label: process.")  # fmt: skip
RESTARTS: Final = _counter("restarts", "Children that died and were started anew, by role and cause: exit (without a word), failed (it said why), signal (killed by somebody), stopped, hung, protocol (killed by the supervisor).")  # fmt: skip
REFUSALS: Final = _counter("refusals", "Requests answered without being computed, by reason (those in the table below).")  # fmt: skip
COMPLETIONS: Final = _counter("completions", "Completions that ended, by reason: stop, length, abort (the client left, or somebody aborted it), error, timeout.")  # fmt: skip

DERIVED: Final = (WORKERS, WORKERS_READY, READY, RESTARTS, REFUSALS, COMPLETIONS)

NOT_SHOWN: Final = ("ledger_version", "worker_restarts", "http_restarts")
"""Words without a metric of their own: RESTARTS sums the last two up."""


def is_shown_elsewhere(word: str) -> bool:
    """Words that are labels of DERIVED, or part of every sum (`past_*`)."""
    parts = ("num_refused_", "num_ended_", "worker_restarts_", "http_restarts_", "past_")
    return word.startswith(parts) or word in NOT_SHOWN
