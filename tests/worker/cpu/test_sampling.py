"""The C sampler against a slow, plain definition in float64, against torch's, and against itself in other company."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.worker import sampler
from shmserve.worker.cpu.sampling import RowSampler
from shmserve.worker.philox import DOMAIN_BUCKET, gumbels
from shmserve.worker.sampling_state import SamplingState

HEAD = BUCKET = 256


class Row:
    """Parameters and tokens of one request, and what the definition says of its draw."""

    def __init__(self, prompt=(), output=(), banned=(), mask=None, **params):
        self.params = SamplingParams(max_tokens=99, **params)
        self.tokens = np.array([*prompt, *output, 0], np.int32)
        self.prompt, self.output, self.banned, self.mask = prompt, output, banned, mask

    def edited(self, logits) -> np.ndarray:
        """The logits that are drawn from, in plain words and float64."""
        p = self.params
        x = np.asarray(logits, np.float64).copy()
        for token, bias in p.logit_bias:
            x[token] += bias
        for token in {*self.prompt, *self.output}:
            r = float(np.float32(p.repetition_penalty))
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
            count = list(self.output).count(token)
            x[token] -= float(np.float32(p.frequency_penalty)) * count
            x[token] -= float(np.float32(p.presence_penalty)) * (count > 0)
        if len(self.output) < p.min_tokens:
            x[list(self.banned)] = -np.inf
        if self.mask is not None:
            x[~self.mask] = -np.inf
        if p.allowed_token_ids:
            x[np.setdiff1d(np.arange(len(x)), p.allowed_token_ids)] = -np.inf
        for *before, last in p.bad_words:
            if not before or list(self.output)[-len(before) :] == before:
                x[last] = -np.inf
        return x

    def kept(self, x, slack=0.0) -> list[int]:
        """Ids in order after a full sort. `slack` widens (or narrows) the edges of min-p and top-p, where rounding decides."""
        p = self.params
        weights = np.exp((x - x.max()) / float(np.float32(p.temperature)))
        order = np.lexsort((np.arange(len(x)), -x))
        order = [t for t in order.tolist() if x[t] > -np.inf]
        if p.min_p > 0:
            order = [t for t in order if weights[t] >= float(np.float32(p.min_p)) * (1 - slack)]
        if p.top_k > 0:
            order = order[: p.top_k]
        if p.top_p < 1 and order:
            before = np.concatenate([[0.0], np.cumsum(weights[order])])
            is_in = before[:-1] < float(np.float32(p.top_p)) * (1 + slack) * before[-1]
            order = order[: max(1, int(is_in.sum()))]
        return order

    def keys(self, x, kept, position) -> dict[int, float]:
        """The Gumbel key of each token that can win; the largest wins. Empty tokens of other buckets cannot."""
        p = self.params
        log_weights = (x - x.max()) / float(np.float32(p.temperature))
        # A row without top-k, top-p and min-p is not counted: however few tokens its edits leave, it draws by buckets.
        is_open = self.params.top_k == 0 and self.params.top_p >= 1 and self.params.min_p <= 0
        if len(kept) > HEAD or is_open:
            weights = np.zeros(-(-len(x) // BUCKET) * BUCKET)
            weights[kept] = np.exp(log_weights[kept])
            with np.errstate(divide="ignore"):
                masses = np.log(weights.reshape(-1, BUCKET).sum(1))
            ids = np.arange(len(masses), dtype=np.uint64)
            bucket = int((masses + self._noise(ids, position, DOMAIN_BUCKET)).argmax())
            kept = [t for t in kept if t // BUCKET == bucket]
        noise = self._noise(np.array(kept, np.uint64), position)
        return dict(zip(kept, (log_weights[kept] + noise).tolist(), strict=True))

    def _noise(self, ids, position, domain=0):
        where = np.uint64(self.params.seed), np.uint64(position)
        return gumbels(*where, ids, domain)

    def allows(self, token: int, logits) -> bool:
        """Whether `token` is the definition's, or one that rounding in the last bits may have put in its place."""
        x = self.edited(logits)
        if not np.isfinite(x.max()):
            return token == -1
        if self.params.temperature < 1e-5 or self.params.top_k == 1:
            return token >= 0 and x[token] >= x.max() - 1e-5 * max(1, abs(x.max()))
        for slack in (0.0, 1e-5, -1e-5):
            keys = self.keys(x, self.kept(x, slack), len(self.output))
            if token in keys and keys[token] >= max(keys.values()) - 1e-4:
                return True
        return False


def state_of(rows, vocab_size) -> SamplingState:
    state = SamplingState(len(rows), vocab_size)
    masks = {}
    for index, row in enumerate(rows):
        num_prompt = len(row.prompt)
        state.set(index, row.params, row.banned, len(row.output), row.tokens, num_prompt)
        if row.mask is not None:
            bits = np.packbits(np.resize(row.mask, -(-len(row.mask) // 32) * 32), bitorder="little")
            masks[index] = bits.view(np.int32)
    state.masks.update(masks)
    return state


def by_c(library, logits, rows):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    c = RowSampler(library, logits.shape[1])
    state = state_of(rows, logits.shape[1])
    return c.sample(logits, np.arange(len(rows), dtype=np.int32), state)


def by_torch(logits, rows):
    logits = torch.tensor(np.atleast_2d(np.asarray(logits, np.float32)))
    state = state_of(rows, logits.shape[1])
    return sampler.sample(logits, np.arange(len(rows), dtype=np.int32), state)


@st.composite
def cases(draw):
    """One to five rows with ties, edges and edits, over a vocabulary that may end anywhere."""
    vocab = draw(st.sampled_from([1, 7, 8, 15, 16, 17, 255, 256, 257, 900, 5003]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e4]))
    ids = st.integers(0, vocab - 1)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        bias = draw(st.dictionaries(ids, st.sampled_from([-100.0, 1.5, 100.0]), max_size=4))
        is_penalised = draw(st.booleans())
        output = draw(st.lists(ids, max_size=9))
        # Words that end behind what was said, and words that do not.
        words = draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3))
        words += [[*output[-n:], draw(ids)] for n in draw(st.lists(st.integers(1, 9), max_size=2))]
        rows.append(
            Row(
                prompt=tuple(draw(st.lists(ids, max_size=9))),
                output=tuple(output),
                allowed_token_ids=tuple(draw(st.just([]) | st.lists(ids, max_size=300))),
                bad_words=tuple(map(tuple, words)),
                banned=tuple(draw(st.sets(ids, max_size=3))),
                mask=rng.random(vocab) < 0.4 if draw(st.integers(0, 3)) == 0 else None,
                temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0, 1e6])),
                top_k=draw(st.sampled_from([0, 0, 1, 5, 256, 257, 9999])),
                top_p=draw(st.sampled_from([1.0, 0.0, 0.5, 0.93, 0.9999])),
                min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 1.0])),
                seed=draw(st.integers(0, 2**64 - 1)),
                min_tokens=draw(st.sampled_from([0, 5])),
                num_logprobs=draw(st.sampled_from([-1, 0, 1, 20, 40])),
                logit_bias=tuple(bias.items()),
                frequency_penalty=draw(st.sampled_from([0.0, 0.7, -2.0])) * is_penalised,
                presence_penalty=draw(st.sampled_from([0.0, 1.3])) * is_penalised,
                repetition_penalty=draw(st.sampled_from([1.0, 1.4, 0.5])) if is_penalised else 1.0,
            )
        )
    logits = np.round(rng.normal(size=(len(rows), vocab)) * scale, draw(st.sampled_from([0, 1, 6])))
    return logits.astype(np.float32), rows


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 2)
@given(cases())
def test_tokens_are_the_ones_of_the_definition(native, case):
    logits, rows = case
    tokens, _, _ = by_c(native, logits, rows)
    reference = by_torch(logits, rows)
    for index, row in enumerate(rows):
        assert row.allows(int(tokens[index]), logits[index]), ("C", index, row.params)
        theirs = -1 if index in reference.failed else int(reference.token_ids[index])
        assert row.allows(theirs, logits[index]), ("torch", index, row.params)


def test_a_row_without_limits_draws_by_buckets_however_few_tokens_its_edits_leave(native):
    logits = np.zeros((1, 900), np.float32)
    for seed in range(20):
        row = Row(seed=seed, temperature=1.0, allowed_token_ids=(91, 790))
        assert row.allows(int(by_c(native, logits, [row])[0][0]), logits[0]), seed
        assert row.allows(int(by_torch(logits, [row]).token_ids[0]), logits[0]), seed


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(cases())
def test_a_row_alone_in_a_batch_and_by_other_code_gets_the_same_bits(native, portable, case):
    logits, rows = case
    together = by_c(native, logits, rows)
    elsewhere = by_c(portable, logits, rows)
    for index, row in enumerate(rows):
        for other, at in ((by_c(native, logits[index], [row]), 0), (elsewhere, index)):
            assert other[0][at] == together[0][index]
            assert other[1][at].tobytes() == together[1][index].tobytes()
            if index in together[2]:
                for ours, theirs in zip(together[2][index], other[2][at], strict=True):
                    assert ours.tobytes() == theirs.tobytes()


@settings(deadline=None, max_examples=settings.default.max_examples * 3 // 5)
@given(cases())
def test_logprobs_are_raw_and_the_most_likely_come_first(native, case):
    logits, rows = case
    tokens, logprobs, top = by_c(native, logits, rows)
    for index, row in enumerate(rows):
        x = logits[index].astype(np.float64)
        expected = x - x.max() - math.log(np.exp(x - x.max()).sum())
        wanted = row.params.num_logprobs
        if tokens[index] < 0 or wanted < 0:
            assert math.isnan(logprobs[index]) and index not in top
            continue
        tolerance = 1e-5 * max(1.0, np.abs(x).max())
        assert logprobs[index] == pytest.approx(expected[tokens[index]], abs=tolerance)
        assert (index in top) == (wanted > 0)
        if wanted > 0:
            order = np.lexsort((np.arange(len(x)), -x))[:wanted]
            assert top[index][0].tolist() == order.tolist()
            np.testing.assert_allclose(top[index][1], expected[order], atol=tolerance)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 500, 901])
def test_a_row_that_is_not_finite_fails_alone(native, poison, place):
    logits = np.random.default_rng(1).normal(size=(3, 902)).astype(np.float32)
    rows = [Row(seed=index, num_logprobs=3) for index in range(3)]
    clean = by_c(native, logits, rows)
    logits[1, place] = poison
    tokens, logprobs, top = by_c(native, logits, rows)
    assert tokens.tolist() == [clean[0][0], -1, clean[0][2]]
    assert np.isnan(logprobs).tolist() == [False, True, False] and sorted(top) == [0, 2]


@pytest.mark.parametrize(
    "absurd",
    [
        {"min_p": 7.0},
        {"top_p": -1.0},
        {"top_k": -5},
        {"temperature": 1e-5},
        {"temperature": -3.0},
        {"temperature": 1e30},
        {"repetition_penalty": 1e-38, "prompt": (3,)},
        {"frequency_penalty": 3e38, "output": (3, 3)},
        {"presence_penalty": -3e38, "output": (3,)},
        {"logit_bias": ((3, 3e38),)},
        {"num_logprobs": 10**6},
    ],
)
def test_no_number_gives_a_token_outside_the_vocabulary_or_ends_the_process(native, absurd):
    for scale in (1.0, 1e38):
        logits = np.random.default_rng(2).normal(size=600).astype(np.float32) * np.float32(scale)
        tokens, _, _ = by_c(native, logits, [Row(seed=4, **absurd)])
        assert -1 <= tokens[0] < 600


def test_nothing_left_to_choose_from_is_a_failure(native):
    row = Row(seed=1, mask=np.zeros(40, bool))
    assert by_c(native, np.zeros(40), [row])[0].tolist() == [-1]


@pytest.mark.parametrize(
    "limits", [{}, {"top_p": 0.9}, {"top_k": 700}, {"min_p": 0.1}, {"top_k": 9}]
)
def test_draws_follow_the_distribution(native, limits):
    x = np.random.default_rng(8).normal(size=1500).astype(np.float32)
    rows = [Row(seed=50_000 + index, **limits) for index in range(4000)]
    draws = by_c(native, np.broadcast_to(x, (4000, 1500)).copy(), rows)[0]
    kept = rows[0].kept(x.astype(np.float64))
    expected = np.zeros(1500)
    expected[kept] = np.exp(x[kept].astype(np.float64))
    expected *= 4000 / expected.sum()
    observed = np.bincount(draws, minlength=1500)
    assert observed[expected == 0].sum() == 0
    cells = (
        np.add.reduceat(expected, range(0, 1500, 75)),
        np.add.reduceat(observed, range(0, 1500, 75)),
    )
    is_common = cells[0] > 8
    statistic = ((cells[1] - cells[0])[is_common] ** 2 / cells[0][is_common]).sum()
    freedom = int(is_common.sum()) - 1
    assert freedom >= 2
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom), (statistic, freedom)


def test_penalties_by_hand(native):
    x = np.array([2.0, 1.9, -1.0, 0.0], np.float32)

    def greedy(**row):
        row = Row(temperature=0.0, num_logprobs=0, **row)
        assert by_torch(x, [row]).token_ids[0] == by_c(native, x, [row])[0][0]
        return int(by_c(native, x, [row])[0][0])

    assert greedy(output=(0,), frequency_penalty=0.05) == 0  # 1.95
    assert greedy(output=(0, 0, 0), frequency_penalty=0.05) == 1  # 1.85
    assert greedy(output=(0, 0, 0), presence_penalty=0.05) == 0  # once, however often
    assert greedy(output=(0,), presence_penalty=0.2) == 1
    assert greedy(prompt=(0,), frequency_penalty=2.0, presence_penalty=2.0) == 0  # output only
    assert greedy(prompt=(0,), repetition_penalty=1.1) == 1  # 2 / 1.1: of the prompt, too
    assert greedy(output=(0, 0, 1), repetition_penalty=1.1) == 0  # both, each once
    low = ((0, -100.0), (1, -100.0), (3, -1.5))
    assert greedy(logit_bias=low) == 2  # -1 against -1.5
    assert greedy(logit_bias=low, prompt=(2,), repetition_penalty=2.0) == 3  # -2 against -1.5
    assert greedy(output=(3,), presence_penalty=-2.0) == 0  # 2.0 and 2.0: the lower id


def test_scores_are_the_logprobs_of_given_tokens(native):
    logits = np.random.default_rng(3).normal(size=(5, 700)).astype(np.float32) * 4
    logits[3, 9] = np.nan
    targets = np.array([0, 699, 5, 6, 7], np.int32)
    theirs = sampler.score(torch.from_numpy(logits.copy()), targets, 6)
    ours = RowSampler(native, 700).score(logits, targets, 6)
    good = [0, 1, 2, 4]
    assert np.isnan(ours[0][3]) and np.isnan(theirs[0][3])
    np.testing.assert_allclose(ours[0][good], theirs[0][good], atol=1e-5)
    np.testing.assert_array_equal(ours[1][good], theirs[1][good])
    np.testing.assert_allclose(ours[2][good], theirs[2][good], atol=1e-5)
