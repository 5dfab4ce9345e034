"""OpenTelemetry: one span for each request, with a token's hops as its events, to the collector that --otlp-traces-endpoint names.

Owns: the way of a span from an ended request to the collector. Never: imports OpenTelemetry where no endpoint is named (it is the extra
`otel`), or makes, encodes or sends a span on the event loop: that is one thread's, behind a bounded queue.

    tell -> [ at most MOST_WAITING records ] -> thread: spans, at most BATCH at once -> collector       full: dropped, and counted

W3C trace headers are honoured: the span is a child of the one that `traceparent` names, and is not made if that was not sampled. Attributes have
vLLM's names (gen_ai.*), in seconds. Nothing of a request's text is in a span.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from shmserve.http.request_book import RequestRecord
from shmserve.rings.board import Board

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

MOST_WAITING: Final = 2_048
BATCH: Final = 32
"""Encoding holds the interpreter's lock, 0.1 ms a span: a larger batch would hold up tokens."""
LINGER_S: Final = 0.25
"""How long the thread waits for more, so that spans are sent together."""
CLOSE_S: Final = 2.0
SAY_EVERY_S: Final = 60.0
SPAN_NAME: Final = "llm_request"  # vLLM's
_MISSING: Final = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'shmserve[otel]'"


class TracingError(RuntimeError):
    """Traces cannot be sent; the text is one line for the operator."""


def exporter_to(endpoint: str) -> SpanExporter:
    """Sends to an OTLP collector over HTTP (protobuf); without a path, to /v1/traces. Raises TracingError if the extra is not installed."""
    if not urlsplit(endpoint).path.strip("/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise TracingError(_MISSING) from None
    return OTLPSpanExporter(endpoint=endpoint, timeout=5)


class Traces:
    """`tell` takes a record; `exporter` gets the spans, in a thread that lives until `close`."""

    def __init__(self, exporter: SpanExporter, model: str, instance: str, board: Board) -> None:
        try:
            import opentelemetry.sdk.trace  # noqa: F401  # asked here, in the thread it is too late to say no
        except ImportError:
            raise TracingError(_MISSING) from None
        self._exporter = exporter
        self._model = model
        self._instance = instance
        self._board = board
        self._waiting: deque[RequestRecord] = deque()
        self._awake = threading.Event()
        self._is_closing = False
        self._last_said_s = -SAY_EVERY_S
        # CLOCK_MONOTONIC to the clock of the wall; a step of the latter is seen within a batch.
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._num_sent = self._num_failed = self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def tell(self, records: Sequence[RequestRecord]) -> None:
        """Requests have ended. Event loop's thread."""
        for record in records:
            if len(self._waiting) >= MOST_WAITING:
                self._num_dropped += 1
            else:
                self._waiting.append(record)
                if not self._awake.is_set():
                    self._awake.set()
        self.show()

    def show(self) -> None:
        """The numbers, on the board; called on the heartbeat, too, since the thread must not write there."""
        board = self._board
        board["spans_waiting"] = len(self._waiting)
        board["num_spans_sent"] = self._num_sent
        board["num_spans_failed"] = self._num_failed
        board["num_spans_dropped"] = self._num_dropped

    def close(self) -> None:
        """Send what waits, for a moment."""
        self._is_closing = True
        self._awake.set()
        self._thread.join(CLOSE_S)
        self.show()

    def _run(self) -> None:
        provider = self._new_provider()
        while True:
            self._awake.wait()
            if not self._is_closing:
                time.sleep(LINGER_S)
            self._awake.clear()
            self._offset_ns = time.time_ns() - time.monotonic_ns()
            while self._waiting:
                records = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
                spans = []
                for record in records:
                    span = self._span_of(provider, record)
                    if span is not None:
                        spans.append(span)
                    time.sleep(0)  # whoever waits for the interpreter's lock is not to wait for all
                self._send(spans)
            if self._is_closing:
                self._exporter.shutdown()
                return

    def _new_provider(self) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        attributes = {"service.name": "shmserve", "service.instance.id": self._instance}
        return TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)

    def _span_of(self, provider: TracerProvider, record: RequestRecord) -> ReadableSpan | None:
        """None where the caller said that it is not sampled."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = ("traceparent", "tracestate")
        carrier = {
            name: text for name, text in zip(names, record.trace_headers, strict=True) if text
        }
        span = provider.get_tracer("shmserve").start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=record.arrival_ns + self._offset_ns,
            attributes=attributes_of(record, self._model),
        )
        if not isinstance(span, ReadableSpan):
            return None
        for name, at_ns in events_of(record):
            span.add_event(name, timestamp=at_ns + self._offset_ns)
        if record.status >= 500 or (record.error_code and record.status == 200):
            span.set_status(Status(StatusCode.ERROR, record.error_code))
        span.end(record.ended_ns + self._offset_ns)
        return span

    def _send(self, spans: Sequence[ReadableSpan]) -> None:
        if not spans:
            return
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
            why = "it did not take them"
        except Exception as error:  # an exporter's fault must not end the thread
            is_sent, why = False, f"{type(error).__name__}: {error}"
        if is_sent:
            self._num_sent += len(spans)
            return
        self._num_failed += len(spans)
        if time.monotonic() - self._last_said_s >= SAY_EVERY_S:
            self._last_said_s = time.monotonic()
            log.warning("%d traces could not be sent to the collector: %s", len(spans), why)


def attributes_of(record: RequestRecord, model: str) -> dict[str, Any]:
    """vLLM's names; latencies in seconds. What is not known is left out."""
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "client.address": record.client,
        "gen_ai.latency.e2e": (record.ended_ns - record.arrival_ns) / 1e9,
    }
    if record.error_code:
        attributes["error.type"] = record.error_code
    if not record.entries:
        return attributes
    attributes |= {
        "gen_ai.request.id": record.external_id or f"{record.entries[0].req_id:016x}",
        "gen_ai.request.n": len(record.entries),
        "gen_ai.usage.num_sequences": len(record.entries),
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.response.finish_reason": record.finish,
        "shmserve.stream": record.is_stream,
    }
    params = record.params
    if params is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
    scheduled_ns, prefill_ns = record.first("scheduled_ns"), record.first("prefill_end_ns")
    first_ns = record.first("first_token_ns")
    last_ns = max((entry.finish.time_ns for entry in record.entries if entry.finish), default=0)
    for name, begin_ns, end_ns in (
        ("time_in_queue", record.arrival_ns, scheduled_ns),
        ("time_to_first_token", record.arrival_ns, record.first_token_ns),
        ("time_in_model_prefill", scheduled_ns, prefill_ns),
        ("time_in_model_decode", first_ns, last_ns),
        ("time_in_model_inference", scheduled_ns, last_ns),
    ):
        if begin_ns and end_ns:
            attributes[f"gen_ai.latency.{name}"] = max(0, end_ns - begin_ns) / 1e9
    if record.intervals_ms is not None:
        p50_ms, p99_ms = record.intervals_ms
        attributes["shmserve.itl_wire_p50"] = p50_ms / 1000
        attributes["shmserve.itl_wire_p99"] = p99_ms / 1000
    return attributes


def events_of(record: RequestRecord) -> list[tuple[str, int]]:
    """The hops that a request took, in the order of their times (ns, CLOCK_MONOTONIC); `timing.py` says what each is."""
    submitted = min((entry.submitted_ns for entry in record.entries), default=0)
    popped = min((e.first_popped_ns for e in record.entries if e.first_popped_ns), default=0)
    last = max((entry.finish.time_ns for entry in record.entries if entry.finish), default=0)
    hops = (
        ("parsed", record.parsed_ns),
        ("tokenised", record.tokenised_ns),
        ("submitted", submitted),
        ("admitted", record.first("received_ns")),
        ("first_scheduled", record.first("scheduled_ns")),
        ("prefill_end", record.first("prefill_end_ns")),
        ("first_token.sampled", record.first("first_token_ns")),
        ("first_token.popped", popped),
        ("first_token.written", record.first_written_ns),
        ("finished", last),
    )
    return sorted(((name, at) for name, at in hops if at), key=lambda hop: hop[1])
