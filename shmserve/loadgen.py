"""An open-loop load generator for any OpenAI-compatible server.

Owns: when requests go out, and when their tokens come back. Never: judges a server, or lets a slow one slow the arrivals down.

    open loop      request i is due at a time drawn beforehand (Poisson arrivals at `rate`); it goes out then, whether or not
                   any other has come back. TTFT and end-to-end time count from the time it was *due*, so a generator that is
                   late makes the server look worse, never better, and its lateness is reported
    closed loop    `concurrency` clients, each sends its next request when its last has ended; due means sent

One asyncio loop in one process. Called by `shmserve bench` and by tools; no other process imports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from shmserve.load_report import LoadReport, RequestResult
from shmserve.load_spec import LoadSpec
from shmserve.stream_reading import Reading, events

Keep = Callable[[RequestResult], None]


async def run_load(spec: LoadSpec, on_result: Keep | None = None) -> LoadReport:
    """Sends every request of the spec and waits for their ends. `on_result` is told of each that counts, as it ends.

    Never raises for what a server does: that is a result. Raises TargetError for an authority's file that is none.
    """
    results: list[RequestResult] = []

    def keep(result: RequestResult) -> None:
        if spec.is_counted(result.index):
            results.append(result)
            if on_result is not None:
                on_result(result)

    async with spec.target.session(spec.timeout_s) as session:
        if spec.rate is not None:
            await _open_loop(session, spec, keep)
        else:
            await _closed_loop(session, spec, keep)
    return LoadReport.of(results)


async def _open_loop(session: aiohttp.ClientSession, spec: LoadSpec, keep: Keep) -> None:
    async def one(index: int, due_ns: int) -> None:
        keep(await _request(session, spec, index, due_ns))

    due_times_s = spec.due_times_s()
    start_ns = time.monotonic_ns()
    async with asyncio.TaskGroup() as tasks:
        for index, due_s in enumerate(due_times_s):
            due_ns = start_ns + int(due_s * 1e9)
            wait_ns = due_ns - time.monotonic_ns()
            if wait_ns > 0:
                await asyncio.sleep(wait_ns / 1e9)
            tasks.create_task(one(index, due_ns))


async def _closed_loop(session: aiohttp.ClientSession, spec: LoadSpec, keep: Keep) -> None:
    indices = spec.indices()
    counted_from_ns = 0

    async def client() -> None:
        nonlocal counted_from_ns
        for index in indices:  # one iterator for all clients: each index is taken once
            now_ns = time.monotonic_ns()
            if index == spec.num_warmup:
                counted_from_ns = now_ns
            spent_s = (now_ns - counted_from_ns) / 1e9
            is_over = spec.duration_s is not None and spent_s >= spec.duration_s
            if is_over and spec.is_counted(index):
                return
            keep(await _request(session, spec, index, now_ns))

    assert spec.concurrency is not None, "an open loop has no clients"
    num_clients = spec.concurrency
    if spec.num_requests is not None:
        num_clients = min(num_clients, spec.num_warmup + spec.num_requests)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_clients):
            tasks.create_task(client())


async def _request(
    session: aiohttp.ClientSession, spec: LoadSpec, index: int, due_ns: int
) -> RequestResult:
    body = spec.body(index)
    reading = Reading()
    error: str | None
    try:
        async with session.post(spec.target.url(spec.path), json=body) as response:
            reading.status = response.status
            if response.status == 200:
                async for event, at_ns in events(response.content):
                    reading.take(event, at_ns)
            else:
                reading.refused(await response.read())
        error = reading.error()
    except TimeoutError:
        error = "timeout"
    except (aiohttp.ClientError, ConnectionError, ValueError, AttributeError, TypeError) as broken:
        # Before a status the server could not be reached; after it, what it sent is cut short or no stream of chunks.
        error = "connect" if reading.status is None else "broken stream"
        reading.message = reading.message or spec.target.why(broken)
    return result_of(reading, index, due_ns, error)


def result_of(reading: Reading, index: int, due_ns: int, error: str | None) -> RequestResult:
    """The result of a request that has just ended."""
    return RequestResult(
        index=index,
        due_ns=due_ns,
        sent_ns=reading.sent_ns,
        end_ns=time.monotonic_ns(),
        status=reading.status,
        error=error,
        arrivals_ns=tuple(reading.arrivals_ns),
        num_tokens=reading.usage.get("completion_tokens", len(reading.arrivals_ns)),
        num_prompt_tokens=reading.usage.get("prompt_tokens"),
        finish_reason=reading.finish_reason,
        lags=tuple(reading.lags),
        message=reading.message,
    )
