"""One line for each request at its end: what it was, how many tokens, how long each part took, how it ended. Never its text.

    ... INFO http[0] request id=0000019ad2f0c000 endpoint=/v1/chat/completions status=200 stream=true prompt_tokens=31 ...

Owns: which fields, their names and their order, in both formats (--log-format); what is not known is left out. GETs have no line. The lines
go to the process' log writer, which never waits (`shmserve/log_writer.py`). Event loop's thread only.

    id                the completion's, as in the answer's own id; request_id: the X-Request-Id that the client gave
    queue_ms          arrival -> first step          ttft_ms   arrival -> first text written (plain: first token here)
    itl_p50_ms, p99   between tokens of a stream, as written to its socket; itl_engine_ms: the mean, as the worker made them
    e2e_ms            arrival -> end                 finish    stop length abort error timeout, of each completion once
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Final

from shmserve.http.request_book import RequestRecord
from shmserve.log_writer import Lines

_NUMBERS: Final = (int, float)
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:,@+{}*-]+")


def fields_of(record: RequestRecord) -> dict[str, object]:
    """What is known of an ended request."""
    fields: dict[str, object] = {}
    if record.entries:
        fields["id"] = f"{record.entries[0].req_id:016x}"
    if record.external_id:
        fields["request_id"] = record.external_id
    fields["method"] = record.method
    fields["endpoint"] = record.route
    fields["status"] = record.status
    if record.entries:
        fields["stream"] = record.is_stream
        if len(record.entries) > 1:
            fields["n"] = len(record.entries)
        fields["prompt_tokens"] = record.num_prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["completion_tokens"] = record.completion_tokens
        for name, at_ns in (
            ("queue_ms", record.first("scheduled_ns")),
            ("ttft_ms", record.first_token_ns),
        ):
            if at_ns:
                fields[name] = _ms(at_ns - record.arrival_ns)
        if record.intervals_ms is not None:
            fields["itl_p50_ms"], fields["itl_p99_ms"] = record.intervals_ms
        if interval_ns := record.engine_interval_ns:
            fields["itl_engine_ms"] = _ms(interval_ns)
    fields["e2e_ms"] = _ms(record.ended_ns - record.arrival_ns)
    if finish := record.finish:
        fields["finish"] = finish
    if record.error_code:
        fields["error"] = record.error_code
    fields["client"] = record.client
    return fields


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def as_text(fields: dict[str, object]) -> str:
    """key=value; what holds a blank, a quote or a line end is a JSON string."""
    return " ".join([f"{name}={_word(value)}" for name, value in fields.items()])


def _word(value: object) -> str:
    if value.__class__ in _NUMBERS:
        return str(value)
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class RequestLog:
    """Says a line for each record to `write`: all of a round at once, since each call wakes the log writer's thread."""

    def __init__(self, lines: Lines, write: Callable[[str], None]) -> None:
        self._lines = lines
        self._write = write

    def tell(self, records: Sequence[RequestRecord]) -> None:
        now = time.time() - time.monotonic_ns() / 1e9
        self._write(
            "".join([self._line(record, now + record.ended_ns / 1e9) for record in records])
        )

    def _line(self, record: RequestRecord, ended_s: float) -> str:
        fields, lines = fields_of(record), self._lines
        if lines.is_json:
            return json.dumps({**lines.fields(ended_s, "info", "request"), **fields}) + "\n"
        return f"{lines.time_of(ended_s)} INFO {lines.process} request {as_text(fields)}\n"
