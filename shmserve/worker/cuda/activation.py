# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""The gated activation between the two halves of a feed-forward block.

Owns: `gated_mul` of reference.py, whose contract this is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch

BLOCK = 1024


@triton.jit
def _gated_mul(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    base = gate_up + row * 2 * width
    gate = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + width + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108 - triton reads it better
        # gelu's tanh form, 0.5 x (1 + tanh(z)), is x sigmoid(2 z): no tanh, which triton has in libdevice only.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    active = gate * tl.sigmoid(inner)
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=inside)


def gated_mul(gate_up: Tensor, out: Tensor, gelu: bool = False) -> None:
    """See reference.gated_mul."""
    rows, width = out.shape
    launch.run(
        _gated_mul,
        (rows, -(-width // BLOCK)),
        (gate_up, out, width),
        {"GELU": gelu, "BLOCK": BLOCK},
        num_warps=4,
    )
