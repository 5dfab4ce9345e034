# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""The inner loop that both attention kernels share: one tile of keys against a tile of queries, softmax kept running.

Owns: the scores' arithmetic and the walk through the block table. Called from kernels only.

The queries of a tile are (token, head of the group) pairs: all heads that share a KV head read its keys once. Scores are kept
in base 2 (exp2 is the instruction that GPUs have).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    queries,
    largest,
    total,
    attended,
    keys,
    values,
    table,
    start,
    length,
    query_at,
    kv_head,
    scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_F32: tl.constexpr,
):
    """Keys [start, start + BLOCK_N) below `length`, for queries at positions `query_at`; the new running state.

    A row none of whose keys are visible yet keeps largest = -inf, total = 0, and a tile that is wholly hidden changes no bit
    of a row's state: where a row's tile begins is thus free.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    key_at = start + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_D)
    is_key = key_at < length
    block = tl.load(table + key_at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    slot = block * BLOCK_SIZE + key_at % BLOCK_SIZE
    at = (slot[:, None] * NUM_KV + kv_head) * DIM + lane[None, :]
    inside = is_key[:, None] & (lane[None, :] < DIM)
    k = tl.load(keys + at, mask=inside, other=0.0)
    if DOT_F32:
        k = k.to(tl.float32)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0.0:
        scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
    is_visible = is_key[None, :] & (key_at[None, :] <= query_at[:, None])
    if WINDOW > 0:
        is_visible = is_visible & (key_at[None, :] > query_at[:, None] - WINDOW)
    scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # -inf - -inf is NaN: rows without a visible key subtract 0 instead.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    v = tl.load(values + at, mask=inside, other=0.0)
    if DOT_F32:
        v = v.to(tl.float32)
    attended = attended * shrink[:, None]
    attended = tl.dot(weights.to(v.dtype), v, attended, input_precision="ieee")
    return new_largest, total * shrink + tl.sum(weights, axis=1), attended
