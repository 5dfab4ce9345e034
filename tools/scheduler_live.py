"""What the scheduler does for clients, on the real model over the real server: chunks, the shared prefix, and the start.

Owns: the loads of `bench_scheduler.py chunks`, `prefix` and `start`. Never: reduces over repeats, or prints.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench_common import Row, percentile
from engine_servers import Server, make_prompts, our_server

from shmserve.load_report import LoadReport
from shmserve.load_spec import COMPLETIONS_PATH, LoadSpec
from shmserve.loadgen import run_load

NUM_STREAMS = 8
STREAM_TOKENS = 600
LONG_TOKENS = 4000
PREFIX_TOKENS = 2000
TAIL_TOKENS = 8
SETTLE_S = 1.0


def started(folder: Path, options: str = "") -> Server:
    return our_server(folder, "", 0, 16, f"--max-model-len 8192 {options}")


def load_spec(server: Server, prompts: tuple[str, ...], num_tokens: int) -> LoadSpec:
    return LoadSpec(
        base_url=server.url,
        model=server.model,
        prompts=prompts,
        max_tokens=(num_tokens,),
        num_requests=len(prompts),
        concurrency=len(prompts),
        path=COMPLETIONS_PATH,
        extra={"ignore_eos": True, "temperature": 0},
    )


def whole(report: LoadReport) -> LoadReport:
    if report.errors:
        raise SystemExit(f"requests failed: {report.errors}")
    return report


async def _long_prompt_meets_streams(server: Server, seed: int) -> tuple[LoadReport, LoadReport]:
    """A task for the streams, and the long prompt once they decode."""
    prompts = make_prompts(NUM_STREAMS, 32, seed)
    streams = asyncio.create_task(run_load(load_spec(server, prompts, STREAM_TOKENS)))
    await asyncio.sleep(SETTLE_S)
    long = await run_load(load_spec(server, make_prompts(1, LONG_TOKENS, seed + 1), 1))
    return whole(await streams), whole(long)


def chunks(server: Server, seed: int) -> Row:
    """Gaps between tokens of the running streams that lie, in part at least, within the long prompt's time to its first token."""
    streams, long = asyncio.run(_long_prompt_meets_streams(server, seed))
    result = long.results[0]
    begin_ns, end_ns = result.sent_ns, result.arrivals_ns[0]
    if any(not s.arrivals_ns[0] < begin_ns < end_ns < s.arrivals_ns[-1] for s in streams.results):
        raise SystemExit("the streams did not all decode while the long prompt was computed")
    gaps_ms = [
        (after - before) / 1e6
        for stream in streams.results
        for before, after in zip(stream.arrivals_ns, stream.arrivals_ns[1:], strict=False)
        if after > begin_ns and before < end_ns
    ]
    return {
        "prompt_tokens": result.num_prompt_tokens,
        "num_gaps": len(gaps_ms),
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "itl_max_ms": max(gaps_ms),
        "ttft_long_ms": result.ttft_ms,
    }


def prefix(server: Server, seed: int) -> Row:
    """Two prompts that share all but their last words, one after the other."""
    shared, *tails = make_prompts(1, PREFIX_TOKENS, seed) + make_prompts(2, TAIL_TOKENS, seed + 1)
    first, second = (
        whole(asyncio.run(run_load(load_spec(server, (f"{shared} {tail}",), 1)))).results[0]
        for tail in tails
    )
    assert first.ttft_ms is not None and second.ttft_ms is not None
    return {
        "prompt_tokens": first.num_prompt_tokens,
        "ttft_first_ms": first.ttft_ms,
        "ttft_second_ms": second.ttft_ms,
        "speedup": first.ttft_ms / second.ttft_ms,
    }


def warm(server: Server) -> None:
    whole(asyncio.run(run_load(load_spec(server, make_prompts(1, 16, 0), 2))))


def start(folder: Path) -> Row:
    """From the supervisor's start to the first 200 of /health: the worker's start to READY is within it."""
    begin = time.monotonic()
    with started(folder):
        return {"ready_s": time.monotonic() - begin}
