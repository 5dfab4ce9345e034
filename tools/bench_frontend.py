"""c, the front end's cost per token, and the lag of every token, against the floor of a bare aiohttp server.

Owns: one run of `shmserve start --runner simulated` beside `bench_floor.py`, measured in pairs by `sse_client.c`. Never: knows
the inside of the server; all it takes from it is its processes' command lines, its responses and its emission log.

    c        CPU ns of the front end's threads per content frame, in the steady window in which all B streams decode
    lag      the client's receive time of a token minus its time_ns in the emission log
    floor    the same two of the bare server, whose frames are a real frame of ours, byte for byte but for the id
    place    the front end, or the floor, alone on one core; worker, supervisor, client and this process on another. Several front
             ends, and everybody else, on both: there is no core for each

    feature  what the requests want beside plain text (frontend_features.py); the floor's frames stay plain, and the bars are plain's

A pair is one run against each, in turn first. Every figure of a row is the median over its pairs; ratios and differences
are taken within a pair, because the machine's speed drifts between them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
from bench_common import (
    NOISE_LIMIT_CORES,
    Bar,
    NoiseWatch,
    Row,
    compile_c,
    end_on_sigterm,
    median,
    noise_sentence,
    percentile,
    print_bars,
    print_table,
    two_cores,
    wait_until_quiet,
    write_json,
)
from frontend_features import FEATURES, PLAIN
from frontend_run import EmissionLog, StreamRun, run_client, tokens_per_s
from frontend_servers import FloorServer, OurServer

HERE = Path(__file__).resolve().parent
BATCHES = "1,8,32,64,128,256,384"
COLUMNS = (
    "feature batch pairs c_us floor_c_us c_ratio frames_per_token tokens_per_s tokens_per_s_of_ideal "
    "itl_mean_ms itl_p50_ms itl_p99_ms itl_max_ms floor_itl_p99_ms lag_p50_ms lag_p99_ms "
    "floor_lag_p99_ms frontend_cores client_cores noise_cores"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What one bench run is: the grid, the length of a stream, how often, where."""

    step_ms: float
    num_tokens: int
    num_pairs: int
    num_redo: int
    patience_s: float


WINDOW_COLUMNS = ("c_us", "tokens_per_s", "tokens_per_s_of_ideal", "cores")
"""None where some stream had ended before the last one began: then nothing can be said about B streams decoding."""


def reduce_run(run: StreamRun, log: EmissionLog, batch: int, settings: Settings) -> Row:
    """The figures of one client run against one server."""
    broken = [stream for stream in run.streams if not stream.is_whole]
    if broken:
        raise SystemExit(
            f"B = {batch}: {len(broken)} streams failed, the first with status {broken[0].status}"
        )
    gaps_ms = [
        (after - before) / 1e6
        for stream in run.streams
        for before, after in zip(stream.arrivals_ns, stream.arrivals_ns[1:], strict=False)
    ]
    emitted = log.emission_times({stream.req_id for stream in run.streams}, settings.num_tokens)
    lags_ms = [
        lag / 1e6 for stream in run.streams for lag in stream.lags_ns(emitted[stream.req_id])
    ]
    num_frames = sum(len(stream.arrivals_ns) for stream in run.streams)
    num_tokens = sum(len(emitted[stream.req_id]) for stream in run.streams)
    in_window: Row = dict.fromkeys(WINDOW_COLUMNS)
    if run.window is not None:
        rate = tokens_per_s(run, settings.step_ms)
        in_window = {
            "c_us": run.window.server_cpu_ns / run.window.num_frames / 1e3,
            "tokens_per_s": rate,
            "tokens_per_s_of_ideal": rate * settings.step_ms / 1e3 / batch,
            "cores": run.window.server_cpu_ns / run.window.length_ns,
        }
    return {
        **in_window,
        "frames_per_token": num_frames / num_tokens,
        "itl_mean_ms": sum(gaps_ms) / len(gaps_ms),
        "itl_p50_ms": percentile(gaps_ms, 50),
        "itl_p99_ms": percentile(gaps_ms, 99),
        "itl_max_ms": max(gaps_ms),
        "lag_p50_ms": percentile(lags_ms, 50),
        "lag_p99_ms": percentile(lags_ms, 99),
        "client_cores": run.client_cpu_ns / 1e9 / run.length_s,
    }


def measure_pair(
    batch: int,
    ours_first: bool,
    ours: OurServer,
    floor: FloorServer,
    program: Path,
    settings: Settings,
) -> Row:
    """One run against each server, and what other processes used meanwhile."""
    wait_until_quiet(settings.patience_s)
    watch = NoiseWatch()
    figures: dict[str, Row] = {}
    for server in (ours, floor) if ours_first else (floor, ours):
        run = run_client(program, server, batch, settings.num_tokens)
        figures[server.name] = reduce_run(run, server.log, batch, settings)
    mine, bare = figures[ours.name], figures[floor.name]
    return {
        **mine,
        "frontend_cores": mine["cores"],
        "noise_cores": watch.cores(),
        "c_ratio": mine["c_us"] / bare["c_us"] if mine["c_us"] and bare["c_us"] else None,
        **{
            f"floor_{key}": bare[key]
            for key in ("c_us", "itl_p99_ms", "lag_p50_ms", "lag_p99_ms", "frames_per_token")
        },
        "itl_p99_over_floor_ms": mine["itl_p99_ms"] - bare["itl_p99_ms"],
        "lag_p99_over_floor_ms": mine["lag_p99_ms"] - bare["lag_p99_ms"],
    }


def measure_batch(
    batch: int,
    ours: OurServer,
    floor: FloorServer,
    program: Path,
    settings: Settings,
    feature: str = PLAIN,
) -> Row:
    """All pairs of one B; a noisy pair is measured again while redos are left.

    A pair without a steady window counts for frames, ITL and lag, but another is measured for what only a window can tell.
    """
    pairs: list[Row] = []
    num_redo = settings.num_redo
    most_pairs = 3 * settings.num_pairs
    ours.ask_for(FEATURES[feature])
    for server in (ours, floor):  # not measured: both have then served so many streams before
        warm = run_client(program, server, batch, settings.num_tokens)
        server.log.emission_times({stream.req_id for stream in warm.streams}, settings.num_tokens)
    while sum(pair["c_ratio"] is not None for pair in pairs) < settings.num_pairs:
        if len(pairs) >= most_pairs:
            raise SystemExit(
                f"B = {batch}: in too few runs all streams were decoding at once; more --tokens would help"
            )
        pair = measure_pair(batch, len(pairs) % 2 == 0, ours, floor, program, settings)
        if pair["noise_cores"] > NOISE_LIMIT_CORES and num_redo:
            num_redo -= 1
            click.echo(
                f"B = {batch}: others used {pair['noise_cores']:.2f} cores, measured again",
                err=True,
            )
            continue
        pairs.append(pair)
        costs = (
            f"c {pair['c_us']:.2f} us, floor {pair['floor_c_us']:.2f} us"
            if pair["c_ratio"] is not None
            else "never all decoding at once"
        )
        click.echo(
            f"{feature}, B = {batch}, pair {len(pairs)}: {costs}, "
            f"lag p99 {pair['lag_p99_ms']:.2f} ms, floor {pair['floor_lag_p99_ms']:.2f} ms",
            err=True,
        )
    medians = {
        key: median([pair[key] for pair in pairs if pair[key] is not None]) for key in pairs[0]
    }
    return {"feature": feature, "batch": batch, "pairs": len(pairs), **medians}


def bars_of(rows: list[Row], step_ms: float) -> list[Bar]:
    """The product's promises on the rows at hand."""
    bars = []
    for row in rows:
        if row.get("feature", PLAIN) != PLAIN:
            continue
        at = f"B = {row['batch']}"
        limit = {64: 2.0, 256: 1.6}.get(row["batch"])
        if limit is not None:
            bars.append(Bar(f"{at}: c against the floor", row["c_ratio"], limit))
        for key, name, limit, at_most in (
            ("frames_per_token", "frames per token", 0.99, False),
            ("tokens_per_s_of_ideal", "tokens/s against B / T", 0.99, False),
            ("itl_p99_over_floor_ms", "ITL p99 above the floor's, ms", step_ms / 2, True),
            ("lag_p99_over_floor_ms", "lag p99 above the floor's, ms", step_ms, True),
        ):
            bars.append(Bar(f"{at}: {name}", row[key], limit, at_most))
    return bars


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--batches", default=BATCHES, show_default=True, help="numbers of streams, with commas"
)
@click.option(
    "--feature",
    "features",
    multiple=True,
    type=click.Choice([name for name in FEATURES if name != PLAIN]),
    help="measure this too, behind the plain streams of each B",
)
@click.option("--pairs", "num_pairs", default=7, show_default=True, help="pairs of runs per batch")
@click.option("--tokens", "num_tokens", default=256, show_default=True, help="tokens per stream")
@click.option(
    "--step-ms", default=4.48, show_default=True, help="step period T of the simulated GPU"
)
@click.option(
    "--redo",
    "num_redo",
    default=3,
    show_default=True,
    help="noisy pairs per batch that are repeated",
)
@click.option(
    "--patience",
    "patience_s",
    default=20.0,
    show_default=True,
    help="seconds to wait for a quiet machine",
)
@click.option(
    "--uds", "over_unix", is_flag=True, help="talk over Unix sockets instead of TCP on loopback"
)
@click.option(
    "--http-processes",
    "num_http",
    default=1,
    show_default=True,
    help="front ends of ours; their CPU is added up",
)
@click.option(
    "--server-option", "server_options", multiple=True, help="one more word for `shmserve start`"
)
@click.option("--quick", is_flag=True, help="B = 1, 64, 256 with one pair: to see that it works")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="write the rows to this file"
)
def main(
    batches: str,
    features: tuple[str, ...],
    num_pairs: int,
    num_tokens: int,
    step_ms: float,
    num_redo: int,
    patience_s: float,
    over_unix: bool,
    num_http: int,
    server_options: tuple[str, ...],
    quick: bool,
    json_path: str | None,
) -> None:
    sizes = [int(size) for size in batches.split(",")]
    if quick:
        sizes = [size for size in (1, 64, 256) if batches == BATCHES or size in sizes] or sizes
        num_pairs, num_redo, patience_s = 1, 0, 0.0
    settings = Settings(step_ms, num_tokens, num_pairs, num_redo, patience_s)
    front_core, other_core = two_cores()
    os.sched_setaffinity(0, {other_core} if num_http == 1 else {front_core, other_core})
    end_on_sigterm()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-frontend-") as name:
        folder = Path(name)
        program = compile_c(HERE / "sse_client.c", folder)
        with OurServer(
            folder,
            max(sizes),
            num_tokens,
            step_ms,
            front_core,
            over_unix,
            server_options,
            pins=num_http == 1,
            num_http=num_http,
        ) as ours:
            frame = ours.probe_frame()
            click.echo(f"a frame is {len(frame)} bytes: {frame.decode().strip()}", err=True)
            with FloorServer(folder, frame, num_tokens, step_ms, front_core, over_unix) as floor:
                for batch in sizes:
                    for feature in (PLAIN, *features):
                        rows.append(measure_batch(batch, ours, floor, program, settings, feature))
    print_table(rows, COLUMNS.split())
    write_json(json_path, rows)
    print(noise_sentence(float(row["noise_cores"]) for row in rows))
    print(f"T = {step_ms} ms, {num_tokens} tokens per stream, medians of {num_pairs} pairs")
    if not print_bars(bars_of(rows, step_ms)):
        sys.exit(1)


if __name__ == "__main__":
    main()
