"""Spans: what is in them, whose children they are, and that nobody waits for the collector."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving import until

from shmserve.config import Config, ConfigError
from shmserve.http import tracing
from shmserve.http.request_book import RequestRecord
from shmserve.http.tracing import Traces, TracingError, exporter_to
from shmserve.request import FinishReason, SamplingParams
from shmserve.rings.board import Board
from shmserve.wire.finish import FinishRecord

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="the extra otel"
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000


class Entry:
    """What a record needs of a completion."""

    def __init__(self) -> None:
        self.req_id = 0xABC
        self.submitted_ns = 3 * MS
        self.first_popped_ns = 13 * MS
        self.expiry = self.error = self.started = None
        self.is_aborted = False
        known = {
            "time_ns": 52 * MS,
            "finish": FinishReason.LENGTH,
            "completion_tokens": 11,
            "cached_tokens": 4,
            "received_ns": 4 * MS,
            "scheduled_ns": 5 * MS,
            "prefill_end_ns": 11 * MS,
            "first_token_ns": 12 * MS,
        }
        self.finish = FinishRecord(**dict.fromkeys(FinishRecord.__struct_fields__, 0) | known)


def record_of(**known: object) -> RequestRecord:
    record = RequestRecord.__new__(RequestRecord)
    values: dict[str, object] = dict.fromkeys(RequestRecord.__slots__, 0)
    values |= {
        "method": "POST",
        "route": "/v1/completions",
        "client": "127.0.0.1",
        "external_id": "",
        "error_code": "",
        "status": 200,
        "is_stream": True,
        "entries": [Entry()],
        "params": SamplingParams(max_tokens=11, temperature=0.5, top_p=0.9),
        "num_prompt_tokens": 7,
        "arrival_ns": 1 * MS,
        "parsed_ns": 2 * MS,
        "tokenised_ns": 2 * MS + 1,
        "first_written_ns": 14 * MS,
        "ended_ns": 60 * MS,
        "intervals_ms": (4.0, 5.0),
        "trace_headers": ("", ""),
    }
    for name, value in (values | known).items():
        setattr(record, name, value)
    return record


def spans_of(board: Board, *records: RequestRecord) -> list:
    exporter = memory.InMemorySpanExporter()
    traces = Traces(exporter, "a-model", "an-instance", board)
    for record in records:
        traces.tell([record])
    traces.close()
    return list(exporter.get_finished_spans())


def test_a_span_has_vllms_attributes_and_the_hops_as_events(board) -> None:
    (span,) = spans_of(board, record_of(external_id="mine"))
    assert span.name == "llm_request"
    assert span.resource.attributes["service.instance.id"] == "an-instance"
    told = dict(span.attributes)
    assert told == {
        "gen_ai.response.model": "a-model",
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 11,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 11,
        "gen_ai.usage.cached_tokens": 4,
        "gen_ai.response.finish_reason": "length",
        "gen_ai.latency.time_in_queue": 0.004,
        "gen_ai.latency.time_to_first_token": 0.013,
        "gen_ai.latency.time_in_model_prefill": 0.006,
        "gen_ai.latency.time_in_model_decode": 0.040,
        "gen_ai.latency.time_in_model_inference": 0.047,
        "gen_ai.latency.e2e": 0.059,
        "shmserve.stream": True,
        "shmserve.itl_wire_p50": 0.004,
        "shmserve.itl_wire_p99": 0.005,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "client.address": "127.0.0.1",
    }
    assert [event.name for event in span.events] == [
        "parsed", "tokenised", "submitted", "admitted", "first_scheduled", "prefill_end",
        "first_token.sampled", "first_token.popped", "first_token.written", "finished",
    ]  # fmt: skip
    assert span.end_time - span.start_time == 59 * MS
    assert span.events[0].timestamp - span.start_time == 1 * MS
    assert all(span.start_time <= e.timestamp <= span.end_time for e in span.events)
    assert span.status.is_unset


def test_a_request_that_was_refused_is_a_span_without_tokens(board) -> None:
    refused = record_of(entries=[], status=503, error_code="queue_full", params=None)
    (span,) = spans_of(board, refused)
    assert span.attributes["error.type"] == "queue_full"
    assert span.attributes["http.response.status_code"] == 503
    assert not [name for name in span.attributes if name.startswith("gen_ai.usage")]
    assert not span.status.is_ok and span.status.description == "queue_full"


def test_a_span_is_the_child_that_traceparent_asks_for(board) -> None:
    headers = (f"00-{TRACE}-{PARENT}-01", "vendor=1")
    (span,) = spans_of(board, record_of(trace_headers=headers))
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"


def test_what_its_caller_does_not_sample_is_no_span(board) -> None:
    assert spans_of(board, record_of(trace_headers=(f"00-{TRACE}-{PARENT}-00", ""))) == []


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-\u00e4-1-1"])
def test_a_traceparent_that_is_none_begins_a_new_trace(board, header) -> None:
    (span,) = spans_of(board, record_of(trace_headers=(header, "")))
    assert span.parent is None


class Stuck(memory.InMemorySpanExporter):
    """A collector that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()

    def export(self, spans):
        self.may_go.wait(30)
        return super().export(spans)


def test_a_collector_that_takes_nothing_costs_spans_and_never_the_loop(board, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 100)
    exporter = Stuck()
    traces = Traces(exporter, "a-model", "an-instance", board)
    for _ in range(1_000):  # a `tell` that waited would hang here
        traces.tell([record_of()])
    assert board["spans_waiting"] <= 100
    dropped = board["num_spans_dropped"]
    assert 800 <= dropped <= 900
    exporter.may_go.set()
    traces.close()
    assert len(exporter.get_finished_spans()) == 1_000 - dropped
    assert (board["num_spans_sent"], board["spans_waiting"]) == (1_000 - dropped, 0)


class Broken(memory.InMemorySpanExporter):
    def export(self, spans):
        raise OSError("no route")


def test_a_collector_that_fails_is_counted_and_said_once(board, caplog) -> None:
    traces = Traces(Broken(), "a-model", "an-instance", board)
    for _ in range(100):
        traces.tell([record_of()])
    traces.close()
    assert board["num_spans_failed"] == 100
    assert len([r for r in caplog.records if "could not be sent" in r.message]) == 1
    assert "no route" in caplog.text


def test_without_the_extra_it_is_said_in_one_line(board, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"pip install 'shmserve\[otel\]'"):
        exporter_to("http://127.0.0.1:4318")


@pytest.mark.parametrize("endpoint", ["grpc://a:4317", "a:4317", "http://", "http://a b/"])
def test_an_endpoint_that_cannot_be_is_refused_by_name(endpoint) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Config(otlp_traces_endpoint=endpoint).validate()


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.mark.slow
def test_a_server_sends_its_spans_to_a_real_collector(start_server) -> None:
    """Over HTTP, gzip or not, as OTLP has it; and a stream's own traceparent comes out at the other end."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.got = []
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        port = collector.server_address[1]
        endpoint = f"http://127.0.0.1:{port}"
        server = start_server("--step-ms=1", f"--otlp-traces-endpoint={endpoint}")
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        server.stream(prompt="Hello world", max_tokens=9, headers=headers).objects()
        server.post("/v1/completions", {"prompt": ""})
        until(lambda: server.metrics()["shmserve_spans_sent_total", "http0"] == 2, "two spans")
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()
    spans = []
    for path, kind, body in collector.got:
        assert (path, kind) == ("/v1/traces", "application/x-protobuf")
        message = ExportTraceServiceRequest.FromString(body)
        for of_resource in message.resource_spans:
            for of_scope in of_resource.scope_spans:
                spans += of_scope.spans
    stream, refusal = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert stream.trace_id.hex() == TRACE and stream.parent_span_id.hex() == PARENT
    told = {attribute.key: attribute.value for attribute in stream.attributes}
    assert told["gen_ai.usage.completion_tokens"].int_value == 9
    assert 0 < told["gen_ai.latency.time_to_first_token"].double_value < 30
    times = [event.time_unix_nano for event in stream.events]
    assert times == sorted(times)
    assert stream.start_time_unix_nano <= times[0] <= times[-1] <= stream.end_time_unix_nano
    assert {event.name for event in stream.events} >= {"submitted", "first_token.written"}
    assert json.dumps([a.key for a in refusal.attributes]).count("gen_ai.usage") == 0
