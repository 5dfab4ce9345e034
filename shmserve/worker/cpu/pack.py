"""Weights in the layout of the C kernels: panels of 16 outputs, blocks of 32 inputs (`matmul.h` draws it).

Owns: the conversion of GGUF blocks and of floats, and the memory that holds the result. Never: opens a file, or imports torch.

Blocks of Q4_0, Q4_1 and Q8_0 are kept as they are, to the bit; only their words change places. Those of Q4_K keep their integers;
the scale and the minimum of each 32, products in the file, are rounded to float16 (an error of at most 2**-11 of each).
Everything else comes as floats and gets 8 bits a weight with one scale for 32 (the error of Q8_0). Rows and columns are padded
with zeros.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmserve.ggml_blocks import nibbles_of_32, scales_and_minima

U1 = npt.NDArray[np.uint8]
F4 = npt.NDArray[np.float32]

COLUMNS, GROUP = 16, 32
BLOCK4 = np.dtype([("d", "<f2", 16), ("m", "<f2", 16), ("w", "<u4", (4, 16))])
BLOCK8 = np.dtype([("d", "<f2", 16), ("w", "<u4", (8, 16))])
KEPT_TYPES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 18}
"""Types whose blocks are kept, and the bytes of 32 elements."""

CHUNK_BYTES = 64 << 20
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`blocks` has one element for each (panel, group), of dtype BLOCK4 or BLOCK8."""

    blocks: npt.NDArray[Any]

    @property
    def bits(self) -> int:
        return 4 if self.blocks.dtype == BLOCK4 else 8

    @property
    def num_panels(self) -> int:
        return int(self.blocks.shape[0])

    @property
    def num_groups(self) -> int:
        return int(self.blocks.shape[1])


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """Norms and `o_bias` are padded with zeros to whole groups; None where the architecture has no such tensor."""

    attention_norm: F4
    ffn_norm: F4
    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    q_norm: F4 | None = None
    k_norm: F4 | None = None
    q_bias: F4 | None = None
    k_bias: F4 | None = None
    v_bias: F4 | None = None
    o_bias: F4 | None = None
    window: int | None = None
    is_rotated: bool = True


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All that the kernels read. `cos` and `sin` are f4[positions, head_dim / 2]; a tied head is the embedding itself."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    embedding: PackedMatrix
    head: PackedMatrix
    final_norm: F4
    layers: tuple[PackedLayer, ...]
    cos: F4
    sin: F4


class Arena:
    """Memory for weights, taken in large pieces so that the kernel may back it with huge pages; never given back in part."""

    def __init__(self) -> None:
        self._chunk: U1 = np.zeros(0, np.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A zeroed array, aligned for the widest loads."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > self._chunk.size:
            chunk = mmap.mmap(
                -1, max(num_bytes, CHUNK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                chunk.madvise(mmap.MADV_HUGEPAGE)
            self._chunk, start = np.frombuffer(chunk, np.uint8), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used].view(dtype).reshape(shape)


def pack_blocks(
    type_name: str, raw: U1, arena: Arena, *, row_multiple: int = COLUMNS
) -> PackedMatrix:
    """The matrix of `raw` [rows, bytes of a row], blocks of one of KEPT_TYPES; rows are padded to a multiple."""
    rows, row_bytes = raw.shape
    groups = row_bytes // KEPT_TYPES[type_name]
    panels = -(-rows // row_multiple) * row_multiple // COLUMNS
    is_wide = type_name == "Q8_0"
    out = arena.take((panels, groups), BLOCK8 if is_wide else BLOCK4)
    has_minimum = type_name in ("Q4_1", "Q4_K")
    num_words, at = (8, 2) if is_wide else (4, 4 if has_minimum else 2)
    # A few panels at a time: what is copied stays in the cache between its copies.
    step = max(1, (1 << 20) // max(1, row_bytes * COLUMNS))
    for first in range(0, -(-rows // COLUMNS), step):
        some = raw[first * COLUMNS : (first + step) * COLUMNS]
        if type_name == "Q4_K":
            some = _as_q4_1(some)
        n = -(-some.shape[0] // COLUMNS)
        if some.shape[0] < n * COLUMNS:
            some = np.concatenate(
                [some, np.zeros((n * COLUMNS - some.shape[0], some.shape[1]), np.uint8)]
            )
        blocks = some.reshape(n, COLUMNS, groups, -1)
        part = out[first : first + n]
        d = _halves(blocks, 0)
        part["d"] = d
        if has_minimum:
            part["m"] = _halves(blocks, 2)
        elif type_name == "Q4_0":
            part["m"] = np.float16(-8) * d  # exact: a power of two
        words = (
            np.ascontiguousarray(blocks[..., at:])
            .view("<u4")
            .reshape(n, COLUMNS, groups, num_words)
        )
        part["w"] = words.transpose(0, 2, 3, 1)
    return PackedMatrix(out)


def _as_q4_1(rows: U1) -> U1:
    """Rows of Q4_K blocks as rows of Q4_1 blocks with the same integers."""
    blocks = rows.reshape(-1, 144)
    multipliers, minima = scales_and_minima(blocks)
    d, m = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32).T
    out = np.empty((blocks.shape[0], 8, 20), np.uint8)
    with np.errstate(over="ignore"):
        halves = np.stack([d[:, None] * multipliers, -m[:, None] * minima], axis=-1).astype("<f2")
    out[..., :4] = halves.view(np.uint8)
    integers = nibbles_of_32(blocks[:, 16:])
    out[..., 4:] = integers[..., :16] | integers[..., 16:] << np.uint8(4)
    return out.reshape(rows.shape[0], -1)


def _halves(blocks: U1, at: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `at` of each block, as [panel, group, column]."""
    pairs = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]
    result: npt.NDArray[np.float16] = pairs.transpose(0, 2, 1)
    return result


def pack_floats(values: F4, arena: Arena, *, row_multiple: int = COLUMNS) -> PackedMatrix:
    """The matrix of `values` [rows, columns] in 8 bits. A group that is not finite stays so: its scale is NaN."""
    rows, columns = values.shape
    groups = -(-columns // GROUP)
    panels = -(-rows // row_multiple) * row_multiple // COLUMNS
    out = arena.take((panels, groups), BLOCK8)
    step = max(1, (1 << 20) // (columns * COLUMNS))
    for first in range(0, -(-rows // COLUMNS), step):
        some = values[first * COLUMNS : (first + step) * COLUMNS]
        n = -(-some.shape[0] // COLUMNS)
        padded = np.zeros((n * COLUMNS, groups * GROUP), np.float32)
        padded[: some.shape[0], :columns] = some
        d, q = quantize(padded.reshape(n, COLUMNS, groups, GROUP))
        out[first : first + n]["d"] = d.transpose(0, 2, 1)
        out[first : first + n]["w"] = q.view("<u4").transpose(0, 2, 3, 1)
    return PackedMatrix(out)


def quantize(groups: F4) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """Scales [...] and integers [..., 32] of the groups [..., 32]: value = scale * integer, nearly."""
    largest = np.abs(groups).max(-1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scales = (largest / np.float32(127)).astype(np.float16)
        per_unit = np.where(scales > 0, np.float32(1) / scales.astype(np.float32), np.float32(0))
        is_finite = np.isfinite(scales)
        scaled = np.where(is_finite[..., None], groups * per_unit[..., None], np.float32(0))
    scales[~is_finite] = np.nan
    return scales, np.rint(scaled).clip(-127, 127).astype(np.int8)


def unpack(matrix: PackedMatrix) -> F4:
    """The values [panels * 16, groups * 32], for the self-test and the tests: the kernels never make them."""
    blocks = matrix.blocks
    words = np.ascontiguousarray(blocks["w"].transpose(0, 3, 1, 2))  # [panel, column, group, word]
    if matrix.bits == 8:
        integers = words.view(np.int8).astype(np.float32)
    else:
        nibbles = words.view(np.uint8)
        integers = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.float32)
    values = integers * blocks["d"].transpose(0, 2, 1)[..., None].astype(np.float32)
    if matrix.bits == 4:
        values += blocks["m"].transpose(0, 2, 1)[..., None].astype(np.float32)
    return values.reshape(matrix.num_panels * COLUMNS, matrix.num_groups * GROUP)


def padded(values: F4, multiple: int = GROUP) -> F4:
    """A vector with zeros behind it up to a multiple."""
    out = np.zeros(-(-values.size // multiple) * multiple, np.float32)
    out[: values.size] = values
    return out
