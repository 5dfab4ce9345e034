# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Residual addition and RMS norm in one pass over a row: one read of each input, one write of each output.

Owns: `add_rms_norm` of reference.py, whose contract this is. A row is one program and is summed in an order that depends on
its length only, so its result is the same in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    width,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        # The norm sees what the next layer will read back: the rounded sum.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean_square = tl.sum(value * value, axis=0) / width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        gain += 1.0
    scaled = value * (1.0 / tl.sqrt(mean_square + eps)) * gain
    tl.store(out + row + column, scaled.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """See reference.add_rms_norm."""
    rows, width = x.shape
    block = launch.power_of_two(width)
    # 16 elements a thread keep a row in registers and enough loads in flight.
    num_warps = min(16, max(1, block // 512))
    launch.run(
        _add_rms_norm,
        (rows,),
        (x, residual, weight, out, eps, width),
        {"UNIT_OFFSET": unit_offset, "BLOCK": block},
        num_warps,
    )
