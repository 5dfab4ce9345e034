# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Everything between the qkv product and attention, in one pass: bias, norm of queries and keys, rotation, KV write.

Owns: `rotary_write` of reference.py, whose contract this is. A program is one head of one token. Padding tokens write into
block 0, several into one slot: the slot's content is then any of theirs, and nobody reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.reference import check_norms


@triton.jit
def _rotary_write(
    qkv,
    bias,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    kv_slots,
    q_out,
    k_cache,
    v_cache,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    at = qkv + (token * (NUM_Q + 2 * NUM_KV) + head) * DIM + lane
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        first += tl.load(bias + head * DIM + lane, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + head * DIM + HALF + lane, mask=inside, other=0.0).to(tl.float32)

    if head < NUM_Q + NUM_KV:
        if q_norm is not None:
            mean_square = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM
            root = 1.0 / tl.sqrt(mean_square + eps)
            gains = q_norm if head < NUM_Q else k_norm
            gain_first = tl.load(gains + lane, mask=inside, other=0.0).to(tl.float32)
            gain_second = tl.load(gains + HALF + lane, mask=inside, other=0.0).to(tl.float32)
            if UNIT_OFFSET:
                gain_first += 1.0
                gain_second += 1.0
            first = first * root * gain_first
            second = second * root * gain_second
        angle = tl.load(positions + token).to(tl.int64) * HALF + lane
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned

    slot = tl.load(kv_slots + token).to(tl.int64)
    if head < NUM_Q:
        target = q_out + (token * NUM_Q + head) * DIM + lane
        tl.store(target, first.to(q_out.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(q_out.dtype.element_ty), mask=inside)
    elif head < NUM_Q + NUM_KV:
        target = k_cache + (slot * NUM_KV + head - NUM_Q) * DIM + lane
        tl.store(target, first.to(k_cache.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(k_cache.dtype.element_ty), mask=inside)
    else:
        target = v_cache + (slot * NUM_KV + head - NUM_Q - NUM_KV) * DIM + lane
        tl.store(target, first.to(v_cache.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(v_cache.dtype.element_ty), mask=inside)


def rotary_write(
    qkv: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """See reference.rotary_write."""
    num_q, num_kv, dim = q_out.shape[1], k_cache.shape[2], k_cache.shape[3]
    check_norms(q_norm, k_norm)
    launch.run(
        _rotary_write,
        (len(qkv), num_q + 2 * num_kv),
        (qkv, bias, q_norm, k_norm, cos, sin, positions, kv_slots, q_out, k_cache, v_cache, eps),
        {
            "NUM_Q": num_q,
            "NUM_KV": num_kv,
            "DIM": dim,
            "UNIT_OFFSET": unit_offset,
            "BLOCK": launch.power_of_two(dim // 2),
        },
        num_warps=1,  # half a head is 64 lanes at most
    )
