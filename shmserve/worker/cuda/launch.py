"""The one door through which kernels are launched, and the arithmetic of their tiles.

Owns: the call itself. Never: chooses a tile; each kernel's file does, by shapes and dtypes alone, so that a test can take what
would be launched and compile it for a GPU that is not here. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

MIN_DOT = 16
"""tl.dot wants at least so many rows and columns; narrower operands are padded with masked rows."""

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The interpreter computes on numpy arrays, which know no bfloat16: there, dots take float32 operands."""


def run(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Tensor | int | float | None, ...],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 1,
) -> None:
    """Launch `kernel` with `args` and compile-time `constants`; an empty grid is no launch."""
    if 0 not in grid:
        kernel[grid](*args, **constants, **options(num_warps, num_stages))


def options(num_warps: int, num_stages: int) -> dict[str, int | bool]:
    """What a kernel is compiled with. Products may be fused into sums: said here because triton's own default is changing."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def power_of_two(count: int) -> int:
    """The next one up: blocks of a kernel have such sizes, masks cut them to the shape."""
    return 1 << max(0, count - 1).bit_length()


def is_wide(tensor: Tensor) -> bool:
    """float32: its tiles take twice the shared memory, so they are half as large."""
    return bool(tensor.dtype == torch.float32)
