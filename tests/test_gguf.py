"""The GGUF reader: values, shapes, block formats, and one clear line for every broken file."""

import random
import struct

import numpy as np
import pytest

from shmserve.gguf import GGUFError, GGUFFile, dequantize, unpermute_rows

METADATA = {
    "general.architecture": "llama",
    "flag": True,
    "count": 7,
    "large": 2**40,
    "ratio": 0.5,
    "words": ["a", "", "\u00e9\U0001f600"],
    "numbers": [1, 2, 3],
    "nested": [["x"], ["y", "z"]],
}
F32 = np.arange(6, dtype="<f4").tobytes()
TENSORS = {"first": ((2, 3), "F32", F32), "second": ((3,), "F16", np.ones(3, "<f2").tobytes())}


def f16(value: float) -> bytes:
    return np.float16(value).tobytes()


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(write_gguf, version):
    file = GGUFFile(write_gguf(METADATA, TENSORS, version=version))
    assert list(file.metadata.pop("numbers")) == [1, 2, 3]
    assert file.metadata == {key: METADATA[key] for key in METADATA if key != "numbers"}
    assert [(t.name, t.shape, t.type_name, t.num_bytes) for t in file.tensors.values()] == [
        ("first", (2, 3), "F32", 24),
        ("second", (3,), "F16", 6),
    ]
    assert file.raw("first").tobytes() == F32
    assert file.array("first").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.array("second").tolist() == [1, 1, 1]


def test_raw_is_a_read_only_view_that_outlives_the_reader(write_gguf):
    raw = GGUFFile(write_gguf(METADATA, TENSORS)).raw("first")
    assert not raw.flags.writeable and not raw.flags.owndata
    assert raw.tobytes() == F32


def test_q4_1_has_scale_then_minimum_and_low_nibbles_first_K2():
    block = bytes.fromhex("003800bcf0e1d2c3b4a5968778695a4b3c2d1e0f")
    values = dequantize("Q4_1", np.frombuffer(block, np.uint8), (32,))
    assert values[:16].tolist() == [-1 + 0.5 * i for i in range(16)]
    assert values[16:].tolist() == [6.5 - 0.5 * i for i in range(16)]


@pytest.mark.parametrize(
    ("type_name", "block", "expected"),
    [
        ("Q8_0", f16(0.5) + struct.pack("32b", *range(-16, 16)), [i / 2 for i in range(-16, 16)]),
        (
            "Q4_0",
            f16(2) + bytes(i | (15 - i) << 4 for i in range(16)),
            [2 * (i - 8) for i in range(16)] + [2 * (7 - i) for i in range(16)],
        ),
        ("F16", f16(1.5) + f16(-2), [1.5, -2]),
        ("BF16", bytes.fromhex("803f40c0"), [1, -3]),
        ("F32", struct.pack("<2f", 1.25, -7), [1.25, -7]),
    ],
)
def test_block_formats_give_the_values_worked_out_by_hand(type_name, block, expected):
    values = dequantize(type_name, np.frombuffer(block, np.uint8), (len(expected),))
    assert values.dtype == np.float32
    assert values.tolist() == expected


def test_a_format_that_cannot_be_read_is_named_with_its_tensor(write_gguf):
    path = write_gguf({}, {"blk.0.ffn_up.weight": ((256,), "Q2_K", bytes(84))})
    with pytest.raises(GGUFError, match=r"toy\.gguf: tensor blk\.0\.ffn_up\.weight: .*Q2_K"):
        GGUFFile(path).array("blk.0.ffn_up.weight")


def test_unpermuted_row_j_is_file_row_2j_and_the_second_half_is_2j_plus_1_K1():
    rows = np.arange(3 * 8 * 5).reshape(24, 5)
    out = unpermute_rows(rows, num_heads=3)
    for head in range(3):
        for j in range(4):
            assert (out[head * 8 + j] == rows[head * 8 + 2 * j]).all()
            assert (out[head * 8 + 4 + j] == rows[head * 8 + 2 * j + 1]).all()


def test_unpermuting_packed_blocks_equals_unpermuting_their_values():
    packed = np.random.default_rng(1).integers(0, 60, (8, 2, 20), dtype=np.uint8)
    values = dequantize("Q4_1", packed.reshape(-1), (8, 64))
    moved = dequantize("Q4_1", unpermute_rows(packed, 2).reshape(-1), (8, 64))
    assert (moved == unpermute_rows(values, 2)).all()


def test_heads_that_do_not_divide_the_rows_are_refused():
    with pytest.raises(GGUFError, match="10 rows"):
        unpermute_rows(np.zeros((10, 2)), num_heads=3)


def test_every_truncation_is_one_line_and_never_another_error(write_gguf):
    path = write_gguf(METADATA, TENSORS)
    content = path.read_bytes().rstrip(b"\0")  # what follows the last tensor is padding
    for length in range(len(content) - 2):
        path.write_bytes(content[:length])
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_random_damage_gives_a_gguf_error_or_a_readable_file(write_gguf):
    path = write_gguf(METADATA, TENSORS)
    content = path.read_bytes()
    rng = random.Random(5)
    num_refused = 0
    for _ in range(2000):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice(
                (0, 1, 0x7F, 0xFF, rng.randrange(256))
            )
        path.write_bytes(damaged)
        try:
            file = GGUFFile(path)
            for info in file.tensors.values():
                assert len(file.raw(info.name)) == info.num_bytes
        except GGUFError:
            num_refused += 1
    assert num_refused > 500


def patched(content: bytes, old: bytes, new: bytes) -> bytes:
    assert content.count(old) == 1
    return content.replace(old, new)


HEADER = struct.pack("<IQQ", 3, 2, len(METADATA))
SHAPE_OF_FIRST = struct.pack("<5sI2QIQ", b"first", 2, 3, 2, 0, 0)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"GGUF", b"GGML", "not a GGUF file"),
        (HEADER, struct.pack("<IQQ", 1, 2, 8), "GGUF version 1"),
        (HEADER, struct.pack(">I", 3) + HEADER[4:], "big endian"),
        (HEADER, struct.pack("<IQQ", 3, 2**60, 8), "tensors cannot be in a file"),
        (HEADER, struct.pack("<IQQ", 3, 2, 2**60), "metadata keys cannot be in a file"),
        (SHAPE_OF_FIRST, struct.pack("<5sI2QIQ", b"first", 2, 3, 2, 0, 8), "first: offset 8"),
        (
            SHAPE_OF_FIRST,
            struct.pack("<5sI2QIQ", b"first", 2, 3, 2**62, 0, 0),
            "first: .*cut short",
        ),
        (SHAPE_OF_FIRST, struct.pack("<5sI2QIQ", b"first", 2, 3, 0, 0, 0), "dimension is zero"),
        (
            SHAPE_OF_FIRST,
            struct.pack("<5sI2QIQ", b"first", 2, 3, 2, 99, 0),
            "unknown tensor type 99",
        ),
        (
            SHAPE_OF_FIRST,
            struct.pack("<5sI2QIQ", b"first", 2, 3, 2, 3, 0),
            "no whole blocks of Q4_1",
        ),
        (SHAPE_OF_FIRST, struct.pack("<5sI2QIQ", b"first", 9, 3, 2, 0, 0), "9 dimensions"),
        (b"flag", b"\xff\xfe\xfd\xfc", "not UTF-8"),
        (b"count\x04", b"count\x63", "metadata key count: unknown value type 99"),
    ],
)
def test_what_is_wrong_is_named(write_gguf, old, new, says):
    path = write_gguf(METADATA, TENSORS)
    path.write_bytes(patched(path.read_bytes(), old, new))
    with pytest.raises(GGUFError, match=says):
        GGUFFile(path)


def test_alignment_must_be_a_power_of_two(write_gguf):
    with pytest.raises(GGUFError, match=r"general\.alignment is 24"):
        GGUFFile(write_gguf({"general.alignment": 24}))


def test_one_name_for_two_tensors_is_refused(write_gguf):
    path = write_gguf({}, {"a": ((8,), "F32", bytes(32)), "b": ((8,), "F32", bytes(32))})
    header = struct.pack("<Q1s", 1, b"b")
    path.write_bytes(patched(path.read_bytes(), header, struct.pack("<Q1s", 1, b"a")))
    with pytest.raises(GGUFError, match="tensor a: the name occurs twice"):
        GGUFFile(path)


def test_missing_empty_and_folder_are_told_apart(tmp_path):
    (tmp_path / "empty.gguf").touch()
    for name, says in (("no.gguf", "No such file"), ("empty.gguf", "empty"), (".", "directory")):
        with pytest.raises(GGUFError, match=says):
            GGUFFile(tmp_path / name)


def test_the_default_model_has_the_published_numbers_K2(default_model):
    file = GGUFFile(default_model.weights)
    assert len(file.tensors) == 272
    assert "output.weight" not in file.tensors  # the head is the embedding
    query = file.array("blk.0.attn_q.weight")
    assert file.tensors["blk.0.attn_q.weight"].type_name == "Q4_1"
    assert file.tensors["token_embd.weight"].type_name == "Q8_0"
    assert query.shape == (576, 576)
    assert query[0, :4] == pytest.approx([-0.09631, 0.15735, -0.09631, -0.73047], abs=1e-5)
    assert query[0, 16:20] == pytest.approx([-0.22314, 0.28418, 0.03052, -0.22314], abs=1e-5)
    embedding = file.array("token_embd.weight")
    assert embedding.shape == (49152, 576)
    assert embedding[0, :4] == pytest.approx([-0.10654, 0.03298, 0.04820, -0.02283], abs=1e-5)
