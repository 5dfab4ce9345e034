"""A GGUF file, opened once by mmap and readable by tensor name.

Owns: the bytes of the file format, versions 2 and 3, little endian (`ggml_blocks.py` has the
formats of the tensors' blocks). Never: copies a tensor that nobody asked for, trusts a number from
the file before checking it, or knows a model.

Shapes are numpy's (row-major): the reverse of the dimensions as ggml writes them, so a linear's
weight is [out, in] and its quantised blocks run along `in`. Everything wrong with a file is one
`GGUFError` line. Any process may use it; nothing here imports torch.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmserve.ggml_blocks import TENSOR_TYPES, GGUFError, dequantize, unpermute_rows

__all__ = ["GGUFError", "GGUFFile", "TensorInfo", "dequantize", "unpermute_rows"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

# metadata value type id -> numpy's name of the scalar
SCALARS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class GGUFFile:
    """The metadata and tensors of one file; views keep the mapping alive, nothing needs closing."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        parser = _Parser(self.path, _map(self.path))
        self.metadata, self.tensors = parser.parse()
        self._bytes: NDArray[np.uint8] = np.frombuffer(parser.data, dtype=np.uint8)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A read-only view of the tensor's bytes as they are in the file."""
        info = self._info(name)
        return self._bytes[info.offset : info.offset + info.num_bytes]

    def array(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """The tensor, or some of its rows, dequantised to float32, in the file's row order."""
        info = self._info(name)
        raw, shape = self.raw(name), info.shape
        if rows is not None:
            raw = raw.reshape(shape[0], -1)[rows]
            shape = (len(raw), *shape[1:])
        try:
            return dequantize(info.type_name, raw, shape)
        except GGUFError as error:
            raise GGUFError(f"{self.path}: tensor {printable(name)}: {error}") from None

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"{self.path}: the file has no tensor {name}")
        return info


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise GGUFError(f"{path}: the file is empty")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GGUFError(f"{path}: cannot read it: {error.strerror or error}") from None


class _Parser:
    """A cursor over the mapped file; every read is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.where = "header"

    def parse(self) -> tuple[dict[str, object], dict[str, TensorInfo]]:
        if self.data[:4] != MAGIC:
            raise self.error("not a GGUF file (it does not begin with the letters GGUF)")
        self.at = 4
        version = int(self.number("<I"))
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "it is big endian" if big_endian else f"it has GGUF version {version}"
            raise self.error(f"{what}; little-endian versions 2 and 3 can be read")
        num_tensors = int(self.number("<Q"))
        num_keys = int(self.number("<Q"))
        self.check_count(num_tensors, 24, "tensors")
        self.check_count(num_keys, 13, "metadata keys")
        metadata = self.keys(num_keys)
        headers = [self.tensor_header() for _ in range(num_tensors)]
        self.where = "metadata"
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self.at // alignment) * alignment
        return metadata, self.place(headers, start, alignment)

    def keys(self, num_keys: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            self.where = "metadata"
            key = self.string()
            self.where = f"metadata key {key}"
            if key in metadata:
                raise self.error("the key occurs twice")
            metadata[key] = self.value(int(self.number("<I")), 0)
        return metadata

    def tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, type id, offset from the start of the data)."""
        self.where = "tensor list"
        name = self.string()
        self.where = f"tensor {name}"
        num_dimensions = int(self.number("<I"))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.error(f"it has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        dimensions = [int(self.number("<Q")) for _ in range(num_dimensions)]
        if not all(dimensions):
            raise self.error(f"a dimension is zero in {dimensions}")
        return name, tuple(reversed(dimensions)), int(self.number("<I")), int(self.number("<Q"))

    def place(
        self, headers: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in headers:
            self.where = f"tensor {name}"
            if name in tensors:
                raise self.error("the name occurs twice")
            if type_id not in TENSOR_TYPES:
                raise self.error(f"unknown tensor type {type_id}")
            type_name, block_elements, block_bytes = TENSOR_TYPES[type_id]
            if shape[-1] % block_elements:
                raise self.error(f"rows of {shape[-1]} are no whole blocks of {type_name}")
            num_elements = 1
            for dimension in shape:
                num_elements *= dimension
            num_bytes = num_elements // block_elements * block_bytes
            if offset % alignment:
                raise self.error(f"offset {offset} is not a multiple of {alignment}")
            if start + offset + num_bytes > self.size:
                raise self.error(
                    f"its data end at byte {start + offset + num_bytes}, the file at {self.size}: "
                    "the file is cut short or damaged"
                )
            tensors[name] = TensorInfo(name, shape, type_name, start + offset, num_bytes)
        return tensors

    def value(self, type_id: int, depth: int) -> object:
        if type_id == STRING:
            return self.string()
        if type_id == ARRAY:
            return self.array(depth)
        if type_id not in SCALARS:
            raise self.error(f"unknown value type {type_id}")
        return self.numbers(SCALARS[type_id], 1)[0].item()

    def array(self, depth: int) -> object:
        """Numbers come as a numpy array, strings and nested arrays as a list."""
        type_id = int(self.number("<I"))
        count = int(self.number("<Q"))
        if type_id in SCALARS:
            self.check_count(count, SCALARS[type_id].itemsize, "array elements")
            return self.numbers(SCALARS[type_id], count)
        if depth >= MAX_ARRAY_DEPTH:
            raise self.error("arrays are nested too deeply")
        self.check_count(count, 8, "array elements")
        if type_id == STRING:
            return self.strings(count)
        return [self.value(type_id, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        # A vocabulary and its merges are ~100,000 strings: one loop without calls per byte field.
        data, at, size = self.data, self.at, self.size
        out: list[str] = []
        try:
            for _ in range(count):
                end = at + 8
                length = int.from_bytes(data[at:end], "little")
                at = end + length
                if at > size:
                    raise self.error("the file ends inside it: cut short or damaged")
                out.append(data[end:at].decode("utf-8"))
        except UnicodeDecodeError:
            raise self.error("a string is not UTF-8") from None
        self.at = at
        return out

    def string(self) -> str:
        return self.strings(1)[0]

    def number(self, form: str) -> int:
        try:
            (value,) = struct.unpack_from(form, self.data, self.at)
        except struct.error:
            raise self.error("the file ends inside it: cut short or damaged") from None
        self.at += struct.calcsize(form)
        return int(value)

    def numbers(self, dtype: np.dtype[np.generic], count: int) -> NDArray[np.generic]:
        end = self.at + dtype.itemsize * count
        if end > self.size:
            raise self.error("the file ends inside it: cut short or damaged")
        values = np.frombuffer(self.data[self.at : end], dtype=dtype)
        self.at = end
        return values

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.error(f"{count} {what} cannot be in a file of {self.size} bytes")

    def error(self, what: str) -> GGUFError:
        # Names come from the file: whatever it has in them, the line stays one.
        return GGUFError(f"{self.path}: {printable(self.where)}: {printable(what)}")


def printable(text: str) -> str:
    """The text with an escape for each character that a terminal would act on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
