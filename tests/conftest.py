"""Fixtures that several test folders share. Toy files are written by hand, byte by byte."""

import gc
import os
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from shmserve.models import DEFAULT_MODEL, PreparedModel, prepare
from shmserve.token_bytes import byte_of_character

TOOLS = str(Path(__file__).resolve().parents[1] / "tools")
if TOOLS not in sys.path:  # mortal.py starts the servers of the tests; the benches are tested
    sys.path.append(TOOLS)

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}

# Before torch is imported: its threads would spin for neighbours that two busy cores never let run (a 0.1 s step took 10 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A background job of a script ignores SIGINT, and so would every server started here, which is then told to end by one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How hard hypothesis looks: `make test` takes "quick", the same examples each time, so that what it says is about the change and not
# about the day; `make test-all` asks for "full" (--hypothesis-profile), which looks for new ones. A test that wants more or fewer
# says so as a multiple or a part of `settings.default.max_examples`.
settings.register_profile("full", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def default_model() -> PreparedModel:
    """The embedded model, from the user's cache; the first time it is really downloaded."""
    return prepare(DEFAULT_MODEL)


# What takes longest comes first, so that neither process is left alone with it at the end.
LONGEST_FIRST = (
    "tests/browser/",
    "tests/e2e/",
    "tests/worker/cpu/",
    "tests/process/",
    "tests/worker/test_torch_runner.py",
    "tests/rings/test_machine.py",
    "tests/worker/test_scheduler_machine.py",
    "tests/worker/test_sampler.py",
    "tests/worker/test_decoder.py",
    "tests/stress/",
)


def _rank(item: pytest.Item) -> int:
    starts = (item.nodeid.startswith(prefix) for prefix in LONGEST_FIRST)
    return next((rank for rank, is_it in enumerate(starts) if is_it), len(LONGEST_FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)  # all others stay in their order
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
            item.add_marker(pytest.mark.timeout(600))  # whichever is first may have to download


# A server of the real model and compiled kernels are made once for all files of these folders: one process takes them.
TOGETHER = ("tests/e2e/routers/", "tests/e2e/", "tests/worker/cpu/")  # the first that fits


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives files to processes as `--dist loadfile` does, but those of such a folder to one."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndFolders(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            whole = next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)
            return whole or super()._split_scope(nodeid)

    return FilesAndFolders(config, log)


def pytest_collection_finish() -> None:
    """What the test modules imported stays to the end: a collection of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


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
