"""The scheduler's bench: CPU of a worker's step, and what chunked prefill, the prefix cache and a quick start are worth.

Without a subcommand all four run, in less than three minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import scheduler_live
import scheduler_run
from bench_common import (
    Bar,
    NoiseWatch,
    Row,
    as_written,
    end_on_sigterm,
    median,
    noise_sentence,
    print_bars,
    print_table,
    write_json,
)
from scheduler_run import Pace

BATCHES = (1, 32, 256)
PACES = (
    Pace("back_to_back", 0, 100, 7),
    Pace("paced", 4.48, 50, 5),
    Pace("old_cache", 0, 100, 7, is_old=True),
)
Section = Callable[[], list[Row]]


def step_rows() -> list[Row]:
    rows = []
    for batch in BATCHES:
        for pace in PACES:
            watch = NoiseWatch()
            figures = scheduler_run.measure(batch, pace)
            rows.append(
                {"part": "step", "batch": batch, "pace": pace.name, **figures}
                | {"noise_cores": watch.cores()}
            )
    return rows


def chunk_rows() -> list[Row]:
    rows = []
    for mode in ("chunked", "whole"):
        options = "" if mode == "chunked" else "--no-chunked-prefill"
        with folder() as path, scheduler_live.started(path, options) as server:
            scheduler_live.warm(server)
            watch = NoiseWatch()
            figures = scheduler_live.chunks(server, seed=1)
            rows.append(
                {"part": "chunks", "prefill": mode, **figures, "noise_cores": watch.cores()}
            )
    return rows


def prefix_rows() -> list[Row]:
    rows = []
    with folder() as path, scheduler_live.started(path) as server:
        scheduler_live.warm(server)
        for repeat in range(3):
            watch = NoiseWatch()
            figures = scheduler_live.prefix(server, seed=10 + 2 * repeat)
            rows.append({"part": "prefix", **figures, "noise_cores": watch.cores()})
    return rows


def start_rows() -> list[Row]:
    rows = []
    for _ in range(3):
        watch = NoiseWatch()
        with folder() as path:
            figures = scheduler_live.start(path)
        rows.append({"part": "start", **figures, "noise_cores": watch.cores()})
    return rows


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shmserve-bench-") as name:
        yield Path(name)


SECTIONS: dict[str, Section] = {
    "step": step_rows,
    "chunks": chunk_rows,
    "prefix": prefix_rows,
    "start": start_rows,
}


def bars_of(rows: list[Row]) -> list[Bar]:
    """The bars of the parts that were measured."""
    bars = []
    for row in rows:
        if row["part"] == "step" and row["batch"] == 256:
            name = f"step at B = 256, {row['pace']}"
            bars.append(Bar(f"{name}: CPU us", row["step_us"], 400))
            bars.append(Bar(f"{name}: of outputs made and encoded", row["build_encode_ratio"], 3))
    itl = {row["prefill"]: row["itl_p99_ms"] for row in rows if row["part"] == "chunks"}
    if itl:
        bars.append(Bar("chunks: ITL p99, chunked of whole", itl["chunked"] / itl["whole"], 1))
    speedups = [row["speedup"] for row in rows if row["part"] == "prefix"]
    if speedups:
        bars.append(Bar("prefix: TTFT first / second", median(speedups), 8, at_most=False))
    starts = [row["ready_s"] for row in rows if row["part"] == "start"]
    if starts:
        bars.append(Bar("start to READY, s", median(starts), 6))
    return bars


@click.command(help=as_written(__doc__))
@click.argument("parts", nargs=-1, type=click.Choice(list(SECTIONS)))
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the rows here")
def main(parts: tuple[str, ...], json_path: str | None) -> None:
    end_on_sigterm()
    rows: list[Row] = []
    for part in parts or SECTIONS:
        measured = SECTIONS[part]()
        print_table(measured)
        print()
        rows += measured
    write_json(json_path, rows)
    print(noise_sentence(row["noise_cores"] for row in rows))
    if not print_bars(bars_of(rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
