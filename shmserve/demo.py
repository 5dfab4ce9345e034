"""`shmserve demo`: start a server, stream one answer to the terminal, show where the time of its tokens went, stop.

Owns: the demonstration, nothing of the server: it talks to it as any client does, and reads its boards as any observer does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from shmserve.rings.board import BoardReader, HistogramReading
from shmserve.rings.observe import boards_of

PROMPT: Final = "Explain in three sentences why the sky is blue."
READY_TIMEOUT_S: Final = 600.0
HOPS: Final = (
    ("sampled to published", "hop_publish_us"),
    ("published to popped", "hop_pop_us"),
    ("popped to framed", "hop_frame_us"),
    ("framed to written", "hop_write_us"),
)


@dataclass(slots=True)
class Answer:
    """What the client saw; times are seconds."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    took_s: float = 0.0


def run(prompt: str = PROMPT, max_tokens: int = 160) -> int:
    """The whole demonstration; the exit code."""
    console = Console()
    instance = f"demo-{os.getpid()}"
    # Progress and the ready line go to our stderr; stdin is not the server's.
    server = subprocess.Popen(
        [sys.executable, "-m", "shmserve", "start", "--port", "0", "--instance", instance],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = _wait_until_ready(server, instance)
        if url is None:
            return server.wait() or 1
        console.print(f"\n[bold]{prompt}[/bold]\n", highlight=False)
        answer = asyncio.run(_stream(url, prompt, max_tokens))
        print("\n")
        time.sleep(0.3)  # one heartbeat: the front end has folded the times of the last tokens
        _show(console, answer, _hops(instance))
    finally:
        server.terminate()
        code = server.wait()
    return code


def _wait_until_ready(server: subprocess.Popen[str], instance: str) -> str | None:
    """The server's URL once it says that it serves; None if it ended instead."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", file=sys.stderr)
        if "ready:" in line:
            return next(word for word in line.split() if word.startswith("http"))
    return None


async def _stream(url: str, prompt: str, max_tokens: int) -> Answer:
    """Print the answer as it comes."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer()
    begin = last = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.content:
            now = time.monotonic()
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if not text:
                    continue
                if not answer.ttft_s:
                    answer.ttft_s = now - begin
                else:
                    answer.gaps_s.append(now - last)
                last = now
                print(text, end="", flush=True)
    answer.took_s = last - begin
    return answer


def _hops(instance: str) -> dict[str, HistogramReading]:
    """The front end's histograms of this run."""
    for name in boards_of(instance):
        if ".http" in name:
            reader = BoardReader.attach(name)
            try:
                return reader.histograms()
            finally:
                reader.close()
    return {}


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def _show(console: Console, answer: Answer, hops: dict[str, HistogramReading]) -> None:
    table = Table("what", "value", title="one stream, as its client saw it")
    table.add_row("TTFT", f"{answer.ttft_s * 1e3:.1f} ms")
    table.add_row("ITL p50", f"{_quantile(answer.gaps_s, 0.5) * 1e3:.1f} ms")
    table.add_row("ITL p99", f"{_quantile(answer.gaps_s, 0.99) * 1e3:.1f} ms")
    decode_s = answer.took_s - answer.ttft_s
    rate = (answer.num_tokens - 1) / decode_s if decode_s > 0 else 0.0
    table.add_row("tokens", str(answer.num_tokens))
    table.add_row("tokens/s (decode)", f"{rate:.1f}")
    console.print(table)
    path = Table("hop", "mean", "p99 at most", title="where a token's time went behind the model")
    for label, name in HOPS:
        reading = hops.get(name)
        if reading is None or not reading.count:
            continue
        path.add_row(label, f"{reading.sum / reading.count:.0f} us", _bound(reading, 0.99))
    console.print(path)


def _bound(reading: HistogramReading, q: float) -> str:
    """The bucket's upper bound below which `q` of the observations lie."""
    total = 0
    for bound, count in zip(reading.bounds, reading.counts, strict=False):
        total += count
        if total >= q * reading.count:
            return f"{bound} us"
    return f"> {reading.bounds[-1]} us"
