"""The sampler: its random stream, its order of steps, its distributions, its independence of the batch."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.worker import sampler
from shmserve.worker.philox import gumbels, philox4x32, uniforms
from shmserve.worker.sampler import Sample, sample
from shmserve.worker.sampling_state import SamplingState


def state_of(*params: SamplingParams, position: int = 0, banned: tuple[int, ...] = ()):
    state = SamplingState(len(params))
    for row, each in enumerate(params):
        state.set(row, each, banned, position)
    return state


def params(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=16, **kwargs)


def run(logits, state: SamplingState, rows=None) -> Sample:
    values = torch.tensor(np.atleast_2d(np.asarray(logits, np.float32)))
    rows = (
        np.arange(values.shape[0], dtype=np.int32) if rows is None else np.asarray(rows, np.int32)
    )
    return sample(values, rows, state)


def kept_by_definition(row, temperature, top_k, top_p, min_p) -> list[int]:
    """Slow and plain: the ids that min-p, then top-k, then top-p keep; ties go to the lower id."""
    x = np.asarray(row, np.float64) / np.float64(np.float32(temperature))
    weights = np.exp(x - x.max())
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = [token for token in order if weights[token] >= np.float32(min_p)]
    if top_k > 0:
        order = order[:top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and top_p < 1 and mass >= np.float32(top_p) * total:
            break
        kept.append(token)
        mass += weights[token]
    return kept


def draws_of(row, num_draws: int, *, by_position: bool = False, **kwargs) -> np.ndarray:
    if by_position:  # one request, many positions
        state = SamplingState(num_draws)
        for index in range(num_draws):
            state.set(index, params(seed=2**63 + 17, **kwargs), (), index)
    else:  # many requests, one position
        state = state_of(*(params(seed=1000 + index, **kwargs) for index in range(num_draws)))
    return run(np.tile(np.asarray(row, np.float32), (num_draws, 1)), state).token_ids


def assert_distributed(draws: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's statistic is within 5 standard deviations; rare outcomes are counted as one."""
    observed = np.bincount(draws, minlength=len(probabilities)).astype(float)
    expected = probabilities * len(draws)
    assert observed[probabilities == 0].sum() == 0
    is_common = expected >= 8
    cells = [(observed[is_common], expected[is_common])]
    if (~is_common).any() and expected[~is_common].sum() >= 8:
        cells.append((observed[~is_common].sum()[None], expected[~is_common].sum()[None]))
    statistic = sum(((o - e) ** 2 / e).sum() for o, e in cells)
    freedom = sum(len(o) for o, _ in cells) - 1
    assert freedom > 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom), (statistic, freedom)


def expected_probabilities(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    kept = kept_by_definition(row, temperature, top_k, top_p, min_p)
    x = np.asarray(row, np.float64) / temperature
    weights = np.zeros(len(row))
    weights[kept] = np.exp(x[kept] - x.max())
    return weights / weights.sum()


# --- the random stream


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox4x32(
        tuple(np.array([word], np.uint64) for word in counter),
        tuple(np.array([word], np.uint64) for word in key),
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_uniforms_stay_inside_the_open_interval_and_gumbels_are_finite():
    tokens = np.arange(200_000, dtype=np.uint64)
    values = uniforms(np.uint64(2**64 - 1), np.uint64(2**31 - 1), tokens)
    assert values.min() > 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.003
    assert np.isfinite(gumbels(np.uint64(0), np.uint64(0), tokens)).all()


def test_all_64_bits_of_the_seed_count():
    token = np.arange(8, dtype=np.uint64)
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
    streams = {uniforms(np.uint64(seed), np.uint64(0), token).tobytes() for seed in seeds}
    assert len(streams) == len(seeds)


# --- greedy


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1, "temperature": 1.5}]
)
def test_greedy_takes_the_lowest_id_among_equals(greedy):
    row = np.zeros(5000, np.float32)
    row[[17, 1200, 4999]] = 3.5
    beside = params(temperature=1.0, seed=1)
    assert run(row, state_of(params(**greedy))).token_ids.tolist() == [17]
    mixed = run(np.stack([row, row]), state_of(beside, params(**greedy)))
    assert mixed.token_ids[1] == 17


def test_top_p_zero_is_greedy():
    rng = np.random.default_rng(4)
    for row in (rng.normal(size=3000), np.zeros(3000), rng.normal(size=9)):
        draws = draws_of(row, 20, top_p=0.0)
        assert set(draws.tolist()) == {int(np.argmax(np.float32(row)))}


# --- logprobs


def test_logprobs_are_raw_whatever_temperature_bias_and_truncation_do():
    rng = np.random.default_rng(0)
    row = rng.normal(size=700).astype(np.float32) * 3
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    biased = params(
        temperature=0.3, top_k=5, seed=9, num_logprobs=4, logit_bias=((123, 50.0), (5, -100.0))
    )
    out = run(np.stack([row, row]), state_of(biased, params(temperature=0.0)))
    assert out.token_ids[0] == 123
    assert out.logprobs is not None and out.top is not None
    assert out.logprobs[0] == pytest.approx(expected[123], abs=1e-5)
    assert np.isnan(out.logprobs[1])
    assert list(out.top) == [0]
    ids, values = out.top[0]
    assert ids.tolist() == np.argsort(-row)[:4].tolist()
    np.testing.assert_allclose(values, expected[ids], atol=1e-5)
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)


def test_zero_top_logprobs_gives_only_the_chosen_tokens():
    out = run(np.arange(10.0), state_of(params(temperature=0.0, num_logprobs=0)))
    assert out.logprobs is not None and out.logprobs[0] == pytest.approx(-0.45862, abs=1e-4)
    assert out.top is None


def test_top_logprobs_are_bounded_by_the_vocabulary_and_break_ties_by_id():
    out = run([1.0, 2.0, 2.0, 2.0, 0.0], state_of(params(temperature=0.0, num_logprobs=2)))
    assert out.top is not None and out.top[0][0].tolist() == [1, 2]
    out = run([1.0, 2.0, 2.0, 2.0, 0.0], state_of(params(temperature=0.0, num_logprobs=20)))
    assert out.top is not None and out.top[0][0].tolist() == [1, 2, 3, 0, 4]


def test_nobody_asked_means_no_logprobs():
    out = run(np.zeros((3, 20)), state_of(params(seed=1), params(seed=2), params(temperature=0.0)))
    assert out.logprobs is None and out.top is None and out.failed == ()


# --- edits


def test_min_tokens_masks_until_the_position_is_reached():
    row = np.zeros(600, np.float32)
    row[2] = 30.0
    row[7] = 20.0
    early = params(temperature=0.0, min_tokens=3)
    for position, expected in ((0, 7), (2, 7), (3, 2), (4, 2)):
        state = state_of(early, banned=(2,))
        state.position[0] = position
        assert run(row, state).token_ids.tolist() == [expected]


def test_bias_and_min_tokens_also_bind_sampled_rows():
    row = np.zeros(600, np.float32)
    each = params(temperature=1.0, seed=5, min_tokens=1, logit_bias=((2, 100.0), (9, 99.0)))
    assert run(row, state_of(each, banned=(2,))).token_ids.tolist() == [9]


def test_a_row_with_nothing_left_fails_alone():
    banned_all = params(temperature=0.8, seed=1, min_tokens=5)
    state = state_of(banned_all, banned=tuple(range(10)))
    out = run(np.zeros((1, 10)), state)
    assert out.failed == (0,)


def test_a_grammar_knows_more_ids_than_the_runner_where_the_vocabulary_is_padded():
    """Its mask has a word for ids that only pad the model's matrices, which nobody samples and nobody may allow."""
    state = SamplingState(1, 60)
    state.set(0, params(temperature=0.0, allowed_token_ids=(5, 40, 41)), (), 0)
    coming: Future[dict[int, np.ndarray]] = Future()
    coming.set_result({0: np.array([0, 1 << 9 | 1 << 20, -1, -1], np.int32)})
    state.expect_masks(coming)
    row = np.arange(60, dtype=np.float32)[None]
    assert sample(torch.from_numpy(row), np.zeros(1, np.int32), state).token_ids.tolist() == [41]


# --- failures


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_and_the_others_go_on(poison, temperature):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, 900)).astype(np.float32)
    each = [params(temperature=temperature, seed=index, num_logprobs=2) for index in range(4)]
    clean = run(logits, state_of(*each))
    broken = logits.copy()
    broken[2, 333] = poison
    out = run(broken, state_of(*each))
    assert out.failed == (2,)
    others = [0, 1, 3]
    assert out.token_ids[others].tolist() == clean.token_ids[others].tolist()
    assert out.logprobs is not None and np.isnan(out.logprobs[2])
    assert out.top is not None and sorted(out.top) == others


def test_huge_but_finite_logits_do_not_fail():
    row = np.full(50, 3e38, np.float32)
    row[4] = 3.2e38
    assert run(row, state_of(params(temperature=0.0))) == ([4], None, None, ())


# --- distributions

LIMITS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 1.4, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("head", [3, 256])
@pytest.mark.parametrize("limits", LIMITS)
def test_draws_follow_the_distribution(monkeypatch, head, limits):
    """With a head of 3 every limited row goes the long way, with 256 the short one."""
    monkeypatch.setattr(sampler, "HEAD", head)
    monkeypatch.setattr(sampler, "BUCKET", 16)
    row = np.random.default_rng(7).normal(size=75).astype(np.float32) * 1.5
    assert_distributed(draws_of(row, 4000, **limits), expected_probabilities(row, **limits))


@pytest.mark.parametrize(
    "limits", [{}, {"top_p": 0.9}, {"top_k": 700}, {"min_p": 0.2}, {"top_k": 700, "top_p": 0.5}]
)
def test_flat_rows_that_keep_more_than_the_head_follow_the_distribution(limits):
    row = np.random.default_rng(8).normal(size=1500).astype(np.float32) * 0.3
    assert len(kept_by_definition(row, 1.0, **{"top_k": 0, "top_p": 1, "min_p": 0, **limits})) > 256
    draws = draws_of(row, 3000, **limits)
    expected = expected_probabilities(row, **limits)
    assert (expected[draws] > 0).all()
    # groups of 50 ids, since 3,000 draws are thin over 1,500 tokens
    assert_distributed(draws // 50, expected.reshape(-1, 50).sum(1))


@pytest.mark.parametrize("limits", [{}, {"top_k": 12}])
def test_positions_of_one_seed_are_independent(limits):
    row = np.random.default_rng(9).normal(size=40).astype(np.float32)
    draws = draws_of(row, 4000, by_position=True, **limits)
    expected = expected_probabilities(row, **limits)
    assert_distributed(draws, expected)
    repeats = (draws[1:] == draws[:-1]).mean()
    assert repeats == pytest.approx((expected**2).sum(), abs=0.02)


# --- properties

limit = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 256, 257, 400, 10_000]),
        "top_p": st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "num_logprobs": st.sampled_from([-1, 0, 3]),
    }
)


@st.composite
def batches(draw):
    """Logits with many ties in them, for 1 to 6 rows with parameters of their own."""
    each = draw(st.lists(limit, min_size=1, max_size=6))
    vocab_size = draw(st.sampled_from([5, 256, 257, 900]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    logits = np.round(rng.normal(size=(len(each), vocab_size)) * scale, 1).astype(np.float32)
    return logits, [params(**one) for one in each], draw(st.integers(0, 2**31 - 1))


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(batches())
def test_a_row_gets_the_same_alone_in_a_batch_and_in_any_order(case):
    logits, each, position = case
    together = run(logits, state_of(*each, position=position))
    for row, one in enumerate(each):
        alone = run(logits[row], state_of(one, position=position))
        assert alone.token_ids[0] == together.token_ids[row]
    order = np.arange(len(each))[::-1]
    turned = run(logits[order], state_of(*each, position=position), rows=order)
    assert turned.token_ids.tolist() == together.token_ids[order].tolist()


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(batches())
def test_a_drawn_token_is_always_one_that_is_kept(case):
    logits, each, position = case
    out = run(logits, state_of(*each, position=position))
    for row, one in enumerate(each):
        limits = (one.top_k, min(1.0, one.top_p * (1 + 1e-6)), one.min_p * (1 - 1e-6))
        kept = kept_by_definition(logits[row], one.temperature or 1.0, *limits)
        token = int(out.token_ids[row])
        assert token in (kept[:1] if one.temperature == 0 else kept)


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(batches())
def test_the_kept_set_of_a_row_is_the_one_of_the_definition(case):
    logits, each, _ = case
    for row, one in zip(logits, each, strict=True):
        temperature = np.float32(one.temperature or 1.0)
        kept = sampler._kept_of_row(row, temperature, one.top_k, np.float32(one.top_p), one.min_p)
        expected = kept_by_definition(row, temperature, one.top_k, one.top_p, one.min_p)
        # sums in another order may move the edge of the nucleus by one token
        assert abs(len(kept) - len(expected)) <= 1
        assert kept.tolist()[: len(expected)] == expected[: len(kept)]
