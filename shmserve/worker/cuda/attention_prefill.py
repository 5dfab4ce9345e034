# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Paged attention of ragged chunks: the new tokens of each sequence over all of its cache, themselves included.

Owns: `prefill_attention` of reference.py, whose contract this is. The grid is (tiles of the longest chunk, KV heads, sequences); a
program past its chunk's end leaves at once. Tiles of keys begin at multiples of the tile from position 0, so a row meets its
keys in the same order however its prompt was chunked, and a prefix hit gives the same bits as a miss.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.attention_tile import attend_tile

# The largest tiles that no architecture spills registers for, at any head size; half as many queries beside heads of 256.
BLOCK_M = 64
BLOCK_N = 32


# A version of the kernel for each kind of number would be compiled when the first such batch comes.
@triton.jit(do_not_specialize=["first_sequence"])
def _attend_chunk(
    q,
    keys,
    values,
    block_table,
    cu_seqlens,
    kv_lens,
    out,
    scale,
    table_width,
    first_sequence,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_F32: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    begin = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - begin
    first_query = tile * TILE_TOKENS
    if first_query >= num_queries:
        return
    length = tl.load(kv_lens + sequence)
    GROUP: tl.constexpr = NUM_Q // NUM_KV
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)
    query = first_query + row // GROUP
    is_query = (row // GROUP < TILE_TOKENS) & (query < num_queries)
    head = (begin + query).to(tl.int64) * NUM_Q + kv_head * GROUP + row % GROUP
    at = head[:, None] * DIM + lane[None, :]
    inside = is_query[:, None] & (lane[None, :] < DIM)
    queries = tl.load(q + at, mask=inside, other=0.0)
    if DOT_F32:
        queries = queries.to(tl.float32)
    before = length - num_queries
    query_at = before + query
    last_query = tl.minimum(first_query + TILE_TOKENS, num_queries)
    end = tl.minimum(before + last_query, length)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(before + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table = block_table + sequence.to(tl.int64) * table_width
    for start in range(first, end, BLOCK_N):
        largest, total, attended = attend_tile(
            queries, largest, total, attended, keys, values, table, start, end, query_at, kv_head, scale,
            WINDOW, SOFTCAP, NUM_KV, DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, DOT_F32,
        )  # fmt: skip
    # A padding chunk has queries but no keys: it divides by 1 and gives zeros.
    attended = attended / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + at, attended.to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: int = 0,
) -> None:
    """See reference.prefill_attention."""
    num_q, dim = q.shape[1:]
    block_size, num_kv = k_cache.shape[1:3]
    group = num_q // num_kv
    block_d = launch.power_of_two(dim)
    block_m = max(BLOCK_M // 2 if block_d > 128 else BLOCK_M, launch.power_of_two(group))
    tile_tokens = block_m // group
    launch.run(
        _attend_chunk,
        (-(-max_query_len // tile_tokens), num_kv, len(kv_lens) - first),
        (
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens,
            kv_lens,
            out,
            scale,
            block_table.shape[1],
            first,
        ),
        {
            "WINDOW": window,
            "SOFTCAP": softcap,
            "NUM_Q": num_q,
            "NUM_KV": num_kv,
            "DIM": dim,
            "BLOCK_SIZE": block_size,
            "TILE_TOKENS": tile_tokens,
            "BLOCK_M": block_m,
            "BLOCK_N": BLOCK_N // 2 if launch.is_wide(k_cache) else BLOCK_N,
            "BLOCK_D": block_d,
            "DOT_F32": launch.IS_INTERPRETED,
        },
        num_warps=4,
        # A third stage costs large heads occupancy; small ones, with two, spill on sm_120.
        num_stages=3 if block_d <= 64 else 2,
    )
