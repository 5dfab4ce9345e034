"""Do the hops that a client is told of add up to what it measured itself? For each API, streamed and plain, on the simulated runner.

One request after the other on one connection, so that nothing waits behind anything: what is left between the client's clock and the sum
of the hops is the way in before `arrival` (the client's send, the kernel, the event loop's turn, the head) and the way out behind the last
stamp (the kernel, the client's wakeup; of a plain answer its JSON and its writing, too). The bars: its median is under 1 ms, and no hop
is negative.

    sum of a stream    arrival .. written, of its first token and of its last       client    request sent .. the read that brought that frame
    sum of an answer   arrival .. framed of its last token                          client    request sent .. the read that made it whole
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    as_written,
    end_on_sigterm,
    noise_sentence,
    percentile,
    print_bars,
    print_table,
    two_cores,
    write_json,
)
from frontend_servers import OurServer
from timed_exchange import Exchange, request_bytes

MOST_DIFFERENCE_US = 1_000
PROMPT = "Why is the sky blue?"
WAY_IN = ("arrival", "parsed", "tokenised", "submitted", "admitted", "first_scheduled")
WAY_OUT = ("sampled", "published", "popped", "framed", "written")
STAMPS = (*WAY_IN, "prefill_end", *WAY_OUT)
FIRST, LAST = "first token", "last token"
KINDS = ("sum", "client", "client - sum")
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    fields: dict[str, Any]
    is_streamed: bool

    def request(self) -> bytes:
        return request_bytes(self.path, self.fields | {"stream": self.is_streamed})


def cases(num_tokens: int) -> list[Case]:
    """Every API that tells its times, streamed and plain."""
    common = {"max_tokens": num_tokens, "ignore_eos": True, "include_timing": True}
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
    apis = (
        ("chat", "/v1/chat/completions", common | {"messages": [{"role": "user", "content": PROMPT}]}),
        ("completions", "/v1/completions", common | {"prompt": PROMPT}),
        ("generate", "/generate", {"text": PROMPT, "sampling_params": sampling}),
    )  # fmt: skip
    return [
        Case(f"{name} {'stream' if is_streamed else 'plain'}", path, fields, is_streamed)
        for name, path, fields in apis
        for is_streamed in (True, False)
    ]


def hops_of(told: dict[str, int | None], names: tuple[str, ...], of: str) -> dict[str, float]:
    """The time between each two neighbours that are known."""
    known = [(name, at) for name in names if (at := told[name]) is not None]
    return {f"{of}: {a} > {b}": y - x for (a, x), (b, y) in itertools.pairwise(known)}


def measures_of(exchange: Exchange, is_streamed: bool) -> dict[str, float]:
    """What one request took, by name, in us."""
    timings = [((at_ns - exchange.sent_ns) / 1000, timing) for at_ns, timing in exchange.timings()]
    end = timings[-1][1]
    first, last = end["stamps_us"], end["last_token_us"]
    found = hops_of(first, STAMPS, FIRST) | hops_of(last, WAY_OUT, LAST)
    sums = {LAST: last["written"] if is_streamed else last["framed"]}
    seen = {LAST: timings[-1][0]}
    if is_streamed:
        frames = [at_us for at_us, timing in timings if timing.get("token_us")]
        sums[FIRST] = first["written"]
        seen = {FIRST: frames[0], LAST: frames[-1]}
    for of, sum_us in sorted(sums.items()):
        found[f"{of}: sum"] = sum_us
        found[f"{of}: client"] = seen[of]
        found[f"{of}: client - sum"] = seen[of] - sum_us
    return found


def measure(port: int, case: Case, num_requests: int, num_warm: int) -> list[dict[str, float]]:
    """The measures of each request of one case, the first few left out."""
    request = case.request()
    found = []
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_warm + num_requests):
            exchange = Exchange(time.monotonic_ns())
            sock.sendall(request)
            exchange.read_from(sock)
            if exchange.status != 200:
                raise SystemExit(f"{case.name}: answered with {bytes(exchange.data[:500])!r}")
            found.append(measures_of(exchange, case.is_streamed))
    return found[num_warm:]


def rows_of(case: str, measures: list[dict[str, float]]) -> list[Row]:
    """One row a measure."""
    rows = []
    for name in measures[0]:
        values = [each[name] for each in measures]
        row: Row = {"case": case, "measure": name, "requests": len(values)}
        row |= {f"p{p}_us": percentile(values, p) for p in (50, 99)} | {"least_us": min(values)}
        rows.append(row)
    return rows


def table_of(rows: list[Row]) -> list[Row]:
    """A line a measure, a column a case: p50 / p99."""
    names = dict.fromkeys(row["case"] for row in rows)
    order = sorted(dict.fromkeys(row["measure"] for row in rows), key=_place)
    cells = {
        (row["measure"], row["case"]): f"{row['p50_us']:.0f} / {row['p99_us']:.0f}" for row in rows
    }
    return [
        {"us, p50 / p99": measure} | {name: cells.get((measure, name), "-") for name in names}
        for measure in order
    ]


def _place(measure: str) -> tuple[bool, int]:
    of, _, name = measure.partition(": ")
    place = 100 + KINDS.index(name) if name in KINDS else STAMPS.index(name.partition(" > ")[0])
    return of == LAST, place


def bars_of(rows: list[Row]) -> list[Bar]:
    """The promise, for each case."""
    bars = [
        Bar(f"{row['case']}: {row['measure']}, median, us", abs(row["p50_us"]), MOST_DIFFERENCE_US)
        for row in rows
        if row["measure"].endswith("client - sum")
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        hops = [row["least_us"] for row in rows if row["case"] == case and ">" in row["measure"]]
        bars.append(Bar(f"{case}: the least of its hops, us", min(hops), 0, at_most=False))
    return bars


@click.command(help=as_written(__doc__))
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Of each kind.",
)
@click.option(
    "--warm",
    "num_warm",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="More before them, not counted.",
)
@click.option("--tokens", "num_tokens", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--step-ms", type=click.FloatRange(min=0.1), default=4.48, show_default=True)
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Ask the server that runs there, and start none."
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the figures here as well."
)
def main(
    num_requests: int,
    num_warm: int,
    num_tokens: int,
    step_ms: float,
    port: int | None,
    json_path: str | None,
) -> None:  # fmt: skip
    end_on_sigterm()

    def run(port: int) -> tuple[list[Row], float]:
        watch = NoiseWatch()
        rows: list[Row] = []
        for case in cases(num_tokens):
            rows += rows_of(case.name, measure(port, case, num_requests, num_warm))
        return rows, watch.cores()

    if port is not None:
        rows, noise_cores = run(port)
    else:
        # As in bench_frontend.py: else the kernel wakes the client on the front end's core, behind the end of its own stream.
        core, other_core = two_cores()
        os.sched_setaffinity(0, {other_core})
        with tempfile.TemporaryDirectory() as folder:
            server = OurServer(Path(folder), 16, num_tokens, step_ms, core, False, ())
            with server:
                rows, noise_cores = run(server.port)
    print_table(table_of(rows))
    print(noise_sentence([noise_cores]))
    write_json(json_path, rows)
    if not print_bars(bars_of(rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
