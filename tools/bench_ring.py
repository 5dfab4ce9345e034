"""The process boundary alone: CPU of both sides, wake latency and throughput of our rings and four usual transports.

Owns: which transports run in which order, the ratios, the table. Never: touches a server.

    producer   pinned to one core: per step, one record for each of B requests
    consumer   pinned to another: an asyncio loop that ends in Python values, or in numpy columns
    latency    the consumer's clock once it has the values - the producer's clock before encoding
    CPU        time of the whole process, all threads, per step
    modes      paced: a step every T, both sides asleep between; back_to_back: as fast as they go, to the last value

The repeats are interleaved: each is one pass over all transports. Ratios are against zmq_msgpack within a pass; every
figure of a row is the median over the passes.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass

import click
from bench_common import (
    NOISE_LIMIT_CORES,
    Bar,
    NoiseWatch,
    Row,
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
from ring_run import Drive, run_once
from ring_transports import Transport, makers

BASELINE = "zmq_msgpack"
RATIOS = {
    "producer_cpu_us": "producer_cpu_ratio",
    "consumer_cpu_us": "consumer_cpu_ratio",
    "latency_p50_us": "latency_p50_ratio",
    "tokens_per_s": "tokens_per_s_ratio",
}
Pass = dict[tuple[str, str], Row]
"""One row for each transport and form."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often a cell is measured, and how much patience there is with the other processes of the machine."""

    num_repeats: int
    num_redo: int
    patience_s: float


def measure_once(transport: Transport, drive: Drive, cores: tuple[int, int]) -> Row:
    """One measurement as the figures of a row."""
    try:
        raw = run_once(transport, drive, cores)
    finally:
        transport.close()
    latencies_us = [ns / 1e3 for ns in raw["latencies_ns"]]
    paced = drive.step_ns > 0  # back to back, a latency would be the length of the queue
    return {
        "producer_cpu_us": raw["producer_cpu_ns"] / drive.num_steps / 1e3,
        "consumer_cpu_us": raw["consumer_cpu_ns"] / drive.num_steps / 1e3,
        "latency_p50_us": percentile(latencies_us, 50) if paced else None,
        "latency_p99_us": percentile(latencies_us, 99) if paced else None,
        "tokens_per_s": drive.num_steps * transport.batch / raw["wall_ns"] * 1e9,
    }


def add_ratios(figures: Pass) -> None:
    """Ratios against the baseline, within one pass."""
    base = figures[BASELINE, "values"]
    for row in figures.values():
        for key, ratio in RATIOS.items():
            row[ratio] = row[key] / base[key] if base[key] else None


def one_pass(batch: int, drive: Drive, cores: tuple[int, int], first: int) -> Pass:
    """Every transport once, beginning with the one of number `first`. Noise is of the whole pass: a run may be too short."""
    figures: Pass = {}
    watch = NoiseWatch()
    with tempfile.TemporaryDirectory(prefix="bench-ring-") as folder:
        kinds = makers(folder)
        first %= len(kinds)
        for make in kinds[first:] + kinds[:first]:
            transport = make(batch)
            figures[transport.name, transport.form] = measure_once(transport, drive, cores)
    noise_cores = watch.cores()
    for row in figures.values():
        row["noise_cores"] = noise_cores
    add_ratios(figures)
    return figures


def measure_cell(batch: int, drive: Drive, cores: tuple[int, int], plan: Plan) -> list[Row]:
    """All transports for one B and one mode; a noisy pass is made again while redos are left."""
    passes: list[Pass] = []
    num_redo = plan.num_redo
    while len(passes) < plan.num_repeats:
        if plan.patience_s:
            wait_until_quiet(plan.patience_s)
        figures = one_pass(batch, drive, cores, len(passes))
        noise_cores = figures[BASELINE, "values"]["noise_cores"]
        if noise_cores > NOISE_LIMIT_CORES and num_redo:
            num_redo -= 1
            click.echo(
                f"B = {batch}, {drive.mode}: others used {noise_cores:.2f} cores, made again",
                err=True,
            )
            continue
        passes.append(figures)
        click.echo(f"B = {batch}, {drive.mode}: pass {len(passes)} of {plan.num_repeats}", err=True)
    return [
        {
            "transport": name,
            "form": form,
            "mode": drive.mode,
            "batch": batch,
            "repeats": plan.num_repeats,
        }
        | {
            key: median(figures[name, form][key] for figures in passes)
            for key in passes[0][name, form]
        }
        for name, form in sorted(passes[0], key=lambda pair: (pair[0] != "rings", pair))
    ]


def bars_of(rows: list[Row]) -> list[Bar]:
    """The promises at B = 256, as far as that was measured."""
    found = {(r["transport"], r["form"], r["mode"]): r for r in rows if r["batch"] == 256}
    if not found:
        return []
    paced = found["rings", "values", "paced"]
    fast = {form: found["rings", form, "back_to_back"] for form in ("values", "columns")}
    against = f"of {BASELINE}, B = 256"
    return [
        Bar(f"paced, values: producer CPU {against}", paced["producer_cpu_ratio"], 0.7),
        Bar(f"paced, values: consumer CPU {against}", paced["consumer_cpu_ratio"], 0.7),
        Bar(f"paced, values: latency p50 {against}", paced["latency_p50_ratio"], 0.65),
        Bar(
            f"back to back, values: tokens/s {against}",
            fast["values"]["tokens_per_s_ratio"],
            2,
            False,
        ),
        Bar(
            f"back to back, columns: tokens/s {against}",
            fast["columns"]["tokens_per_s_ratio"],
            10,
            False,
        ),
    ]


@click.command(help=__doc__.split("\n\n")[0])
@click.option(
    "--batches", default="1,32,256", show_default=True, help="records per step, with commas"
)
@click.option("--repeats", "num_repeats", default=5, show_default=True, help="interleaved passes")
@click.option(
    "--redo", "num_redo", default=3, show_default=True, help="noisy passes per cell, made again"
)
@click.option(
    "--steps", "num_steps", default=200, show_default=True, help="measured steps of a paced run"
)
@click.option("--step-ms", default=4.48, show_default=True, help="step period T")
@click.option(
    "--patience",
    "patience_s",
    default=20.0,
    show_default=True,
    help="seconds to wait for a quiet machine",
)
@click.option("--quick", is_flag=True, help="one pass with few steps: to see that it works")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="write the rows to this file"
)
def main(
    batches: str,
    num_repeats: int,
    num_redo: int,
    num_steps: int,
    step_ms: float,
    patience_s: float,
    quick: bool,
    json_path: str | None,
) -> None:
    plan = Plan(1, 0, 0.0) if quick else Plan(num_repeats, num_redo, patience_s)
    num_steps = 40 if quick else num_steps
    cores = two_cores()
    end_on_sigterm()
    rows: list[Row] = []
    for batch in [int(size) for size in batches.split(",")]:
        # About a million records at B = 256: under a second for the slowest transport.
        fast_steps = min(20_000, 1_000_000 // batch) // (10 if quick else 1)
        for drive in (
            Drive("paced", num_steps, 20, round(step_ms * 1e6)),
            Drive("back_to_back", fast_steps, 100, 0),
        ):
            rows += measure_cell(batch, drive, cores, plan)
    print_table(rows)
    write_json(json_path, rows)
    print(noise_sentence(row["noise_cores"] for row in rows))
    if not print_bars(bars_of(rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
