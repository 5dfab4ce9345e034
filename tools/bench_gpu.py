"""The GPU path on the day a GPU is at hand: right, how fast its parts are, and how near a step comes to the memory floor.

Without a part all run, in less than four minutes. `server` needs `--model`: a GGUF file or a checkpoint that the CUDA runner
computes. `--device cpu --toy` runs the same code on the CPU with plain torch in the place of kernels and graphs: it shows that the
bench works, and its times mean nothing, so they have no bars.

    ops        every operation, compiled, against plain torch on the same device
    bandwidth  what the floor is made of
    gap        what a node of a CUDA graph costs
    sample     the draws of a batch, by the limits that its rows have
    gemv       few rows times the matrices of Llama 3 8B, against torch.mm
    step       a random model of Llama 3 8B's shape, 1,024 tokens of context
    server     T_step under `shmserve start --runner cuda`
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import gpu_cases
import gpu_speed
import gpu_step
import torch
from bench_common import (
    Bar,
    Row,
    as_written,
    end_on_sigterm,
    median,
    print_bars,
    print_table,
    write_json,
)
from engine_servers import Load, our_server, run
from gpu_speed import LLAMA_3_8B, TOY, Clock, Scale

from shmserve.worker.cuda.ops import REFERENCE, Ops, triton_ops

PARTS = ("ops", "bandwidth", "gap", "sample", "gemv", "step", "server")
MOST_OF_FLOOR = 1.15
LEAST_GEMV_SHARE = 0.92
SERVER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Bench:
    """One device, one scale, one back end."""

    device: torch.device
    dtype: torch.dtype
    scale: Scale
    ops: Ops
    model: str

    def rows(self, parts: Iterable[str]) -> list[Row]:
        """All rows; each part's table is printed when it is there."""
        clock, found, gb_s = Clock(self.device, self.scale.num_replays), [], 0.0
        for part in PARTS:
            if part not in parts and not (part == "bandwidth" and {"gemv", "step"} & set(parts)):
                continue
            rows = self._part(part, clock, gb_s)
            if part == "bandwidth":
                gb_s = rows[0]["gb_s"]
            if rows:
                print_table(rows)
                print(flush=True)
            found += rows
        return found

    def _part(self, part: str, clock: Clock, gb_s: float) -> list[Row]:
        at = (self.device, self.dtype)
        if part == "server":
            return self._server()
        with torch.inference_mode():
            if part == "ops":
                return [
                    row
                    for dtype in (torch.float32, torch.bfloat16)
                    for row in gpu_cases.compare(
                        self.ops, self.scale.config, self.scale.context, self.device, dtype
                    )
                ]
            if part == "bandwidth":
                return [gpu_speed.bandwidth(clock, self.scale, self.device)]
            if part == "gap":
                return gpu_speed.gaps(clock, self.scale, self.ops, *at)
            if part == "sample":
                return gpu_speed.samplings(clock, self.scale, self.ops, *at)
            if part == "gemv":
                return gpu_speed.gemvs(clock, self.scale, self.ops, *at, gb_s)
            return self._steps(clock, gb_s)

    def _steps(self, clock: Clock, gb_s: float) -> list[Row]:
        batches = gpu_step.batches_that_fit(self.scale, self.device, self.dtype)
        for left in sorted(set(self.scale.batches) - set(batches)):
            print(f"step at B = {left}: left out, its keys and values do not fit into the memory")
        if not batches:
            return []
        rig = gpu_step.StepRig(clock, self.scale, self.ops, self.device, self.dtype, batches)
        return [rig.measure(batch, gb_s) for batch in batches]

    def _server(self) -> list[Row]:
        if not self.model:
            print("server: left out, no --model")
            return []
        gc.collect()  # the server's process needs the room of the model that was stepped
        torch.cuda.empty_cache()
        rows = []
        with tempfile.TemporaryDirectory(prefix="shmserve-bench-") as name:
            log = Path(name) / "steps"
            options = f"--runner cuda --max-model-len {self.scale.context} --emission-log {log}"
            with our_server(Path(name), self.model, 0, max(self.scale.batches), options) as server:
                for batch in self.scale.batches:
                    run(server, Load(batch, 64, 16, seed=batch))  # prompts' kernels are compiled
                    figures = run(server, Load(batch, 64, SERVER_TOKENS, seed=1000 + batch))
                    row = {"part": "server", "batch": batch, "step_ms": step_ms(log, batch)}
                    rows.append({**row, "tpot_p50_ms": figures["tpot_p50_ms"]})
        return rows


def step_ms(log: Path, batch: int) -> float | None:
    """The median time between consecutive steps that each gave a token to all `batch` streams."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return median(
        (after["time_ns"] - before["time_ns"]) / 1e6
        for before, after in itertools.pairwise(lines)
        if len(before["req_ids"]) == len(after["req_ids"]) == batch
        and after["step"] == before["step"] + 1
    )


def bars_of(rows: list[Row], has_times: bool) -> list[Bar]:
    """One bar for each operation and dtype, and the bars of the times."""
    bars: list[Bar] = []
    worst: dict[tuple[object, object, float], float] = {}
    for row in rows:
        if row["part"] == "ops":
            key = (row["op"], row["dtype"], row["limit"])
            worst[key] = max(worst.get(key, 0.0), row["error"])
    bars += [
        Bar(f"{op}, {dtype}: error", error, limit) for (op, dtype, limit), error in worst.items()
    ]
    if not has_times:
        return bars
    alone = [row for row in rows if row["part"] == "gemv" and row["rows"] == 1]
    if alone:
        share = sum(row["share"] * row["gemv_us"] for row in alone) / sum(
            r["gemv_us"] for r in alone
        )
        bars.append(
            Bar("gemv, M = 1, all matrices: of bandwidth", share, LEAST_GEMV_SHARE, at_most=False)
        )
        bars.append(
            Bar(
                "gemv, M <= 8, all matrices: of torch.mm",
                sum(row["gemv_us"] for row in rows if row["part"] == "gemv")
                / sum(row["mm_us"] for row in rows if row["part"] == "gemv"),
                1.0,
            )
        )
    bars += [
        Bar("step at B = 1: of the memory floor", row["of_floor"], MOST_OF_FLOOR)
        for row in rows
        if row["part"] == "step" and row["batch"] == 1
    ]
    return bars


@click.command(help=as_written(__doc__))
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--device", "device_name", default="cuda", help="cuda, cuda:1, cpu")
@click.option("--toy", is_flag=True, help="a toy model instead of Llama 3 8B's shape")
@click.option("--model", default="", help="a model for the part `server`")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="write the rows here")
def main(
    parts: tuple[str, ...], device_name: str, toy: bool, model: str, json_path: str | None
) -> None:
    end_on_sigterm()
    device = torch.device(device_name)
    is_cuda = device.type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no CUDA device; a dry run is --device cpu --toy"
        )
    if not is_cuda and not toy:
        raise SystemExit("without a GPU there is a dry run only: --device cpu --toy")
    if is_cuda:
        torch.cuda.set_device(device if device.index is not None else torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        print(f"{properties.name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    bench = Bench(
        device,
        torch.bfloat16 if is_cuda else torch.float32,
        TOY if toy else LLAMA_3_8B,
        triton_ops() if is_cuda else REFERENCE,
        model,
    )
    rows = bench.rows(parts or PARTS)
    write_json(json_path, rows)
    if not print_bars(bars_of(rows, has_times=is_cuda and not toy)):
        sys.exit(1)


if __name__ == "__main__":
    main()
