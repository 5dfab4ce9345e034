"""The tensor types of ggml: their block formats, and the values in them.

Owns: the table of types, `dequantize`, and the row order of llama's q and k projections.
Never: opens a file (`gguf.py` does). Nothing here imports torch; any process may use it.

A block lies along the last dimension of a tensor. A block of 32 elements begins with its scale (and
minimum), float16; a block of 256 has them too, and small integers that multiply them for each part of
16 or 32 elements. Values are computed as ggml computes them: the same bits.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

# ggml type id -> (name, elements in a block, bytes of a block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_BLOCKS = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
CHUNK_ELEMENTS = 1 << 18


class GGUFError(ValueError):
    """One line: the path, what is wrong, and the tensor or key if there is one."""


def dequantize(
    type_name: str, raw: NDArray[np.uint8], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """The float32 values of a tensor's bytes; blocks run along the last dimension of `shape`."""
    unpack = _UNPACK.get(type_name)
    if unpack is None:
        known = ", ".join(sorted(_UNPACK))
        raise GGUFError(f"values of type {type_name} cannot be read (readable: {known})")
    elements, size = _BLOCKS[type_name]
    packed = np.ascontiguousarray(raw).reshape(-1, size)
    out = np.empty((packed.shape[0], elements), np.float32)
    # Some at a time: what unpacking makes in between stays in the cache, and is never as large as the tensor.
    step = max(1, CHUNK_ELEMENTS // elements)
    for first in range(0, packed.shape[0], step):
        out[first : first + step] = unpack(packed[first : first + step])
    return out.reshape(shape)


def unpermute_rows(array: NDArray[Scalar], num_heads: int) -> NDArray[Scalar]:
    """The rows of a llama q or k projection in the half-split rotary order of Hugging Face.

    GGUF files of the llama architecture keep the two halves of a head interleaved: row j of a
    head's first half is file row 2j, row j of the second half is file row 2j + 1. Works on values
    and on packed blocks alike, since blocks run along the row.
    """
    rows, rest = array.shape[0], array.shape[1:]
    if rows % (2 * num_heads):
        raise GGUFError(f"{rows} rows cannot be split into {num_heads} heads of even size")
    pairs = array.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, *rest)


def _halves(blocks: NDArray[np.uint8], column: int) -> NDArray[np.float32]:
    """The float16 at byte `column` of each block, as a float32 column."""
    pair = np.ascontiguousarray(blocks[:, column : column + 2])
    return pair.view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Low nibbles are the first half of the block, high nibbles the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: NDArray[np.uint8], column: int) -> NDArray[np.uint8]:
    """The bits that four bytes at `column` hold for 32 elements, lowest first, in the place of bit 4."""
    bits = np.unpackbits(blocks[:, column : column + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)


def _q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = _nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return values * _halves(blocks, 0)


def _q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = _nibbles(blocks[:, 4:]).astype(np.float32)
    return values * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    return (values - np.float32(16)) * _halves(blocks, 0)


def _q5_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return values * _halves(blocks, 0) + _halves(blocks, 2)


def scales_and_minima(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The 6-bit multipliers [blocks, 8] of the scale and of the minimum, for each 32 elements of Q4_K and Q5_K.

    Bytes 4 to 15 of a block: a, b and c, four each. The low six bits of a and b are the first four scales and minima. The
    last four have their low four bits in c (scales low, minima high) and their high two bits above those six.
    """
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales, minima


def nibbles_of_32(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[blocks, 8, 32] from 128 bytes a block: 32 bytes hold the low nibbles of 32 elements, then the high ones of the next."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _scaled(blocks: NDArray[np.uint8], integers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Q4_K's and Q5_K's values of the integers [blocks, 8, 32]."""
    scales, minima = scales_and_minima(blocks)
    d = _halves(blocks, 0) * scales.astype(np.float32)
    m = _halves(blocks, 2) * minima.astype(np.float32)
    values = integers.astype(np.float32) * d[..., None] - m[..., None]
    return values.reshape(-1, 256)


def _q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _scaled(blocks, nibbles_of_32(blocks[:, 16:]))


def _q5_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # Bit j of byte i at 16 belongs to element i of the j-th 32.
    high = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    integers = nibbles_of_32(blocks[:, 48:]) | high.swapaxes(1, 2) << np.uint8(4)
    return _scaled(blocks, integers)


def _q6_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    # Halves of 128 elements: 64 bytes hold the low nibbles of 64 elements, then their high ones those of the next 64;
    # 32 bytes the upper two bits of four times 32, lowest first. 16 signed multipliers and the scale end the block.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    values = (low | (high & 3) << np.uint8(4)).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return (values.reshape(-1, 16, 16) * scales[..., None]).reshape(-1, 256)


_UNPACK: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
