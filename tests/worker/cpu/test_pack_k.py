"""Q4_K in 4-bit panels: the file's own integers, with scales and minima rounded once."""

import numpy as np
import pytest

from shmserve.ggml_blocks import dequantize, nibbles_of_32, scales_and_minima
from shmserve.worker.cpu.pack import COLUMNS, Arena, pack_blocks, pack_floats, unpack


def random_rows(rows: int, columns: int, seed: int = 3) -> np.ndarray:
    """Blocks with scales and minima as in real files, of weights of about 0.1."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // 256, 144), dtype=np.uint8)
    for at, typical in ((0, 4e-4), (2, 3e-3)):
        halves = (typical * rng.uniform(0.3, 1.7, len(blocks))).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize(("rows", "row_multiple"), [(16, 16), (37, 16), (5, 32), (70, 32)])
def test_values_differ_by_the_rounding_of_scale_and_minimum_alone(rows, row_multiple):
    raw = random_rows(rows, 512)
    packed = pack_blocks("Q4_K", raw, Arena(), row_multiple=row_multiple)
    assert packed.bits == 4 and packed.num_groups == 16
    assert packed.num_panels * COLUMNS == -(-rows // row_multiple) * row_multiple
    values, exact = unpack(packed), dequantize("Q4_K", raw.reshape(-1), (rows, 512))
    blocks = raw.reshape(-1, 144)
    scales, minima = scales_and_minima(blocks)
    d, m = (np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2") for at in (0, 2))
    scaled = nibbles_of_32(blocks[:, 16:]) * (d * scales.astype(np.float64))[..., None]
    bound = 2.0**-11 * (scaled + (m * minima.astype(np.float64))[..., None]) + 2.0**-24 * 16
    error = np.abs(values[:rows].astype(np.float64) - exact)
    assert (error <= bound.reshape(rows, 512)).all()
    assert error.max() > 0  # the bound is not kept by not rounding
    assert not values[rows:].any()


def test_that_error_is_smaller_than_what_eight_bits_would_cost():
    raw = random_rows(64, 1024)
    exact = dequantize("Q4_K", raw.reshape(-1), (64, 1024))
    kept = unpack(pack_blocks("Q4_K", raw, Arena())) - exact
    requantised = unpack(pack_floats(exact, Arena())) - exact
    assert np.square(kept).mean() < np.square(requantised).mean() / 25
