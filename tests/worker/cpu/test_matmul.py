"""The products of 8-bit activations with packed weights, on odd shapes and at the edges of their integers."""

import numpy as np
import pytest

from shmserve.gguf import dequantize
from shmserve.worker.cpu.pack import BLOCK4, Arena, pack_blocks, pack_floats, quantize, unpack

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
SHAPES = [(16, 1), (48, 2), (33, 5), (7, 18), (160, 3)]  # rows, groups


def random_blocks(type_name: str, rows: int, groups: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, groups, BLOCK_BYTES[type_name]), dtype=np.uint8)
    num_halves = 2 if type_name == "Q4_1" else 1
    factors = rng.normal(size=(rows, groups, num_halves)).astype("<f2")
    raw[..., : 2 * num_halves] = factors.view(np.uint8)
    return raw.reshape(rows, -1)


def packed(kind: str, rows: int, groups: int, seed: int = 0):
    if kind == "floats":
        values = np.random.default_rng(seed).normal(size=(rows, groups * 32)).astype(np.float32)
        return pack_floats(values, Arena())
    return pack_blocks(kind, random_blocks(kind, rows, groups, seed), Arena())


def expected_products(matrix, x: np.ndarray) -> np.ndarray:
    """In float64, with activations as the kernels round them."""
    groups = x.reshape(x.shape[0], -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    per_unit = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    seen = np.rint(groups * per_unit).astype(np.float64) * (most / np.float32(127))
    return seen.reshape(x.shape) @ unpack(matrix).T.astype(np.float64)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "floats"])
@pytest.mark.parametrize(("rows", "groups"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 8, 9, 33])
def test_products_are_those_of_numpy(native, kind, rows, groups, num_tokens):
    matrix = packed(kind, rows, groups)
    x = np.random.default_rng(1).normal(size=(num_tokens, groups * 32)).astype(np.float32)
    expected = expected_products(matrix, x)
    got = native.matmul(matrix, x)
    assert got.shape == (num_tokens, -(-rows // 16) * 16)
    assert not got[:, rows:].any()
    np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max() * groups)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_every_variant_gives_the_same_bits(native, other, kind):
    matrix = packed(kind, 80, 7)
    x = np.random.default_rng(2).normal(size=(13, 7 * 32)).astype(np.float32)
    np.testing.assert_array_equal(native.matmul(matrix, x), other.matmul(matrix, x))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_row_alone_gives_the_bits_it_gives_among_others(library, kind):
    matrix = packed(kind, 48, 4)
    x = np.random.default_rng(3).normal(size=(41, 128)).astype(np.float32)
    together = library.matmul(matrix, x)
    for row in range(41):
        np.testing.assert_array_equal(library.matmul(matrix, x[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(library.matmul(matrix, x[5:18]), together[5:18])


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_8_bit_products_do_not_saturate(library, weight, sign):
    raw = np.full((16, 34), weight & 255, np.uint8)
    raw[:, :2] = np.array([1], "<f2").view(np.uint8)
    matrix = pack_blocks("Q8_0", raw, Arena())
    x = np.full((5, 32), sign * 127, np.float32)
    assert np.all(library.matmul(matrix, x) == 32 * 127 * sign * weight)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_4_bit_products_do_not_saturate(library, sign):
    raw = np.full((16, 20), 0xFF, np.uint8)
    raw[:, :4] = np.array([1, -2], "<f2").view(np.uint8)
    matrix = pack_blocks("Q4_1", raw, Arena())
    for num_tokens in (1, 5):
        x = np.full((num_tokens, 32), sign * 127, np.float32)
        assert np.all(library.matmul(matrix, x) == 32 * 127 * sign * 13)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_poisons_itself_only(library, poison):
    matrix = packed("Q4_1", 16, 3)
    x = np.random.default_rng(4).normal(size=(9, 96)).astype(np.float32)
    clean = library.matmul(matrix, x)
    x[4, 50] = poison
    got = library.matmul(matrix, x)
    assert np.isnan(got[4]).all()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(clean, 4, 0))


def test_groups_of_zeros_and_of_tiny_values_are_zero(library):
    matrix = packed("Q8_0", 16, 2)
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-38
    assert not library.matmul(matrix, x).any()


# --- packing


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("rows", "groups"), SHAPES)
def test_kept_blocks_keep_their_values(kind, rows, groups):
    raw = random_blocks(kind, rows, groups, seed=rows)
    expected = dequantize(kind, raw.reshape(-1), (rows, groups * 32))
    values = unpack(pack_blocks(kind, raw, Arena(), row_multiple=32))
    assert values.shape == (-(-rows // 32) * 32, groups * 32)
    np.testing.assert_allclose(values[:rows], expected, rtol=1e-6, atol=1e-6)
    assert not values[rows:].any()


def test_floats_get_8_bits_a_weight():
    values = np.random.default_rng(5).normal(size=(21, 70)).astype(np.float32)
    got = unpack(pack_floats(values, Arena()))
    assert got.shape == (32, 96)
    largest = np.abs(values).max()
    np.testing.assert_allclose(got[:21, :70], values, atol=largest / 127 * 0.51)
    assert not got[21:].any() and not got[:, 70:].any()


def test_a_group_of_weights_that_is_not_finite_stays_so():
    scales, integers = quantize(np.array([[1.0] * 31 + [np.inf], [1.0] * 32], np.float32))
    assert np.isnan(scales[0]) and not integers[0].any()
    assert scales[1] > 0 and (integers[1] == 127).all()


def test_an_arena_gives_aligned_memory_that_does_not_overlap():
    arena = Arena()
    arrays = [
        arena.take((3, 5), BLOCK4),
        arena.take((1, 1), np.dtype(np.uint8)),
        arena.take((9,), BLOCK4),
    ]
    for index, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array.view(np.uint8)[...] = index + 1
    for index, array in enumerate(arrays):
        assert (array.view(np.uint8) == index + 1).all()


# --- elementary functions


def test_exp_is_close_and_the_same_everywhere(native, other):
    x = np.concatenate([np.linspace(-90, 90, 4000), [0.0, -0.0, -87.5, 88.5], np.zeros(4)])
    x = x.astype(np.float32)
    got = native.exp(x)
    np.testing.assert_array_equal(got, other.exp(x))
    expected = np.exp(np.clip(x, -87, 88).astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=3e-7)
    assert np.isnan(native.exp(np.full(8, np.nan, np.float32))).all()


def test_halves_round_as_numpy_rounds_and_saturate(library):
    rng = np.random.default_rng(6)
    x = (rng.normal(size=4096) * 10.0 ** rng.integers(-9, 5, 4096)).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = np.clip(x, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(library.halves(x).view(np.uint16), expected.view(np.uint16))
    edges = np.array([65504, 65519, 65520, 1e9, np.inf, -np.inf, 0.0, -0.0, 6e-8, 3e-8], np.float32)
    got = library.halves(edges)
    assert np.abs(got[:6].astype(np.float32)).tolist() == [65504] * 6
    assert np.isnan(library.halves(np.full(9, np.nan, np.float32))).all()


def test_every_half_reads_as_its_value(library):
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(library.floats(halves), halves.astype(np.float32))
