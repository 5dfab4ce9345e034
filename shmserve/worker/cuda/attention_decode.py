# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Paged attention of decode rows, their contexts cut into splits that run side by side, and the kernel that joins them.

Owns: `decode_attention` of reference.py, whose contract this is. The grid is (rows, KV heads, splits of the longest context that the
model allows): it depends on no length, so one recorded graph serves all. A program whose split lies past its row's end, or before
its window, leaves at once. Splits have a fixed size, not a fixed count: a row is cut alike in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.attention_tile import attend_tile
from shmserve.worker.cuda.reference import DecodeScratch

BLOCK_N = 64
# Block table, keys and values are loads one behind the other: with two stages the second waits in registers, with three in none.
NUM_STAGES = 3


@triton.jit
def _attend_split(
    q,
    keys,
    values,
    block_table,
    kv_lens,
    partial,
    lse,
    scale,
    table_width,
    num_splits,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_F32: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    first, last = split * SPLIT, tl.minimum(length, (split + 1) * SPLIT)
    if first >= length:
        return
    if WINDOW > 0:
        if last <= length - WINDOW:
            return
        # Whole tiles only, so that a tile begins at the same keys for every length.
        first = tl.maximum(first, tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N)
    GROUP: tl.constexpr = NUM_Q // NUM_KV
    member = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    head = row.to(tl.int64) * NUM_Q + kv_head * GROUP + member
    inside = (member[:, None] < GROUP) & (lane[None, :] < DIM)
    queries = tl.load(q + head[:, None] * DIM + lane[None, :], mask=inside, other=0.0)
    if DOT_F32:
        queries = queries.to(tl.float32)
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    attended = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    query_at = tl.zeros((BLOCK_G,), tl.int32) + (length - 1)
    table = block_table + row.to(tl.int64) * table_width
    for start in range(first, last, BLOCK_N):
        largest, total, attended = attend_tile(
            queries, largest, total, attended, keys, values, table, start, last, query_at, kv_head, scale,
            WINDOW, SOFTCAP, NUM_KV, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, DOT_F32,
        )  # fmt: skip
    at = head * num_splits + split
    tl.store(partial + at[:, None] * DIM + lane[None, :], attended / total[:, None], mask=inside)
    tl.store(lse + at, largest + tl.log2(total), mask=member < GROUP)


@triton.jit
def _join_splits(
    partial,
    lse,
    kv_lens,
    out,
    num_splits,
    WINDOW: tl.constexpr,
    NUM_Q: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lens + row)
    split = tl.arange(0, BLOCK_S)
    lane = tl.arange(0, BLOCK_D)
    is_used = split * SPLIT < length
    if WINDOW > 0:
        is_used = is_used & ((split + 1) * SPLIT > length - WINDOW)
    at = (row.to(tl.int64) * NUM_Q + head) * num_splits + split
    share = tl.load(lse + at, mask=is_used, other=float("-inf"))
    largest = tl.max(share, axis=0)
    # An empty row has no share: it subtracts 0, weighs nothing and divides by 1.
    weight = tl.exp2(share - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weight, axis=0)
    inside = is_used[:, None] & (lane[None, :] < DIM)
    parts = tl.load(partial + at[:, None] * DIM + lane[None, :], mask=inside, other=0.0)
    joined = tl.sum(parts * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out + (row.to(tl.int64) * NUM_Q + head) * DIM + lane
    tl.store(target, joined.to(out.dtype.element_ty), mask=lane < DIM)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """See reference.decode_attention."""
    rows, num_q, dim = q.shape
    block_size, num_kv = k_cache.shape[1:3]
    num_splits = scratch.lse.shape[2]
    shared = {
        "WINDOW": window,
        "NUM_Q": num_q,
        "DIM": dim,
        "SPLIT": scratch.tokens,
        "BLOCK_D": launch.power_of_two(dim),
    }
    launch.run(
        _attend_split,
        (rows, num_kv, num_splits),
        (
            q,
            k_cache,
            v_cache,
            block_table,
            kv_lens,
            scratch.partial,
            scratch.lse,
            scale,
            block_table.shape[1],
            num_splits,
        ),
        {
            **shared,
            "SOFTCAP": softcap,
            "NUM_KV": num_kv,
            "BLOCK_SIZE": block_size,
            "BLOCK_G": max(launch.MIN_DOT, launch.power_of_two(num_q // num_kv)),
            "BLOCK_N": BLOCK_N // 2 if launch.is_wide(k_cache) else BLOCK_N,
            "DOT_F32": launch.IS_INTERPRETED,
        },
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    launch.run(
        _join_splits,
        (rows, num_q),
        (scratch.partial, scratch.lse, kv_lens, out, num_splits),
        {**shared, "BLOCK_S": launch.power_of_two(num_splits)},
        num_warps=4,
    )
