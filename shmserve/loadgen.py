"""An open-loop load generator for any OpenAI-compatible server, and what its clients would have felt.

Owns: when requests go out, when their tokens come back, and the figures made of that. Never: imports another module of the
package, judges a server, or lets a slow server slow the arrivals down.

    open loop      request i is due at a time drawn beforehand (Poisson arrivals at `rate`); it goes out then, whether or not
                   any other has come back. TTFT and end-to-end time count from the time it was *due*, so a generator that is
                   late makes the server look worse, never better, and its lateness is reported
    closed loop    `concurrency` clients, each sends its next request when its last has ended; due means sent
    ITL            the gap between two frames with content; frames that came in one read have gaps of 0
    TPOT           (last token - first token) / (tokens - 1) of one request; tokens are the server's usage if it gives one,
                   else frames with content

One asyncio loop in one process. Called by `shmserve bench` and by tools; no other process imports it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to send where and when. Exactly one of `rate` and `concurrency` is set.

    Request i takes prompts[i % len] and max_tokens[i % len]. A prompt is text, or token ids (completions only).
    `extra` is merged into every body, last.
    """

    base_url: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    num_requests: int
    rate: float | None = None  # requests per second
    concurrency: int | None = None
    path: str = CHAT_PATH
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give a rate (open loop) or a concurrency (closed loop), not both")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.num_requests < 1 or not self.prompts or not self.max_tokens:
            raise ValueError("num_requests, prompts and max_tokens must not be empty")
        if self.path not in (CHAT_PATH, COMPLETIONS_PATH):
            raise ValueError(f"path must be {CHAT_PATH} or {COMPLETIONS_PATH}, got {self.path}")
        if self.path == CHAT_PATH and not all(isinstance(p, str) for p in self.prompts):
            raise ValueError(f"prompts of token ids need {COMPLETIONS_PATH}")

    def body(self, index: int) -> dict[str, Any]:
        """The JSON body of request `index`."""
        prompt = self.prompts[index % len(self.prompts)]
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens[index % len(self.max_tokens)],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.path == CHAT_PATH:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body | dict(self.extra)

    def due_times_s(self) -> list[float]:
        """Open loop: when each request is due, from the start; the same for the same seed."""
        assert self.rate is not None, "a closed loop has no due times"
        draw = random.Random(self.seed)
        times, at = [], 0.0
        for _ in range(self.num_requests):
            times.append(at)
            at += draw.expovariate(self.rate)
        return times


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. Times are CLOCK_MONOTONIC ns; `error` is None exactly if the response was whole.

    An error is the status of a refusal ("503"), or "connect", "timeout", "broken stream", or "error in stream".
    """

    index: int
    due_ns: int
    sent_ns: int
    end_ns: int
    status: int | None
    error: str | None
    arrivals_ns: tuple[int, ...] = ()
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return (self.arrivals_ns[0] - self.due_ns) / 1e6 if self.arrivals_ns else None

    @property
    def e2e_ms(self) -> float:
        return (self.end_ns - self.due_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        if self.num_tokens < 2 or len(self.arrivals_ns) < 2:
            return None
        return (self.arrivals_ns[-1] - self.arrivals_ns[0]) / 1e6 / (self.num_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        return [gap / 1e6 for gap in np.diff(self.arrivals_ns).tolist()]

    @property
    def lateness_ms(self) -> float:
        """How much later than due the generator sent it."""
        return (self.sent_ns - self.due_ns) / 1e6


@dataclass(frozen=True, slots=True)
class LoadReport:
    """All results of one run, in the order of their index. Latencies count whole responses only; errors are counted apart."""

    results: tuple[RequestResult, ...]
    wall_s: float

    @property
    def whole(self) -> list[RequestResult]:
        return [result for result in self.results if result.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """How many requests ended in each error."""
        return dict(Counter(result.error for result in self.results if result.error is not None))

    def summary(self) -> dict[str, Any]:
        """One flat row: counts, rates, percentiles; None where there is nothing to count."""
        whole = self.whole
        num_tokens = sum(result.num_tokens for result in whole)
        row: dict[str, Any] = {
            "requests": len(self.results),
            "ok": len(whole),
            "errors": self.errors,
            "wall_s": self.wall_s,
            "requests_per_s": len(whole) / self.wall_s,
            "output_tokens": num_tokens,
            "tokens_per_s": num_tokens / self.wall_s,
        }
        series: dict[str, Sequence[float | None]] = {
            "ttft": [result.ttft_ms for result in whole],
            "itl": [gap for result in whole for gap in result.itls_ms],
            "tpot": [result.tpot_ms for result in whole],
            "e2e": [result.e2e_ms for result in whole],
            "lateness": [result.lateness_ms for result in self.results],
        }
        for name, values in series.items():
            present = [value for value in values if value is not None]
            for percent in PERCENTILES:
                key = f"{name}_p{percent}_ms"
                row[key] = float(np.percentile(present, percent)) if present else None
            row[f"{name}_max_ms"] = max(present, default=None)
        return row


async def run_load(
    spec: LoadSpec, on_result: Callable[[RequestResult], None] | None = None
) -> LoadReport:
    """Sends every request of the spec and waits for their ends. Never raises for what a server does: that is a result."""
    timeout = aiohttp.ClientTimeout(total=spec.timeout_s)
    headers = {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
    # No limit on connections: one that waited for another would close the loop.
    connector = aiohttp.TCPConnector(limit=0)
    results: list[RequestResult] = []

    def keep(result: RequestResult) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        start_ns = time.monotonic_ns()
        if spec.rate is not None:
            await _open_loop(session, spec, start_ns, keep)
        else:
            await _closed_loop(session, spec, keep)
        wall_s = (time.monotonic_ns() - start_ns) / 1e9
    return LoadReport(tuple(sorted(results, key=lambda result: result.index)), wall_s)


async def _open_loop(
    session: aiohttp.ClientSession,
    spec: LoadSpec,
    start_ns: int,
    keep: Callable[[RequestResult], None],
) -> None:
    async def one(index: int, due_ns: int) -> None:
        keep(await _request(session, spec, index, due_ns))

    async with asyncio.TaskGroup() as tasks:
        for index, due_s in enumerate(spec.due_times_s()):
            due_ns = start_ns + int(due_s * 1e9)
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            tasks.create_task(one(index, due_ns))


async def _closed_loop(
    session: aiohttp.ClientSession, spec: LoadSpec, keep: Callable[[RequestResult], None]
) -> None:
    indices = iter(range(spec.num_requests))

    async def client() -> None:
        for index in indices:  # one iterator for all clients: each index is taken once
            keep(await _request(session, spec, index, time.monotonic_ns()))

    assert spec.concurrency is not None, "an open loop has no clients"
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(spec.concurrency, spec.num_requests)):
            tasks.create_task(client())


class _Reading:
    """What has been read of one response so far."""

    def __init__(self) -> None:
        self.sent_ns = time.monotonic_ns()
        self.status: int | None = None
        self.arrivals_ns: list[int] = []
        self.usage: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.is_done = False
        self.has_failed = False

    def take(self, event: bytes, at_ns: int) -> None:
        """One `data:` payload. Raises ValueError if it is not the JSON of a chunk."""
        if event == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(event)
        if not isinstance(chunk, dict):
            raise ValueError("an event is not a JSON object")
        if chunk.get("error") is not None:
            self.has_failed = True
            return
        self.usage = chunk.get("usage") or self.usage
        has_content = False
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            has_content = has_content or bool(text)
        if has_content:
            self.arrivals_ns.append(at_ns)

    def error(self) -> str | None:
        if self.status != 200:
            return str(self.status)
        if self.has_failed:
            return "error in stream"
        return None if self.is_done else "broken stream"

    def result(self, index: int, due_ns: int, error: str | None) -> RequestResult:
        return RequestResult(
            index=index,
            due_ns=due_ns,
            sent_ns=self.sent_ns,
            end_ns=time.monotonic_ns(),
            status=self.status,
            error=error,
            arrivals_ns=tuple(self.arrivals_ns),
            num_tokens=self.usage.get("completion_tokens", len(self.arrivals_ns)),
            num_prompt_tokens=self.usage.get("prompt_tokens"),
            finish_reason=self.finish_reason,
        )


async def _request(
    session: aiohttp.ClientSession, spec: LoadSpec, index: int, due_ns: int
) -> RequestResult:
    reading = _Reading()
    url = spec.base_url.rstrip("/") + spec.path
    try:
        async with session.post(url, json=spec.body(index)) as response:
            reading.status = response.status
            if response.status == 200:
                async for event, at_ns in _events(response.content):
                    reading.take(event, at_ns)
            else:
                await response.read()
        error = reading.error()
    except TimeoutError:
        error = "timeout"
    except (aiohttp.ClientError, ConnectionError, ValueError, AttributeError, TypeError):
        # Before a status the server could not be reached; after it, what it sent is cut short or no stream of chunks.
        error = "connect" if reading.status is None else "broken stream"
    return reading.result(index, due_ns, error)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, int]]:
    """Payloads of `data:` lines, each with the time of the read that completed it."""
    rest = b""
    async for data in content.iter_any():
        at_ns = time.monotonic_ns()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), at_ns
