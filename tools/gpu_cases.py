"""Every operation of the CUDA runner, compiled, beside plain torch on the same device: shapes and edges of a real model.

Owns: the inputs of each operation, and how far its results lie from the reference's. Never: measures time, or decides what is
near enough (bench_gpu.py prints the bars). Tests of every odd toy shape are in tests/worker/cuda; here the compiled code is what is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench_common import Row
from torch import Tensor

from shmserve.worker.cuda.ops import REFERENCE, DecodeScratch, Ops, SampleScratch
from shmserve.worker.models.config import DecoderConfig

BLOCK_SIZE = 16
LIMITS = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
"""Of the largest value: sums in another order, and one rounding of the result or of a weight on the way to it."""

Call = Callable[[Ops, list[Tensor]], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`call(ops, outs)` runs one operation into `outs`; each back end gets its own copies of them."""

    op: str
    name: str
    outs: list[Tensor]
    call: Call


class Inputs:
    """Random tensors of one device and dtype, the same for the same seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 1) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, device=self.device, generator=self._generator)
        return values.to(dtype or self.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype or self.dtype)

    def ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def shuffled(self, count: int) -> Tensor:
        order = torch.randperm(count, device=self.device, generator=self._generator)
        return order.to(torch.int32)


def row_cases(i: Inputs, c: DecoderConfig) -> Iterator[Case]:
    """What works on rows of hidden states."""
    rows, width = 5, c.hidden_size
    table, ids = i.normal(c.vocab_size, width), i.ints([0, 3, c.vocab_size - 1, 7, 1])
    source, before = i.ints([-1, 2, -1, 0, -1]), i.ints([9, 8, c.vocab_size - 2])
    yield Case(
        "embed",
        "two of five carried",
        [i.empty(rows, width)],
        lambda ops, outs: ops.embed(ids, source, before, table, outs[0]),
    )
    x, weight = i.normal(rows, width), i.normal(width)
    yield Case(
        "add_rms_norm",
        "alone",
        [i.empty(rows, width)],
        lambda ops, outs: ops.add_rms_norm(x, None, weight, outs[0], c.norm_eps),
    )
    yield Case(
        "add_rms_norm",
        "with a residual",
        [i.empty(rows, width), i.normal(rows, width)],
        lambda ops, outs: ops.add_rms_norm(x, outs[1], weight, outs[0], c.norm_eps),
    )
    gate_up = i.normal(rows, 2 * c.ffn_size)
    yield Case(
        "gated_mul",
        "silu",
        [i.empty(rows, c.ffn_size)],
        lambda ops, outs: ops.gated_mul(gate_up, outs[0]),
    )
    matrix, bias = i.normal(c.ffn_size, width) * 0.02, i.normal(c.ffn_size)
    for count, added in ((1, None), (3, bias), (8, None)):
        few = i.normal(count, width)
        yield Case(
            "gemv",
            f"M = {count}" + (", bias" if added is not None else ""),
            [i.empty(count, c.ffn_size)],
            lambda ops, outs, few=few, added=added: ops.gemv(few, matrix, added, outs[0]),  # type: ignore[misc]
        )


def cache_cases(i: Inputs, c: DecoderConfig, context: int) -> Iterator[Case]:
    """What reads and writes the KV cache."""
    num_q, num_kv, dim = c.num_heads, c.num_kv_heads, c.head_dim
    lengths = [0, 1, 2, context // 2 - 1, context // 2, context // 2 + 1, context - 1, context]
    width = -(-context // BLOCK_SIZE)
    blocks = i.shuffled(len(lengths) * width).view(len(lengths), width) + 1
    shape = (len(lengths) * width + 1, BLOCK_SIZE, num_kv, dim)
    keys, values = i.normal(*shape), i.normal(*shape)
    rows = len(lengths)
    qkv, bias = i.normal(rows, (num_q + 2 * num_kv) * dim), i.normal((num_q + 2 * num_kv) * dim)
    positions = i.ints([max(0, length - 1) for length in lengths])
    angles = torch.outer(torch.arange(context), torch.arange(1, dim // 2 + 1) / dim)
    turn = (angles.cos().to(i.device), angles.sin().to(i.device))
    slots = blocks[:, 0] * BLOCK_SIZE + i.ints([at % BLOCK_SIZE for at in range(rows)])
    norms = i.normal(dim), i.normal(dim)
    for name, extra in (("plain", (None, None, None)), ("bias and norms", (bias, *norms))):
        yield Case(
            "rotary_write",
            name,
            [i.empty(rows, num_q, dim), keys, values],
            lambda ops, outs, extra=extra: ops.rotary_write(  # type: ignore[misc]
                qkv, *extra, *turn, positions, slots, *outs, c.norm_eps
            ),
        )
    scale, kv_lens, query = dim**-0.5, i.ints(lengths), i.normal(rows, num_q, dim)
    scratch = DecodeScratch.allocate(rows, num_q, dim, context, i.device)
    chunks = [0, 1, 2, 5, 17, context // 2 + 1, 33, 64]
    cu = i.ints([sum(chunks[:n]) for n in range(rows + 1)])
    prompt = i.normal(sum(chunks), num_q, dim)
    for name, limits in (("all keys", (0, 0.0)), ("window, softcap", (context // 4, 30.0))):
        yield Case(
            "decode_attention",
            name,
            [i.empty(rows, num_q, dim)],
            lambda ops, outs, limits=limits: ops.decode_attention(  # type: ignore[misc]
                query, keys, values, blocks, kv_lens, outs[0], scratch, scale, *limits
            ),
        )
        yield Case(
            "prefill_attention",
            name,
            [i.empty(sum(chunks), num_q, dim)],
            lambda ops, outs, limits=limits: ops.prefill_attention(  # type: ignore[misc]
                prompt, keys, values, blocks, cu, kv_lens, outs[0], max(chunks), scale, *limits
            ),
        )


def sample_cases(i: Inputs, c: DecoderConfig) -> Iterator[Case]:
    """Greedy rows, drawn ones (of all ids, of few, of thousands, of the likeliest), and one that is broken."""
    rows = 10
    logits = i.normal(rows, c.vocab_size) * 4
    logits[1, 5] = logits[1, c.vocab_size - 1] = 60.0  # a tie
    logits[3, 2] = float("nan")
    temperature = torch.tensor([0, 0, 0.7, 0.7, 1, 1.5, 1.2, 1, 1.3, 2], device=i.device)
    min_p = torch.tensor([0, 0, 0, 0, 0.05, 0.2, 1e-5, 0, 0, 0], device=i.device)
    seeds = torch.arange(rows, device=i.device) * -(1 << 40) - 7
    top_k = i.ints([0, 0, 0, 0, 0, 0, 0, 50, 0, 4000])
    top_p = torch.tensor([1, 1, 1, 1, 1, 1, 1, 1, 0.9, 0.95], device=i.device)
    positions = i.ints([0, 1, 2, 3, 400, 70_000, 9, 8, 7, 6])
    scratch = SampleScratch.allocate(rows, c.vocab_size, i.device)
    results = [i.empty(rows, dtype=torch.int32), i.empty(rows, dtype=torch.float32)]
    yield Case(
        "sample",
        "greedy, drawn, broken",
        [*results, i.empty(rows, dtype=torch.int32)],
        lambda ops, outs: ops.sample(
            logits, temperature, min_p, top_k, top_p, seeds, positions, *outs, scratch
        ),
    )


def distance(mine: Tensor, right: Tensor) -> float:
    """The largest difference, of the largest value; of integers, the share that differs."""
    if not mine.is_floating_point():
        return float((mine != right).float().mean())
    apart = (mine.float() - right.float()).abs().max() / right.float().abs().max().clamp(min=1e-6)
    return float(torch.nan_to_num(apart, nan=float("inf")))


def compare(
    ops: Ops, config: DecoderConfig, context: int, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    """One row a case; `error` is the worst of its results."""
    inputs, rows = Inputs(device, dtype), []
    with torch.inference_mode():
        for cases in (
            row_cases(inputs, config),
            cache_cases(inputs, config, context),
            sample_cases(inputs, config),
        ):
            for case in cases:
                mine, right = ([out.clone() for out in case.outs] for _ in range(2))
                case.call(ops, mine)
                case.call(REFERENCE, right)
                error = max(map(distance, mine, right))
                row = {"part": "ops", "op": case.op, "case": case.name, "error": error}
                row |= {"dtype": str(dtype).removeprefix("torch."), "limit": LIMITS[dtype]}
                rows.append(row)
    return rows
