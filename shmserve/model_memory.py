"""Whether a model's weights fit in the memory that is free, before any of them is read.

Owns: what a runner makes of each tensor, as far as memory goes, and the refusal. Never: reads a weight, or frees memory: without
this line the kernel would kill the worker, in the middle of loading and without a word.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shmserve.cgroup import free_memory_bytes
from shmserve.gguf import GGUFError, GGUFFile
from shmserve.model_cache import ModelError

MAX_HEADER_BYTES = 100 << 20  # of a safetensors file; the format's own limit


@dataclass(frozen=True, slots=True)
class TensorSize:
    name: str
    type_name: str
    num_elements: int


def packed_bytes(tensor: TensorSize) -> int:
    """As the C kernels keep it: 4-bit blocks with scale and minimum, everything else in 8 bits with a scale."""
    bits = 5.0 if tensor.type_name in ("Q4_0", "Q4_1", "Q4_K") else 8.5
    return int(tensor.num_elements * bits / 8)


def float32_bytes(tensor: TensorSize) -> int:
    return 4 * tensor.num_elements


def bfloat16_bytes(tensor: TensorSize) -> int:
    return 2 * tensor.num_elements


def available_bytes() -> int:
    """The memory that can be had without pushing others out, as the kernel estimates it, and no more than a container may have."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    allowed = free_memory_bytes()
    return available if allowed is None else min(available, allowed)


def refuse_without_room(
    weights: Path, bytes_of: Callable[[TensorSize], int], free_bytes: int
) -> None:
    """ModelError if all tensors of the file or folder, each of `bytes_of` its size, are more than `free_bytes`."""
    sizes = {tensor.name: bytes_of(tensor) for tensor in tensors_of(weights)}
    needed = sum(sizes.values())
    if needed > free_bytes:
        largest = max(sizes, key=sizes.__getitem__)
        raise ModelError(
            f"{weights}: its {len(sizes)} tensors take {mebibytes(needed)} of memory "
            f"({largest} alone {mebibytes(sizes[largest])}), but {mebibytes(free_bytes)} are free"
        )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def tensors_of(weights: Path) -> Iterator[TensorSize]:
    """The tensors of a .gguf file, or of a folder's safetensors files."""
    if weights.is_dir():
        for path in _files_of(weights):
            yield from _safetensors(path)
        return
    try:
        file = GGUFFile(weights)
    except GGUFError as error:
        raise ModelError(str(error)) from None
    for info in file.tensors.values():
        yield TensorSize(info.name, info.type_name, prod(info.shape))


def _files_of(folder: Path) -> list[Path]:
    """The files that its index names, or model.safetensors: beside them some folders have the weights once more, in another layout."""
    index = folder / "model.safetensors.index.json"
    named = {"model.safetensors"}
    try:
        if index.exists():
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        named = set()  # who loads it says what is wrong with it
    files = sorted(folder.glob("*.safetensors"))
    return [path for path in files if path.name in named] or files


def _safetensors(path: Path) -> Iterator[TensorSize]:
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError(f"a header of {length} bytes cannot be in it")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                yield TensorSize(name, str(entry["dtype"]), prod(map(int, entry["shape"])))
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from None
