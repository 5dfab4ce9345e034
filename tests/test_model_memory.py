"""A model that does not fit is refused in one line, with the file, the largest tensor and the numbers."""

import json
import struct

import pytest

from shmserve.model_memory import (
    available_bytes,
    float32_bytes,
    packed_bytes,
    refuse_without_room,
    tensors_of,
)
from shmserve.models import ModelError

MIB = 1 << 20


@pytest.fixture
def half_mib(write_gguf):
    """256 rows of 2,048 weights in 8 bits, and 4 rows of them in 4 bits."""
    return write_gguf(
        {},
        {
            "large": ((256, 2048), "Q8_0", bytes(256 * 64 * 34)),
            "small": ((4, 2048), "Q4_1", bytes(4 * 64 * 20)),
        },
    )


def test_weights_larger_than_the_free_memory_are_refused_with_the_numbers(half_mib):
    with pytest.raises(ModelError) as caught:
        refuse_without_room(half_mib, float32_bytes, MIB)
    assert str(caught.value) == (
        f"{half_mib}: its 2 tensors take 2.0 MiB of memory (large alone 2.0 MiB), but 1.0 MiB are free"
    )


def test_what_just_fits_is_let_through(half_mib):
    float32 = 4 * 260 * 2048
    packed = 256 * 64 * 34 + 4 * 64 * 20
    for bytes_of, needed in ((float32_bytes, float32), (packed_bytes, packed)):
        refuse_without_room(half_mib, bytes_of, needed)
        with pytest.raises(ModelError):
            refuse_without_room(half_mib, bytes_of, needed - 1)


def write_safetensors(path, header: dict | bytes) -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)


def test_all_shards_of_a_folder_count(tmp_path):
    for index in range(3):
        entry = {"dtype": "BF16", "shape": [10, index + 1], "data_offsets": [0, 0]}
        write_safetensors(
            tmp_path / f"{index}.safetensors", {f"t{index}": entry, "__metadata__": {"a": "b"}}
        )
    assert [(t.name, t.num_elements) for t in tensors_of(tmp_path)] == [
        ("t0", 10),
        ("t1", 20),
        ("t2", 30),
    ]
    refuse_without_room(tmp_path, float32_bytes, 240)
    with pytest.raises(ModelError, match="t2 alone"):
        refuse_without_room(tmp_path, float32_bytes, 239)


def test_weights_that_a_folder_has_twice_count_once(tmp_path):
    """Mistral's have theirs once more, in its own layout."""
    for name in ("model-1", "model-2", "model", "consolidated"):
        entry = {"dtype": "BF16", "shape": [10], "data_offsets": [0, 0]}
        write_safetensors(tmp_path / f"{name}.safetensors", {f"{name}.weight": entry})
    assert [t.name for t in tensors_of(tmp_path)] == ["model.weight"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps(
            {
                "weight_map": {
                    f"{name}.weight": f"{name}.safetensors" for name in ("model-1", "model-2")
                }
            }
        )
    )
    assert [t.name for t in tensors_of(tmp_path)] == ["model-1.weight", "model-2.weight"]
    index.write_text("[]")
    assert len(list(tensors_of(tmp_path))) == 4


def test_a_container_may_have_less_than_the_machine(monkeypatch):
    free = available_bytes()
    for allowed, expected in ((1000, 1000), (0, 0)):
        monkeypatch.setattr("shmserve.model_memory.free_memory_bytes", lambda value=allowed: value)
        assert available_bytes() == expected
    monkeypatch.setattr("shmserve.model_memory.free_memory_bytes", lambda: 1 << 62)
    assert 0 < available_bytes() < 1 << 50 and free > 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 4) + b"[1]]",
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 26) + b'{"a":{"dtype":1,"shape":2}}',
    ],
)
def test_a_damaged_header_is_one_line_that_names_the_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file") as caught:
        list(tensors_of(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_free_memory_is_a_part_of_all():
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available_bytes() <= total
