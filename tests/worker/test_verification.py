"""What is kept of a step with guesses is what plain decoding would have made, place by place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.batch import Batch
from shmserve.worker.verification import kept_of, places_of


def batch_of(*guesses, prompt=0, is_guessing=True) -> Batch:
    """A sequence for each list of guesses, behind one that computes `prompt` tokens and samples nothing."""
    counts = ([prompt] if prompt else []) + [1 + len(guess) for guess in guesses]
    ids = [900] * prompt
    for index, guess in enumerate(guesses):
        ids += [800 + index, *guess]
    num_seqs, total = len(counts), sum(counts)
    none = np.zeros(total, np.int32)
    return Batch(
        step=1,
        rows=np.arange(10, 10 + num_seqs, dtype=np.int32),
        token_ids=np.array(ids, np.int32),
        positions=none,
        kv_slots=none,
        cu_seqlens=np.cumsum([0, *counts], dtype=np.int32),
        block_table=np.zeros((num_seqs, 1), np.int32),
        kv_lens=np.zeros(num_seqs, np.int32),
        sample_seqs=np.arange(bool(prompt), num_seqs, dtype=np.int32),
        is_decode=False,
        num_drafts=np.array([len(guess) for guess in guesses], np.int32) if is_guessing else None,
    )


def kept(batch, sampled, **more):
    return kept_of(batch, places_of(batch), np.array(sampled, np.int32), **more)


def test_places_are_the_last_rows_of_each_sequence_that_samples():
    places = places_of(batch_of([5, 6], [], [7], prompt=3))
    assert places.token_rows.tolist() == [3, 4, 5, 6, 7, 8]
    assert places.rows.tolist() == [11, 11, 11, 12, 13, 13]
    assert places.owners.tolist() == [0, 0, 0, 1, 2, 2]
    assert places.ahead.tolist() == [0, 1, 2, 0, 0, 1]


def test_without_guesses_every_sequence_has_one_place_and_keeps_one_token():
    batch = batch_of([], [], prompt=3, is_guessing=False)
    places = places_of(batch)
    assert places.token_rows.tolist() == [3, 4] and places.ahead is None
    result = kept(batch, [1, -1], logprobs=np.array([-0.5, np.nan], np.float32))
    assert result.token_ids.tolist() == [[1], [0]] and result.counts is None
    assert result.failed == (1,) and result.logprobs[0, 0] == -0.5


@pytest.mark.parametrize(
    ("sampled", "count"),
    [([5, 6, 7, 8], 4), ([5, 6, 9, 8], 3), ([5, 9, 7, 8], 2), ([9, 6, 7, 8], 1)],
)
def test_tokens_are_kept_up_to_the_first_that_was_guessed_wrong(sampled, count):
    result = kept(batch_of([5, 6, 7]), sampled)
    assert result.counts.tolist() == [count]
    assert result.token_ids[0, :count].tolist() == sampled[:count]


def test_each_sequence_keeps_its_own_with_their_logprobs():
    batch = batch_of([5, 6], [], [7], prompt=2)
    logprobs = np.array([0, -1, -2, -3, -4, -5], np.float32)
    top = {k: (np.array([k, 90 + k], np.int32), np.array([k, -9], np.float32)) for k in (0, 1, 2, 4, 5)}  # fmt: skip
    result = kept(batch, [5, 9, 1, 2, 7, 8], logprobs=logprobs, top=top)
    assert result.counts.tolist() == [2, 1, 2]
    assert result.token_ids.tolist() == [[5, 9], [2, 0], [7, 8]]
    assert result.logprobs[0].tolist() == [0, -1] and result.logprobs[2].tolist() == [-4, -5]
    assert result.logprobs[1, 0] == -3
    assert {owner: ids.tolist() for owner, (ids, _) in result.top.items()} == {
        0: [[0, 90], [1, 91]],
        2: [[4, 94], [5, 95]],
    }
    assert result.failed == ()


def test_a_place_without_a_token_ends_what_is_kept_and_fails_only_if_it_is_the_first():
    result = kept(batch_of([5, 6, 7], [5, 6], [5]), [5, 6, -1, 8, -1, 6, 7, 9, -1])
    assert result.counts.tolist() == [2, 1, 1]
    assert result.token_ids[0, :2].tolist() == [5, 6] and result.token_ids[2, 0] == 9
    assert result.failed == (1,)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), max_size=5), min_size=1))
def test_what_is_kept_is_what_one_by_one_gives(rows):
    """Pairs of a guess and of what is sampled in the row before it; behind the last guess 7 is sampled."""
    batch = batch_of(*([guess for guess, _ in row] for row in rows))
    result = kept(batch, [token for row in rows for token in [*(made for _, made in row), 7]])
    for index, row in enumerate(rows):
        expected = []
        for guess, made in [*row, (None, 7)]:
            if made < 0:
                break
            expected.append(made)
            if made != guess:
                break
        count = int(result.counts[index])
        assert (index in result.failed) == (not expected)
        assert count == max(1, len(expected))
        assert not expected or result.token_ids[index, :count].tolist() == expected
