"""The tensor types of ggml: their block formats, and the values in them.

Owns: the table of types, `dequantize`, and the row order of llama's q and k projections.
Never: opens a file (`gguf.py` does). Nothing here imports torch; any process may use it.

A block lies along the last dimension of a tensor and begins with its scale (and minimum), float16.
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
    return unpack(np.ascontiguousarray(raw)).reshape(shape)


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


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Low nibbles are the first half of the block, high nibbles the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)


def _q4_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - np.float32(8)) * _halves(blocks, 0)


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    blocks = raw.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]) * _halves(blocks, 0) + _halves(blocks, 2)


_UNPACK: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
