"""Fixtures that several test folders share. Toy files are written by hand, byte by byte."""

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shmserve.models import DEFAULT_MODEL, PreparedModel, prepare
from shmserve.token_bytes import byte_of_character

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}

# Before torch is imported: its threads would spin for neighbours that two busy cores never let run (a 0.1 s step took 10 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def default_model() -> PreparedModel:
    """The embedded model, from the user's cache; the first time it is really downloaded."""
    return prepare(DEFAULT_MODEL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
            item.add_marker(pytest.mark.timeout(600))  # whichever is first may have to download


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: object) -> tuple[int, bytes]:
    """(type id, bytes) as GGUF stores it; a list takes the type of its first element."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int) and value < 0:
        return 5, struct.pack("<i", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value < 2**32 else (10, struct.pack("<Q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    assert isinstance(value, list)
    items = [_value(item) for item in value]
    head = struct.pack("<IQ", items[0][0] if items else 4, len(items))
    return 9, head + b"".join(content for _, content in items)


def gguf_bytes(
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[tuple[int, ...], str, bytes]] | None = None,
    version: int = 3,
) -> bytes:
    """A GGUF file. A tensor is (shape as numpy has it, type name, bytes)."""
    out = struct.pack("<4sIQQ", b"GGUF", version, len(tensors or {}), len(metadata))
    for key, value in metadata.items():
        type_id, content = _value(value)
        out += _string(key) + struct.pack("<I", type_id) + content
    data = b""
    for name, (shape, type_name, content) in (tensors or {}).items():
        out += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += struct.pack("<IQ", TYPE_IDS[type_name], len(data))
        data += content + bytes(-len(content) % 32)
    return out + (bytes(-len(out) % 32) + data if tensors else b"")


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file of `gguf_bytes(...)` to tmp_path and gives its path."""

    def write(*args: object, name: str = "toy.gguf", **kwargs: object) -> Path:
        path = tmp_path / name
        path.write_bytes(gguf_bytes(*args, **kwargs))  # type: ignore[arg-type]
        return path

    return write


@pytest.fixture
def toy_metadata() -> Callable[..., dict[str, object]]:
    """Metadata of a servable toy GGUF: `toy_metadata("key to drop", ..., pre="qwen2", ...)`.

    Keywords are keys under `tokenizer.ggml.`. 262 byte-level tokens; ids 0 and 1 are special.
    """
    words = ["<|end|>", "<|start|>", *sorted(byte_of_character()), "he", "ll", "hell", "hello"]
    everything: dict[str, object] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(words) - 2),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }

    def metadata(*dropped: str, **changes: object) -> dict[str, object]:
        kept = {key: value for key, value in everything.items() if key not in dropped}
        return kept | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    return metadata


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A cache directory of the test's own, not there yet."""
    return tmp_path / "cache"
