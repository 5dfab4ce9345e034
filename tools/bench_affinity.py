"""Prefix affinity against other ways to choose a worker, on prompts that share long beginnings: hit rate and time to first token.

Owns: servers that differ in --routing only, the workload, and its reduction. Never: knows the inside of the server; hits are what
/metrics says, times are the client's.

    workload   G beginnings of P tokens, each asked R times with an end of its own, in a random order, by C clients at once
    hit_rate   prompt tokens that the workers found in their prefix caches, of those that they looked for
    ttft       from the request to the first byte of its stream's first event
    busiest    the busiest worker's share of the requests, in those that it would have if all had the same

The workers are simulated: every step takes T, and a step computes --budget prompt tokens at most, so a prompt of P tokens that is not
cached costs P / budget steps. A worker's cache holds about half of the beginnings. The servers run at the same time and are asked in
turn, their caches flushed before each round; figures are medians over rounds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    end_on_sigterm,
    median,
    noise_sentence,
    percentile,
    print_bars,
    print_table,
    write_json,
)
from frontend_servers import OurServer
from prometheus_client.parser import text_string_to_metric_families

POLICIES = ("affinity", "round-robin", "least-busy")
MAX_NUM_SEQS = 8
END_TOKENS = 24
COLUMNS = "routing rounds hit_rate ttft_p50_ms ttft_p99_ms requests_per_s busiest noise_cores"


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round asks."""

    num_prefixes: int
    prefix_tokens: int
    num_repeats: int
    num_clients: int
    max_tokens: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids of all requests, in their order. No two rounds share a beginning."""
        draw = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(1_000, 40_000) for _ in range(count)]

        beginnings = [tokens(self.prefix_tokens) for _ in range(self.num_prefixes)]
        prompts = [
            each + tokens(END_TOKENS) for each in beginnings for _ in range(self.num_repeats)
        ]
        draw.shuffle(prompts)
        return prompts


def counters(port: int) -> dict[str, float]:
    """Prompt tokens looked for and found, and sequences by worker."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = {"asked": 0.0, "hit": 0.0}
    names = {
        "shmserve_prefix_query_tokens_total": "asked",
        "shmserve_prefix_hit_tokens_total": "hit",
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                found[names[sample.name]] += sample.value
            elif sample.name == "shmserve_admitted_total":
                found[sample.labels["process"]] = sample.value
    return found


def flush(port: int) -> None:
    """Empty caches, and nothing known of them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/flush_cache")
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"/flush_cache was answered with {answer.status}: {answer.read()!r}")
    connection.close()


def ask(port: int, prompts: list[list[int]], workload: Workload) -> list[float]:
    """Every prompt, by `num_clients` threads; the times to first token in ms. Raises SystemExit if one fails."""
    todo: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for prompt in prompts:
        todo.put(prompt)
    ttfts_ms: list[float] = []
    faults: list[str] = []

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(queue.Empty):
            while not faults:
                body = {
                    "prompt": todo.get_nowait(),
                    "max_tokens": workload.max_tokens,
                    "ignore_eos": True,
                    "stream": True,
                }
                begin = time.monotonic()
                connection.request("POST", "/v1/completions", json.dumps(body))
                response = connection.getresponse()
                first = response.read(1)
                ttfts_ms.append((time.monotonic() - begin) * 1e3)
                rest = response.read()
                if response.status != 200 or not rest.endswith(b"data: [DONE]\n\n"):
                    faults.append(f"{response.status}: {(first + rest)[:300]!r}")

    threads = [threading.Thread(target=client) for _ in range(workload.num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise SystemExit(f"a request failed: {faults[0]}")
    return ttfts_ms


def measure(port: int, prompts: list[list[int]], workload: Workload) -> Row:
    """One round on one server."""
    flush(port)
    before, watch, begin = counters(port), NoiseWatch(), time.monotonic()
    ttfts_ms = ask(port, prompts, workload)
    length_s = time.monotonic() - begin
    grown = {name: value - before[name] for name, value in counters(port).items()}
    shares = [value for name, value in grown.items() if name.startswith("worker")]
    return {
        "hit_rate": grown["hit"] / grown["asked"],
        "ttft_p50_ms": percentile(ttfts_ms, 50),
        "ttft_p99_ms": percentile(ttfts_ms, 99),
        "requests_per_s": len(prompts) / length_s,
        "busiest": max(shares) * len(shares) / sum(shares),
        "noise_cores": watch.cores(),
    }


def bars_of(rows: list[Row]) -> list[Bar]:
    """What affinity is for."""
    by_policy = {row["routing"]: row for row in rows}
    ours, theirs = by_policy["affinity"], by_policy["round-robin"]
    return [
        Bar("hit rate against round robin's", ours["hit_rate"] / theirs["hit_rate"], 1.2, False),
        Bar("TTFT p50 against round robin's", ours["ttft_p50_ms"] / theirs["ttft_p50_ms"], 0.8),
        Bar("requests of the busiest worker against an even share", ours["busiest"], 1.5),
    ]


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--workers", "num_workers", default=2, show_default=True)
@click.option("--prefixes", "num_prefixes", default=12, show_default=True, help="beginnings")
@click.option("--prefix-tokens", default=1536, show_default=True, help="tokens of each")
@click.option("--repeats", "num_repeats", default=8, show_default=True, help="requests of each")
@click.option("--clients", "num_clients", default=4, show_default=True, help="requests at once")
@click.option("--max-tokens", default=8, show_default=True, help="tokens of an answer")
@click.option("--step-ms", default=10.0, show_default=True, help="T of the simulated workers")
@click.option("--budget", default=256, show_default=True, help="prompt tokens of a step")
@click.option("--rounds", "num_rounds", default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the rows there")
def main(
    num_workers: int,
    num_prefixes: int,
    prefix_tokens: int,
    num_repeats: int,
    num_clients: int,
    max_tokens: int,
    step_ms: float,
    budget: int,
    num_rounds: int,
    json_path: str | None,
) -> None:
    end_on_sigterm()
    workload = Workload(num_prefixes, prefix_tokens, num_repeats, num_clients, max_tokens)
    # The simulated worker has room for 2,048 tokens, or the context if that is less, times MAX_NUM_SEQS.
    cache_tokens = MAX_NUM_SEQS * min(2048, prefix_tokens + 128)
    print(
        f"{num_prefixes} beginnings of {prefix_tokens} tokens, {num_repeats} requests each, {num_clients} at once; "
        f"{num_workers} workers with {cache_tokens} tokens of cache, T = {step_ms} ms, {budget} tokens a step"
    )
    rounds: dict[str, list[Row]] = {policy: [] for policy in POLICIES}
    with (
        tempfile.TemporaryDirectory(prefix="bench-affinity-") as name,
        contextlib.ExitStack() as stack,
    ):
        servers = {}
        for policy in POLICIES:
            folder = Path(name) / policy
            folder.mkdir()
            options = ("--workers", str(num_workers), "--routing", policy)
            options += ("--max-model-len", str(prefix_tokens + 128))
            options += ("--max-num-batched-tokens", str(budget))
            server = OurServer(
                folder, MAX_NUM_SEQS, max_tokens, step_ms, 0, False, options, pins=False
            )
            servers[policy] = stack.enter_context(server)
        for number in range(num_rounds):
            prompts = workload.prompts(number)
            for i in range(len(POLICIES)):  # nobody is always first
                policy = POLICIES[(i + number) % len(POLICIES)]
                row = measure(servers[policy].port, prompts, workload)
                rounds[policy].append(row)
                click.echo(
                    f"round {number + 1}, {policy}: {row['hit_rate']:.1%} hits, "
                    f"TTFT p50 {row['ttft_p50_ms']:.0f} ms, p99 {row['ttft_p99_ms']:.0f} ms",
                    err=True,
                )
    rows = [
        {"routing": policy, "rounds": len(each)}
        | {key: median(row[key] for row in each) for key in each[0]}
        for policy, each in rounds.items()
    ]
    print_table(rows, COLUMNS.split())
    write_json(json_path, rows)
    print(noise_sentence(float(row["noise_cores"]) for row in rows))
    if not print_bars(bars_of(rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
