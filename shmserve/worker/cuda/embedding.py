# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Rows of a table by id, where an id may be one that the step before sampled and that the host has not seen yet.

Owns: `embed` of reference.py, whose contract this is. It is what makes overlap possible: a step is launched while the ids it
reads are still being computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch

BLOCK = 1024


@triton.jit
def _embed(ids, source, previous, table, out, scale, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    taken_from = tl.load(source + row)
    own = tl.load(ids + row)
    carried = tl.load(previous + tl.maximum(taken_from, 0))
    token = tl.where(taken_from >= 0, carried, own).to(tl.int64)
    value = tl.load(table + token * width + column, mask=inside, other=0.0).to(tl.float32) * scale
    target = out + row.to(tl.int64) * width + column
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def embed(
    ids: Tensor, source: Tensor, previous: Tensor, table: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """See reference.embed."""
    rows, width = out.shape
    launch.run(
        _embed,
        (rows, -(-width // BLOCK)),
        (ids, source, previous, table, out, float(scale), width),
        {"BLOCK": BLOCK},
        num_warps=4,
    )
