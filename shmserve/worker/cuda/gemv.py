# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Products of a few rows with a weight matrix, bound by reading the weights once.

Owns: `gemv` of reference.py, whose contract this is. A program makes ROWS_OUT columns of the output for all rows of x. It pads x to 16
rows whatever their number, and goes along K front to back in tiles of one size: a row's sum has the same order alone
as beside seven others, which split-K or a library's choice by M would not give.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.reference import check_gemv_rows

# 32 weight rows make 128 programs of the narrowest product of an 8B model (4,096 columns): one for each SM of an H100.
# Six tiles of 8 KiB in flight in each cover latency times bandwidth (about 20 KiB an SM) with room.
BLOCK_N = 32
BLOCK_K = 128
NUM_STAGES = 6


# A version of the kernel for one row, and another for several, would be compiled when the first such batch comes.
@triton.jit(do_not_specialize=["M"])
def _gemv(
    x,
    weight,
    bias,
    out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_K_EVEN: tl.constexpr,
    DOT_F32: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    # Rows past N read row N - 1 again instead of being masked: unmasked loads are wide loads.
    row = tl.minimum(n, N - 1).to(tl.int64)
    weights = weight + row[:, None] * K + k[None, :]
    columns = x + m[None, :] * K + k[:, None]
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        if IS_K_EVEN:
            w = tl.load(weights + start)
            v = tl.load(columns + start, mask=m[None, :] < M, other=0.0)
        else:
            inside = start + k < K
            w = tl.load(weights + start, mask=inside[None, :], other=0.0)
            v = tl.load(columns + start, mask=(m[None, :] < M) & inside[:, None], other=0.0)
        if DOT_F32:
            w, v = w.to(tl.float32), v.to(tl.float32)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + row).to(tl.float32)[:, None]
    target = out + m[None, :] * N + n[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See reference.gemv."""
    num_rows, depth = x.shape
    check_gemv_rows(num_rows)
    # Half a tile where whole ones leave a rest: a masked loop spills registers on sm_90.
    is_half = launch.is_wide(weight) or depth % BLOCK_K != 0
    block_k = BLOCK_K // 2 if is_half else BLOCK_K
    launch.run(
        _gemv,
        (-(-weight.shape[0] // BLOCK_N),),
        (x, weight, bias, out, num_rows, weight.shape[0], depth),
        {
            "BLOCK_M": launch.MIN_DOT,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": block_k,
            "IS_K_EVEN": depth % block_k == 0,
            "DOT_F32": launch.IS_INTERPRETED,
        },
        num_warps=2,
        num_stages=NUM_STAGES,
    )
