"""The kernels under triton's interpreter against reference.py, on odd toy shapes. Run by test_kernels.py, in a process of its own.

Triton decides at its import whether kernels are interpreted, so these are not collected with the others. By hand:
TRITON_INTERPRET=1 python -m pytest tests/worker/cuda/interpreted_kernels.py

Tolerances: the interpreter cuts a float32 off where a GPU rounds it to bfloat16, and so may be one unit in the last place (2**-7)
from the reference. What a cache does not hold is NaN here: a mask that leaks one element shows.
"""

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from shmserve.request import SamplingParams
from shmserve.worker import philox, sampler
from shmserve.worker.cuda import launch
from shmserve.worker.cuda import sampling as sampling_kernels
from shmserve.worker.cuda.ops import REFERENCE, triton_ops
from shmserve.worker.cuda.reference import DecodeScratch, SampleScratch
from shmserve.worker.sampling_state import SamplingState

assert launch.IS_INTERPRETED, "set TRITON_INTERPRET=1"

KERNELS = triton_ops()
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
DIMS = (64, 80, 96, 128)
GROUPS = (1, 3, 4, 8)
MASKS = ((0, 0.0), (33, 0.0), (0, 7.5), (50, 30.0))
"""(window, softcap)"""


def matrix(*axes, stride: int):
    """Every combination; all but each `stride`-th are slow. An odd stride meets each value of axes of 2 and 4."""
    cases = enumerate(itertools.product(*axes))
    return [
        pytest.param(*case, marks=() if index % stride == 0 else pytest.mark.slow)
        for index, case in cases
    ]


@pytest.fixture(params=DTYPES, ids=["f32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20)


def r(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = (2.0**-7, 1e-5) if actual.dtype == torch.bfloat16 else (2e-5, 2e-5)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("width", [70, 1100])
@pytest.mark.parametrize("scale", [1.0, 8.5])
def test_embed_takes_ids_from_the_host_or_from_the_step_before(dtype, width, scale):
    table, ids, source = r(dtype, 9, width), ints(1, 2, 3, 8), ints(-1, 1, -1, 0)
    out = r(dtype, 4, width)
    KERNELS.embed(ids, source, ints(5, 7), table, out, scale)
    assert_close(out, (table[[1, 7, 3, 5]].float() * scale).to(dtype))


@pytest.mark.parametrize("width", [96, 576, 1000])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_adds_rounds_and_scales(dtype, width, unit_offset):
    x, weight, residual = r(dtype, 3, width), r(dtype, width), r(dtype, 3, width)
    expected_sum = (x.float() + residual.float()).to(dtype)
    out, expected = r(dtype, 3, width), r(dtype, 3, width)
    KERNELS.add_rms_norm(x, residual, weight, out, 1e-5, unit_offset)
    assert_close(residual, expected_sum)
    REFERENCE.add_rms_norm(residual, None, weight, expected, 1e-5, unit_offset)
    assert_close(out, expected)


def test_norm_without_a_residual_works_in_place_and_row_by_row(dtype):
    x, weight = r(dtype, 5, 200), r(dtype, 200)
    expected, alone = r(dtype, 5, 200), x[3:4].clone()
    REFERENCE.add_rms_norm(x, None, weight, expected, 1e-6)
    KERNELS.add_rms_norm(x, None, weight, x, 1e-6)
    assert_close(x, expected)
    KERNELS.add_rms_norm(alone, None, weight, alone, 1e-6)
    assert_same_bits(alone[0], x[3])


@pytest.mark.parametrize(
    ("dim", "group", "has_norms", "has_bias", "unit_offset"),
    matrix(DIMS, GROUPS, (False, True), (False, True), (False, True), stride=27),
)
def test_rotary_writes_queries_and_the_cache(dtype, dim, group, has_norms, has_bias, unit_offset):
    num_kv, count, block = 2, 3, 16
    num_q = num_kv * group
    width = (num_q + 2 * num_kv) * dim
    bias = r(dtype, width) if has_bias else None
    norms = (r(dtype, dim), r(dtype, dim)) if has_norms else (None, None)
    angles = torch.rand(40, dim // 2) * 6
    places = (ints(0, 9, 39), ints(20, 33, 0))
    qkv, caches = r(dtype, count, width), (r(dtype, 4, block, num_kv, dim),) * 2
    results = []
    for ops in (REFERENCE, KERNELS):
        written = (r(dtype, count, num_q, dim), *(cache.clone() for cache in caches))
        turn = (angles.cos(), angles.sin())
        ops.rotary_write(qkv, bias, *norms, *turn, *places, *written, 1e-5, unit_offset)
        results.append(written)
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected)
    untouched = torch.ones(4 * block, dtype=torch.bool)
    untouched[places[1].long()] = False
    for cache, written in zip(caches, results[1][1:], strict=True):
        assert_same_bits(written.flatten(0, 1)[untouched], cache.flatten(0, 1)[untouched])


def paged(dtype, lengths, num_kv, dim, block=16, width=None):
    """Caches that hold `lengths` tokens in shuffled blocks and NaN everywhere else, and their table."""
    counts = [-(-length // block) for length in lengths]
    width = width or max(counts)
    places = iter((torch.randperm(sum(counts)) + 1).tolist())
    caches = [torch.full((sum(counts) + 1, block, num_kv, dim), torch.nan).to(dtype) for _ in "kv"]
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(counts[row]):
            table[row, index] = place = next(places)
            held = min(block, length - index * block)
            for cache in caches:
                cache[place, :held] = r(dtype, held, num_kv, dim)
    return (*caches, table)


def scratch_of(rows: int, num_q: int, dim: int, splits: int, tokens: int) -> DecodeScratch:
    """Of a step before, as it were: what is not overwritten must not be read."""
    filled = torch.full((rows, num_q, splits, dim), torch.nan)
    return DecodeScratch(filled, torch.full((rows, num_q, splits), torch.nan), tokens)


@pytest.mark.parametrize(("dim", "group", "mask"), matrix(DIMS, GROUPS, MASKS, stride=13))
def test_decode_joins_splits_of_all_lengths(dtype, dim, group, mask):
    num_kv = 1 if group == 8 else 2
    num_q, lengths = num_kv * group, (37, 0, 1, 200, 64)
    k, v, table = paged(dtype, lengths, num_kv, dim, width=16)
    q, kv_lens, scratch = r(dtype, 5, num_q, dim), ints(*lengths), scratch_of(8, num_q, dim, 4, 64)
    out, expected = r(dtype, 5, num_q, dim), r(dtype, 5, num_q, dim)
    KERNELS.decode_attention(q, k, v, table, kv_lens, out, scratch, dim**-0.5, *mask)
    REFERENCE.decode_attention(q, k, v, table, kv_lens, expected, scratch, dim**-0.5, *mask)
    assert_close(out, expected)
    assert not out[1].any(), "a padding row gives zeros"


def test_decode_of_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    k, v, table = paged(dtype, (37, 150, 90), 2, 80, width=16)
    q, out, alone = r(dtype, 3, 6, 80), r(dtype, 3, 6, 80), r(dtype, 1, 6, 80)
    for rows, target in ((slice(0, 3), out), (slice(1, 2), alone)):
        lengths, scratch = ints(37, 150, 90)[rows], scratch_of(len(target), 6, 80, 4, 64)
        KERNELS.decode_attention(q[rows], k, v, table[rows], lengths, target, scratch, 0.1, 70)
    assert_same_bits(alone[0], out[1])


@pytest.mark.parametrize(("dim", "group", "mask"), matrix(DIMS, GROUPS, MASKS, stride=13))
def test_prefill_attends_ragged_chunks_over_what_the_cache_holds(dtype, dim, group, mask):
    """Whole prompt; nothing; last tokens of a long one; one token; a padding sequence, which has queries and no keys."""
    num_kv = 1 if group == 8 else 2
    num_q, lengths, counts = num_kv * group, (21, 0, 90, 65, 0), (21, 0, 23, 1, 2)
    k, v, table = paged(dtype, lengths, num_kv, dim)
    bounds = ints(*itertools.accumulate(counts, initial=0))
    q, out = r(dtype, sum(counts), num_q, dim), r(dtype, sum(counts), num_q, dim)
    expected = out.clone()
    for ops, target in ((KERNELS, out), (REFERENCE, expected)):
        where = (bounds, ints(*lengths))
        ops.prefill_attention(q, k, v, table, *where, target, 23, dim**-0.5, *mask)
    assert_close(out, expected)
    part = r(dtype, sum(counts), num_q, dim)
    left_out = part[:44].clone()
    KERNELS.prefill_attention(
        q, k, v, table, bounds, ints(*lengths), part, 23, dim**-0.5, *mask, first=3
    )
    assert_same_bits(part[:44], left_out)
    assert_same_bits(part[44:], out[44:])


def test_prefill_of_a_row_has_the_same_bits_in_chunks_and_beside_others(dtype):
    """Chunks of whole tiles, 21 queries of 3 heads each: numpy's products, unlike a GPU's, depend on a row's place in a tile."""
    k, v, table = paged(dtype, (70, 33), 2, 64)
    q = r(dtype, 103, 6, 64)
    whole, parts = r(dtype, 103, 6, 64), r(dtype, 70, 6, 64)
    KERNELS.prefill_attention(q, k, v, table, ints(0, 70, 103), ints(70, 33), whole, 70, 0.1)
    for first, last in ((0, 21), (21, 63), (63, 70)):
        chunk = parts[first:last]
        where = (table[:1], ints(0, last - first), ints(last))
        KERNELS.prefill_attention(q[first:last], k, v, *where, chunk, last - first, 0.1)
    assert_same_bits(parts, whole[:70])


@pytest.mark.parametrize("width", [35, 1500])
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_mul_is_silu_or_gelu_of_the_gate_times_up(dtype, width, gelu):
    gate_up, out, expected = r(dtype, 3, 2 * width), r(dtype, 3, width), r(dtype, 3, width)
    KERNELS.gated_mul(gate_up, out, gelu)
    REFERENCE.gated_mul(gate_up, expected, gelu)
    assert_close(out, expected)


@pytest.mark.parametrize("depth", [128, 200])
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemv_is_a_product_whose_rows_do_not_know_each_other(dtype, depth, rows, has_bias):
    x, weight, bias = r(dtype, rows, depth), r(dtype, 45, depth), r(dtype, 45)
    out, expected, alone = (r(dtype, n, 45) for n in (rows, rows, 1))
    x[0] *= 1000  # it must not be felt in other rows
    KERNELS.gemv(x, weight, bias if has_bias else None, out)
    REFERENCE.gemv(x, weight, bias if has_bias else None, expected)
    rtol, atol = (2.0**-7, 1e-3) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(out[1:], expected[1:], rtol=rtol, atol=atol)
    torch.testing.assert_close(out[:1], expected[:1], rtol=rtol, atol=1000 * atol)
    KERNELS.gemv(x[-1:], weight, bias if has_bias else None, alone)
    assert_same_bits(alone[0], out[-1])


def test_gemv_gives_float32_where_it_is_asked_to(dtype):
    x, weight, out = r(dtype, 2, 96), r(dtype, 33, 96), torch.zeros(2, 33)
    KERNELS.gemv(x, weight, None, out)
    torch.testing.assert_close(out, x.float() @ weight.float().t(), rtol=1e-5, atol=1e-4)


def drawn(
    logits,
    temperatures,
    min_p=0.0,
    seeds=None,
    positions=None,
    top_k=0,
    top_p=1.0,
    scratch=None,
):
    """(ids, logprobs, failed) as lists, from the kernels."""
    rows, vocab = logits.shape
    seeds = torch.arange(rows) if seeds is None else seeds
    positions = torch.full((rows,), 7, dtype=torch.int32) if positions is None else positions
    ids, logprobs, failed = ints(*[-1] * rows), torch.full((rows,), -1.0), ints(*[-1] * rows)
    KERNELS.sample(
        logits, torch.full((rows,), temperatures), torch.full((rows,), min_p),
        ints(*[top_k] * rows), torch.full((rows,), top_p), seeds, positions, ids, logprobs, failed,
        scratch or SampleScratch.allocate(rows, vocab, CPU),
    )  # fmt: skip
    return ids.tolist(), logprobs, failed.tolist()


SEEDS = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123_456_789_012, -77, 40])
POSITIONS = ints(0, 1, 2, 131_071, 5, 6, 7, 2**30)


def limited(num_rows, min_p=0.0, top_k=0, top_p=1.0):
    """Parameters of rows that draw at 1.1: as columns of a state, and as `drawn` wants them."""
    state, some = SamplingState(num_rows), slice(0, num_rows)
    for row, seed in enumerate(SEEDS.numpy().view(np.uint64)[some].tolist()):
        limits = {"temperature": 1.1, "min_p": min_p, "top_k": top_k, "top_p": top_p}
        params = SamplingParams(max_tokens=9, seed=seed, **limits)
        state.set(row, params, (), int(POSITIONS[row]))
    return state, (1.1, min_p, SEEDS[some], POSITIONS[some], top_k, top_p)


@pytest.mark.parametrize("vocab", [70, 1100, 9001])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1e-4])
def test_sample_draws_what_the_sampler_of_the_cpu_draws(vocab, min_p):
    """All ids by buckets; few of them each by its own number; and, with the least min-p, so many that buckets are drawn first."""
    logits = r(torch.float32, 4, vocab) * 2
    state, options = limited(4, min_p=min_p)
    ids, logprobs, failed = drawn(logits, *options)
    rows = np.arange(4, dtype=np.int32)
    assert ids == sampler.sample(logits.clone(), rows, state).token_ids.tolist()
    assert ids != drawn(logits, 0.0)[0], "draws, not maxima"
    expected = torch.log_softmax(logits, -1)[torch.arange(4), ids]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert not any(failed)


@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.002},
        {"top_k": 700, "top_p": 0.999},
    ],
    ids=["top-k", "top-p", "all", "more than a head"],
)
def test_sample_with_limits_draws_what_the_sampler_of_the_cpu_draws(limits):
    logits = r(torch.float32, 3, 1100) * 1.5
    state, options = limited(3, **limits)
    ids, _, failed = drawn(logits, *options)
    rows = np.arange(3, dtype=np.int32)
    assert ids == sampler.sample(logits.clone(), rows, state).token_ids.tolist()
    assert not any(failed)


@pytest.mark.parametrize(
    "limits",
    [{}, {"min_p": 0.02}, {"min_p": 1e-4}, {"top_k": 300, "top_p": 0.95}, {"top_p": 0.5}],
    ids=["none", "min-p", "wide min-p", "top-k and top-p", "top-p"],
)
def test_sample_draws_what_its_reference_draws(dtype, limits):
    logits, ids = r(dtype, 3, 1100) * 2, ints(-1, -1, -1)
    _, (temperature, min_p, seeds, positions, top_k, top_p) = limited(3, **limits)
    REFERENCE.sample(
        logits, torch.full((3,), temperature), torch.full((3,), min_p), ints(*[top_k] * 3),
        torch.full((3,), top_p), seeds, positions, ids, torch.zeros(3), ints(0, 0, 0),
        SampleScratch.allocate(3, 1100, CPU),
    )  # fmt: skip
    assert drawn(logits, temperature, min_p, seeds, positions, top_k, top_p)[0] == ids.tolist()


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.59}], ids=["top-k", "top-p"])
@pytest.mark.parametrize("logit", [2.0, 0.0, -3.5])
def test_sample_keeps_of_equal_logits_those_of_the_lowest_ids(dtype, logit, limits):
    """Five are alike, on both sides of a chunk's end, and all others weigh next to nothing: the third is the last that is needed."""
    logits = torch.full((1, 4200), logit - 60.0).to(dtype)
    logits[:, [7, 90, 4095, 4096, 4199]] = logit
    if logit == 0:
        logits[0, 90] = -0.0
    scratch = SampleScratch.allocate(1, 4200, CPU)
    assert drawn(logits, 1.0, **limits, scratch=scratch)[0][0] in (7, 90, 4095)
    assert (int(scratch.last_id[0]), int(scratch.num_kept.sum())) == (4095, 3)


def test_sample_with_the_least_top_p_takes_the_likeliest(dtype):
    logits = r(dtype, 2, 700)
    assert drawn(logits, 1.5, top_p=1e-6)[0] == drawn(logits, 0.0)[0]


def test_sample_with_min_p_draws_only_likely_ids():
    logits = torch.zeros(24, 500)
    logits[:, 17], logits[:, 444] = 5.0, 4.5
    assert set(drawn(logits, 2.0, 0.2)[0]) == {17, 444}
    assert len(set(drawn(logits, 2.0, 0.0)[0]) - {17, 444}) > 5


@pytest.mark.parametrize("ties", [(3, 4), (4095, 4096), (0, 9000), (5000, 8999)])
def test_sample_at_temperature_0_takes_the_lowest_of_equal_ids(dtype, ties):
    logits = r(dtype, 2, 9001).clamp(max=3.0)
    logits[0, list(ties)] = 9.0
    assert drawn(logits, 0.0)[0] == [ties[0], int(logits[1].float().argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sample_flags_rows_without_a_distribution_and_only_those(dtype, temperature):
    logits = r(dtype, 5, 5003)
    logits[0, 4800], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 100:] = -torch.inf
    healthy = drawn(logits[3:], temperature, 0.0, SEEDS[3:5])
    ids, logprobs, failed = drawn(logits, temperature, 0.0, SEEDS[:5])
    assert failed == [1, 1, 1, 0, 0] and ids[:3] == [0, 0, 0] and not logprobs[:3].any()
    assert ids[3:] == healthy[0], "a row alone draws what it draws in a batch"
    assert_same_bits(logprobs[3:], healthy[1])


def test_sample_never_draws_a_banned_id():
    logits = torch.zeros(40, 4100)
    logits[:, 5:] = -torch.inf
    ids = drawn(logits, 3.0)[0]
    assert set(ids) == {0, 1, 2, 3, 4}


@triton.jit
def _gumbels(out, seed, position, first, COUNT: tl.constexpr):
    token = tl.arange(0, COUNT)
    drawn = sampling_kernels.gumbel(seed, position, (first + token).to(tl.uint32), 0)
    tl.store(out + token, drawn)


@triton.jit
def _words(high_out, low_out, seeds, positions, first, DOMAIN: tl.constexpr, COUNT: tl.constexpr):
    row, number = tl.program_id(0), tl.arange(0, COUNT)
    seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.uint32)
    counted = (first + number).to(tl.uint32)
    high, low = sampling_kernels.philox_words(seed, position, counted, DOMAIN)
    tl.store(high_out + row * COUNT + number, high.to(tl.int64))
    tl.store(low_out + row * COUNT + number, low.to(tl.int64))


@pytest.mark.parametrize("domain", [philox.DOMAIN_TOKEN, philox.DOMAIN_BUCKET])
@pytest.mark.parametrize("first", [0, 128_000])
def test_sample_words_are_those_of_the_cpus_philox_bit_for_bit(domain, first):
    found = torch.zeros((2, 8, 256), dtype=torch.int64)
    _words[(8,)](found[0], found[1], SEEDS, POSITIONS, first, DOMAIN=domain, COUNT=256)
    seeds, positions = SEEDS.numpy().view(np.uint64)[:, None], POSITIONS.numpy()[:, None]
    numbers = np.arange(first, first + 256, dtype=np.uint64)[None, :]
    parts = (numbers, positions.astype(np.uint64), np.uint64(domain), np.uint64(0))
    counter = np.broadcast_arrays(*parts)
    key = (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32))
    high, low, _, _ = philox.philox4x32(tuple(counter), key)
    assert found[0].tolist() == high.tolist() and found[1].tolist() == low.tolist()


def test_sample_numbers_are_exact_in_the_tail_that_winners_come_from():
    count, out = 1 << 20, torch.zeros(1 << 20)
    _gumbels[(1,)](out, 2**40 + 3, 5, 0, COUNT=count)
    token = np.arange(count, dtype=np.uint64)
    expected = philox.gumbels(np.uint64(2**40 + 3), np.uint64(5), token)
    assert expected.max() > 12
    np.testing.assert_allclose(out.numpy(), expected, rtol=3e-6, atol=3e-6)
