"""What docs/tuning.md shows, measured: each policy where its queue is full, rings of two sizes, frames of several tokens.

Owns: the scenarios, and what their clients saw. Never: draws (`plot_tuning.py`). All on the simulated runner, over loopback, and with one
thing disturbed for a known time: a process that is stopped (SIGSTOP), or a client that does not read.

    made    a token's own time, as `timing.token_us` tells it        read    when the client had the frame that it came in
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench_common import Row, percentile, process_cpu_ns, two_cores
from frontend_servers import OurServer
from timed_exchange import READ_BYTES, Exchange, request_bytes

STEP_MS = 4.48
NUM_STREAMS = 16
SMALL_RING = 512
DEFAULT_RING = 16_384
STOP_S = 1.0
BEFORE_S = 0.5
SMALL_BUFFER = 4096
SLOW_S = 2.5
SUBMIT_SLOTS = 64
LONG_STEP_S = 2.5
SUBMIT_RATE = 60.0
INTERVALS = (1, 2, 4, 8)
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Token:
    """When one token was made and when it was read, in s since the scenario's beginning."""

    made_s: float
    read_s: float


@dataclass(slots=True)
class Seen:
    """One scenario of one setting: what is drawn, and the row of the table."""

    name: str
    row: Row
    streams: list[list[Token]] = field(default_factory=list)
    disturbed_s: tuple[float, float] = (0.0, 0.0)
    answers: list[tuple[float, float, int]] = field(default_factory=list)  # sent, took (s), status


async def _ask(
    port: int, fields: Row, *, receive_buffer: int = 0, deaf_s: tuple[float, float] | None = None
) -> Exchange:
    """One request, read to its end; from `deaf_s[0]` to `deaf_s[1]` after its sending nothing is read."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        exchange = Exchange(time.monotonic_ns())
        await loop.sock_sendall(sock, request_bytes(PATH, fields))
        begin = loop.time()
        while not exchange.is_whole():
            if deaf_s is not None and loop.time() - begin >= deaf_s[0]:
                await asyncio.sleep(begin + deaf_s[1] - loop.time())
                deaf_s = None
            part = await loop.sock_recv(sock, READ_BYTES if not receive_buffer else SMALL_BUFFER)
            exchange.take(part, time.monotonic_ns())
        return exchange


def tokens_of(exchange: Exchange, begin_ns: int) -> list[Token]:
    """Each token of a stream that was asked for its times."""
    sent_s = (exchange.sent_ns - begin_ns) / 1e9
    return [
        Token(sent_s + made_us / 1e6, (read_ns - begin_ns) / 1e9)
        for read_ns, timing in exchange.timings()
        if "stamps_us" not in timing  # the end, which tells of all of them
        for made_us in timing["token_us"]
    ]


def error_of(exchange: Exchange) -> str:
    """The code of the error that it ended with; "" if it ended well."""
    told = [told["error"]["code"] for _, told in exchange.objects() if "error" in told]
    return str(told[0]) if told else ""


def longest_gap_ms(times_s: Sequence[float]) -> float:
    return max((b - a for a, b in itertools.pairwise(times_s)), default=0.0) * 1000


def figures_of(streams: list[list[Token]], exchanges: list[Exchange]) -> Row:
    """Over all streams of a scenario: what their clients had, and how late."""
    lags = [(token.read_s - token.made_s) * 1000 for tokens in streams for token in tokens]
    num_frames = sum(len({token.read_s for token in tokens}) for tokens in streams)
    codes = [code for each in exchanges if (code := error_of(each))]
    return {
        "streams": len(streams),
        "whole": len(streams) - len(codes),
        "error": ", ".join(sorted(set(codes))) or "-",
        "tokens_each": sum(map(len, streams)) / len(streams),
        "lag_p50_ms": percentile(lags, 50),
        "lag_max_ms": max(lags, default=None),
        "made_gap_max_ms": max(longest_gap_ms([t.made_s for t in tokens]) for tokens in streams),
        "reads": num_frames,
    }


def completion(num_tokens: int, seed: int, **more: object) -> Row:
    """A streamed completion of exactly so many tokens that tells its times."""
    common = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    return {**common, "seed": seed, "stream": True, "stream_options": {"include_timing": True}, **more}  # fmt: skip


@asynccontextmanager
async def serving(
    *options: str, step_ms: float = STEP_MS, num_warm_tokens: int = 4
) -> AsyncIterator[OurServer]:
    """A simulated server with these options, one warm request behind it."""
    core, _ = two_cores()
    with tempfile.TemporaryDirectory() as folder:
        server = OurServer(Path(folder), 256, 100, step_ms, core, False, options, pins=False)
        with server:
            await _ask(server.port, completion(num_warm_tokens, 1))
            yield server


async def _stop(pid: int, seconds: float) -> tuple[float, float]:
    """Stop a process for so long; when, in s of CLOCK_MONOTONIC."""
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return begin, time.monotonic()


async def token_ring(policy: str, num_slots: int) -> Seen:
    """The front end stands still for a second beside streams: what does the worker do with their tokens?"""
    options = (f"--token-policy={policy}", f"--token-ring-slots={num_slots}")
    num_tokens = int((BEFORE_S + STOP_S + 1.0) * 1000 / STEP_MS)
    async with serving(*options) as server:
        begin_ns = time.monotonic_ns()
        asked = [
            asyncio.create_task(_ask(server.port, completion(num_tokens, seed)))
            for seed in range(NUM_STREAMS)
        ]
        await asyncio.sleep(BEFORE_S)
        stopped = await _stop(server.measured_pid, STOP_S)
        exchanges = list(await asyncio.gather(*asked))
        ring = await asyncio.to_thread(ring_words, server.port)
    streams = [tokens_of(exchange, begin_ns) for exchange in exchanges]
    row: Row = {"policy": policy, "slots": num_slots, **figures_of(streams, exchanges), **ring}
    disturbed = (stopped[0] - begin_ns / 1e9, stopped[1] - begin_ns / 1e9)
    return Seen(f"{policy}, {num_slots:,} slots", row, streams, disturbed)


def ring_words(port: int) -> Row:
    """What the writer of the token ring had to do."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    label = r'\{ring="http0-worker0\.tokens"\}'
    found = dict(re.findall(rf"^shmserve_ring_(\w+?)(?:_total)?{label} (\S+)", text, re.MULTILINE))
    names = ("high_water", "coalesced", "dropped", "blocked_seconds")
    return {name: float(found[name]) for name in names}


async def slow_client(policy: str) -> Seen:
    """One client reads nothing for a while; others do."""
    num_tokens = int((BEFORE_S + SLOW_S + 1.0) * 1000 / STEP_MS)
    async with serving("--slow-client-bytes=1048576") as server:
        begin_ns = time.monotonic_ns()
        deaf_s = (BEFORE_S, BEFORE_S + SLOW_S)
        slow = _ask(server.port, completion(num_tokens, 1, on_slow_client=policy), receive_buffer=SMALL_BUFFER, deaf_s=deaf_s)  # fmt: skip
        others = [_ask(server.port, completion(num_tokens, seed)) for seed in range(2, 6)]
        exchanges = list(await asyncio.gather(slow, *others))
    streams = [tokens_of(exchange, begin_ns) for exchange in exchanges]
    row: Row = {"policy": policy, **figures_of(streams[:1], exchanges[:1])}
    beside = figures_of(streams[1:], exchanges[1:])
    row |= {f"others_{name}": beside[name] for name in ("whole", "lag_p50_ms", "lag_max_ms")}
    return Seen(policy, row, streams, deaf_s)


async def submit_ring(policy: str) -> Seen:
    """The worker computes one long step, reads no requests meanwhile, and they come."""
    options = (f"--submit-policy={policy}", f"--submit-ring-slots={SUBMIT_SLOTS}")
    async with serving(*options, step_ms=LONG_STEP_S * 1000, num_warm_tokens=1) as server:
        begin = time.monotonic()
        asked = [asyncio.create_task(_ask(server.port, completion(1, 0)))]
        for i in range(1, int((LONG_STEP_S + 0.5) * SUBMIT_RATE)):
            await asyncio.sleep(max(0.0, begin + i / SUBMIT_RATE - time.monotonic()))
            asked.append(asyncio.create_task(_ask(server.port, completion(1, i))))
        exchanges = list(await asyncio.gather(*asked))
    answers = [
        (each.sent_ns / 1e9 - begin, (each.reads[0][1] - each.sent_ns) / 1e9, each.status)
        for each in exchanges
    ]
    refused = [took_s for _, took_s, status in answers if status == 503]
    row: Row = {
        "policy": policy,
        "requests": len(answers),
        "ok": sum(status == 200 for _, _, status in answers),
        "refused": len(refused),
        "refusal_p50_ms": None if not refused else (percentile(refused, 50) or 0.0) * 1000,
    }
    return Seen(policy, row, [], (0.0, LONG_STEP_S), answers)


async def stream_interval(num_tokens_of_frame: int, num_streams: int, num_tokens: int) -> Seen:
    """What a token costs the front end, and how it comes, when so many go into one frame."""
    fields = completion(num_tokens, 1, stream_interval=num_tokens_of_frame)
    del fields["stream_options"]  # who asks for times is written another way
    async with serving() as server:
        await asyncio.gather(*(_ask(server.port, fields) for _ in range(num_streams)))
        cpu_ns = process_cpu_ns(server.measured_pid)
        exchanges = await asyncio.gather(*(_ask(server.port, fields) for _ in range(num_streams)))
        cpu_ns = process_cpu_ns(server.measured_pid) - cpu_ns
    gaps, num_frames = [], 0
    for exchange in exchanges:
        at_s = [at_ns / 1e9 for at_ns, _ in exchange.objects()]
        gaps += [(b - a) * 1000 for a, b in itertools.pairwise(at_s)]
        num_frames += len(at_s)
    row: Row = {
        "stream_interval": num_tokens_of_frame,
        "streams": num_streams,
        "frames": num_frames,
        "cpu_us_per_token": cpu_ns / 1000 / (num_streams * num_tokens),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
    }
    return Seen(str(num_tokens_of_frame), row)
