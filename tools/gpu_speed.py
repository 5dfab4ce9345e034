"""How fast a device reads, how much a node of a recorded step costs, and how fast products of a few rows are.

Owns: the clock, and the figures of `bench_gpu.py` but for those of whole steps (gpu_step.py). Never: decides what is fast enough.

    clock      work is recorded once and replayed; a figure is the median of several blocks of replays, launching by the host not in it
    bandwidth  the better of a sum over memory that no cache holds, and of a copy of it (both directions count)
    sample     a token for each row of a batch, by the limits that the rows have
    gemv       weights are turned over from product to product, so that none is found in a cache; torch.mm in the same way
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_common import Row, median
from torch import Tensor

from shmserve.worker.cuda.graphs import Capture, CudaCapture, NoCapture
from shmserve.worker.cuda.ops import Ops, SampleScratch
from shmserve.worker.models.config import DecoderConfig, Rope

NUM_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is. `swept_bytes` must be more than any cache of the device."""

    config: DecoderConfig
    context: int
    batches: tuple[int, ...]
    swept_bytes: int
    num_nodes: int
    num_replays: int


def llama(layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int) -> DecoderConfig:
    return DecoderConfig(
        architecture="llama",
        vocab_size=vocab,
        context_length=8192,
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
        norm_eps=1e-5,
        ropes=(Rope(500_000.0),) * layers,
        sliding_windows=(None,) * layers,
        has_qkv_bias=False,
        has_output_bias=False,
        has_qk_norm=False,
        tied_head=False,
    )


LLAMA_3_8B = Scale(
    llama(32, 4096, 14336, 32, 8, 128_256), 1024, (1, 32, 128, 256), 1 << 30, 256, 20
)
TOY = Scale(llama(2, 64, 96, 4, 2, 300), 64, (1, 3), 1 << 16, 8, 2)


class Clock:
    """Times work on a device."""

    def __init__(self, device: torch.device, num_replays: int) -> None:
        self.is_cuda = device.type == "cuda"
        self._num_replays = num_replays
        self.capture: Capture = CudaCapture() if self.is_cuda else NoCapture()

    def us(self, work: Callable[[], None]) -> float:
        """Microseconds of one replay of `work`, recorded."""
        for _ in range(2):  # compiles, and lets libraries take their workspace
            work()
        return self.replay_us(self.capture.record(work))

    def replay_us(self, replay: Callable[[], None]) -> float:
        replay()
        found = median(self._block_us(replay) for _ in range(NUM_BLOCKS))
        assert found is not None
        return found

    def _block_us(self, replay: Callable[[], None]) -> float:
        if not self.is_cuda:
            begin = time.perf_counter()
            for _ in range(self._num_replays):
                replay()
            return (time.perf_counter() - begin) * 1e6 / self._num_replays
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        for _ in range(self._num_replays):
            replay()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) * 1e3 / self._num_replays


def bandwidth(clock: Clock, scale: Scale, device: torch.device) -> Row:
    """GB/s by a sum and by a copy."""
    source = torch.ones(scale.swept_bytes // 4, dtype=torch.float32, device=device)
    target, total = torch.empty_like(source), torch.zeros((), device=device)
    summed = clock.us(lambda: total.copy_(source.sum()))
    copied = clock.us(lambda: target.copy_(source))
    num_bytes = source.nbytes
    row: Row = {"part": "bandwidth", "sum_gb_s": num_bytes / summed / 1e3}
    row["copy_gb_s"] = 2 * num_bytes / copied / 1e3
    return {**row, "gb_s": max(row["sum_gb_s"], row["copy_gb_s"])}


def gaps(
    clock: Clock, scale: Scale, ops: Ops, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    """Microseconds that one more node in a chain costs: the slope between a short chain and a long one."""
    one, width = torch.zeros(1, device=device), scale.config.hidden_size
    x, residual, weight = (torch.zeros(1, width, dtype=dtype, device=device) for _ in range(3))
    few, many = scale.num_nodes // 4, scale.num_nodes

    def chain(node: Callable[[], object], count: int) -> None:
        for _ in range(count):
            node()

    kinds: dict[str, Callable[[], object]] = {
        "one addition": lambda: one.add_(1),
        "residual and norm, one row": lambda: ops.add_rms_norm(x, residual, weight, x, 1e-5),
    }
    rows = []
    for name, node in kinds.items():
        short, long = (
            clock.us(lambda node=node, count=count: chain(node, count))  # type: ignore[misc]
            for count in (few, many)
        )
        rows.append({"part": "gap", "node": name, "us": (long - short) / (many - few)})
    return rows


def samplings(
    clock: Clock, scale: Scale, ops: Ops, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    """Microseconds of the draws of a batch, by its size and by what all of its rows ask for."""
    most, vocab = max(scale.batches), scale.config.vocab_size
    logits = torch.empty(most, vocab, dtype=dtype, device=device).normal_(0, 3)
    scratch = SampleScratch.allocate(most, vocab, device)
    ids, failed, positions = (torch.zeros(most, dtype=torch.int32, device=device) for _ in range(3))
    seeds, logprobs = torch.arange(most, device=device), torch.zeros(most, device=device)
    asked: dict[str, tuple[float, float, int, float]] = {
        "greedy": (0.0, 0.0, 0, 1.0),
        "no limit": (0.8, 0.0, 0, 1.0),
        "min-p 0.05": (0.8, 0.05, 0, 1.0),
        "top-k 50": (0.8, 0.0, 50, 1.0),
        "top-p 0.95": (0.8, 0.0, 0, 0.95),
        "top-k 50, top-p 0.95": (0.8, 0.0, 50, 0.95),
    }
    rows = []
    for name, (temperature, min_p, top_k, top_p) in asked.items():
        limits = [torch.full((most,), value, device=device) for value in (temperature, min_p)]
        limits += [torch.full((most,), top_k, dtype=torch.int32, device=device)]
        limits += [torch.full((most,), top_p, device=device)]
        for batch in scale.batches:

            def draw(batch: int = batch, limits: list[Tensor] = limits) -> None:
                per_row = [each[:batch] for each in (*limits, seeds, positions)]
                outs = [each[:batch] for each in (ids, logprobs, failed)]
                ops.sample(logits[:batch], *per_row, *outs, scratch)

            row: Row = {"part": "sample", "asked": name, "batch": batch}
            rows.append({**row, "us": clock.us(draw)})
    return rows


def products(c: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of the matrices of a layer, and the head."""
    qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return {
        "qkv": (qkv, c.hidden_size),
        "output": (c.hidden_size, c.num_heads * c.head_dim),
        "gate_up": (2 * c.ffn_size, c.hidden_size),
        "down": (c.hidden_size, c.ffn_size),
        "head": (c.vocab_size, c.hidden_size),
    }


def gemvs(
    clock: Clock, scale: Scale, ops: Ops, device: torch.device, dtype: torch.dtype, gb_s: float
) -> list[Row]:
    """Each matrix with 1 to 8 rows: microseconds of ours and of torch.mm, and what of the bandwidth ours reaches."""
    rows = []
    for name, (height, depth) in products(scale.config).items():
        num_bytes = height * depth * dtype.itemsize
        count = max(2, -(-scale.swept_bytes // num_bytes))
        weights = torch.empty(count, height, depth, dtype=dtype, device=device).normal_(0, 0.02)
        for num_rows in (1, 2, 4, 8):
            x = torch.empty(num_rows, depth, dtype=dtype, device=device).normal_()
            out = torch.empty(num_rows, height, dtype=dtype, device=device)

            def ours(x: Tensor = x, out: Tensor = out, weights: Tensor = weights) -> None:
                for weight in weights:
                    ops.gemv(x, weight, None, out)

            def theirs(x: Tensor = x, out: Tensor = out, weights: Tensor = weights) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=out)

            gemv_us, mm_us = clock.us(ours) / count, clock.us(theirs) / count
            row: Row = {"part": "gemv", "matrix": name, "rows": num_rows, "gemv_us": gemv_us}
            row |= {"mm_us": mm_us, "gb_s": num_bytes / gemv_us / 1e3}
            rows.append({**row, "share": row["gb_s"] / gb_s, "of_mm": gemv_us / mm_us})
        del weights
    return rows
