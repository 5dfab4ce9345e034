"""Whether a prompt of 200,000 tokens delays anybody else: first tokens and gaps of short streams, beside it and without it.

Owns: a server with the simulated runner for each number of --tokenizer-threads, short streams at a fixed rate, and meanwhile one
long chat prompt behind the other: its JSON, its template and its tokens are all made in the same front end, which then refuses it,
since it is longer than the model's context. Never: knows the inside of the server.

    ttft   from the request to its first content frame        gap   between two content frames of one short stream
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import click
from bench_common import Bar, Row, end_on_sigterm, percentile, print_bars, print_table, write_json
from frontend_servers import OurServer

SENTENCE = "The quick brown fox jumps over the lazy dog, and 12 others. "
TOKENS_PER_SENTENCE = 16
COLUMNS = "threads repeat long_prompts streams ttft_p50_ms ttft_p99_ms ttft_max_ms gap_p50_ms gap_p99_ms gap_max_ms"


async def short_stream(session: aiohttp.ClientSession, url: str) -> tuple[float, list[float]]:
    """(ms to the first content, ms between the others) of a stream of 20 tokens."""
    body = {
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": 20,
        "stream": True,
        "ignore_eos": True,
    }
    begin = time.monotonic()
    times = []
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if b'"content":"' in line and b'"content":""' not in line:
                times.append(time.monotonic())
    gaps = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    return (times[0] - begin) * 1e3, gaps


async def long_prompts(session: aiohttp.ClientSession, url: str, body: bytes) -> int:
    """Ask one long prompt behind the other until cancelled; a cancelled client gives back how many were answered."""
    count = 0
    headers = {"Content-Type": "application/json"}
    try:
        while True:
            async with session.post(url, data=body, headers=headers) as response:
                answer = await response.json()
                if (answer.get("error") or {}).get("code") != "context_length_exceeded":
                    raise SystemExit(f"the long prompt was not tokenised: {str(answer)[:500]}")
                count += 1
    except asyncio.CancelledError:
        return count


async def measure(port: int, *, seconds: float, rate: float, long_body: bytes | None) -> Row:
    """Short streams for so many seconds, beside long prompts or alone."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await short_stream(session, url)  # the first request of a server is like no other
        running = None
        if long_body is not None:
            running = asyncio.create_task(long_prompts(session, url, long_body))
            await asyncio.sleep(0.5)
        streams = []
        for _ in range(int(seconds * rate)):
            streams.append(asyncio.create_task(short_stream(session, url)))
            await asyncio.sleep(1 / rate)
        found = await asyncio.gather(*streams)
        num_long = 0
        if running is not None:
            running.cancel()
            num_long = await running
    ttfts = [ttft for ttft, _ in found]
    gaps = [gap for _, each in found for gap in each]
    return {
        "long_prompts": num_long,
        "streams": len(found),
        "ttft_p50_ms": percentile(ttfts, 50),
        "ttft_p99_ms": percentile(ttfts, 99),
        "ttft_max_ms": max(ttfts),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
        "gap_max_ms": max(gaps),
    }


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--threads", default="1,2", show_default=True, help="--tokenizer-threads, with commas"
)
@click.option("--tokens", "num_tokens", default=200_000, show_default=True, help="of a long prompt")
@click.option("--seconds", default=10.0, show_default=True, help="of each measurement")
@click.option("--rate", default=10.0, show_default=True, help="short streams per second")
@click.option("--repeats", default=3, show_default=True, help="pairs: their medians are compared")
@click.option("--step-ms", default=10.0, show_default=True, help="step period of the simulated GPU")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the rows there")
def main(
    threads: str,
    num_tokens: int,
    seconds: float,
    rate: float,
    repeats: int,
    step_ms: float,
    json_path: str | None,
) -> None:
    end_on_sigterm()
    text = SENTENCE * (num_tokens // TOKENS_PER_SENTENCE)
    long_body = json.dumps(
        {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    ).encode()
    rows: list[Row] = []
    bars: list[Bar] = []
    for num_threads in [int(each) for each in threads.split(",")]:
        words = ("--tokenizer-threads", str(num_threads))
        more: dict[str, list[float]] = {"ttft_p99_ms": [], "gap_p99_ms": []}
        with (
            tempfile.TemporaryDirectory(prefix="bench-tokenizer-") as name,
            OurServer(Path(name), 64, 20, step_ms, 0, False, words, pins=False) as server,
        ):
            for repeat in range(repeats):
                alone, beside = (
                    asyncio.run(measure(server.port, seconds=seconds, rate=rate, long_body=body))
                    for body in (None, long_body)
                )
                rows += [{"threads": num_threads, "repeat": repeat, **r} for r in (alone, beside)]
                for key, found in more.items():
                    found.append(beside[key] - alone[key])
        for key, found in more.items():
            claim = f"{num_threads} threads: {key} more beside long prompts"
            bars.append(Bar(claim, statistics.median(found), step_ms))
    print_table(rows, COLUMNS.split())
    write_json(json_path, rows)
    if not print_bars(bars):
        sys.exit(1)


if __name__ == "__main__":
    main()
