"""Guesses come from what stood before, are never longer than asked, and grow only with success."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.ngram import FIRST_GUESS, GRAM_SIZES, NgramIndex


def index(tokens, most=8):
    return NgramIndex(np.array(tokens, np.int32), most)


def test_tokens_without_a_repetition_give_no_guess():
    assert index([1, 2, 3, 4, 5]).guess(8) == []
    assert index([]).guess(8) == []


def test_what_followed_the_same_tokens_is_guessed():
    assert index([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4]).guess(8) == [5, 6, 7][:FIRST_GUESS]


def test_longer_match_wins_over_a_newer_shorter_one():
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 1, 2, 3, 4]
    assert index(tokens).guess(1) == [50]


def test_newest_of_equal_matches_wins():
    assert index([1, 2, 50, 0, 1, 2, 60, 0, 1, 2], most=1).guess(1) == [60]


def test_loop_shorter_than_the_guess_goes_on_with_itself():
    guesser = index([7, 8, 7, 8, 7, 8])
    assert guesser.guess(3) == [7, 8, 7]


def test_room_bounds_the_guess_and_none_means_none():
    guesser = index([1, 2, 3, 4, 1, 2])
    assert guesser.guess(1) == [3]
    assert guesser.guess(0) == []
    assert guesser.guess(-1) == []


def test_length_doubles_with_success_up_to_the_most_and_falls_with_failure():
    guesser = index([1, 2] * 20, most=8)
    lengths = []
    for _ in range(4):
        guess = guesser.guess(100)
        lengths.append(len(guess))
        guesser.learn(len(guess), len(guess))
    assert lengths == [3, 6, 8, 8]
    guesser.learn(8, 2)
    assert len(guesser.guess(100)) == 3
    guesser.learn(3, 0)
    assert len(guesser.guess(100)) == 1
    guesser.learn(0, 0)  # no guess was made: nothing is learnt
    assert len(guesser.guess(100)) == 1


def test_guess_that_room_had_cut_short_does_not_shrink_the_next():
    guesser = index([1, 2] * 20, most=8)
    guesser.learn(3, 3)
    guesser.learn(1, 1)
    assert len(guesser.guess(100)) == 6


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(1, 12),
)
def test_guess_stands_behind_an_earlier_occurrence_of_the_longest_known_end(first, more, room):
    guesser = index(first, most=12)
    guesser.extend(more)
    tokens = first + more
    assert guesser.num_tokens == len(tokens)
    guess = guesser.guess(room)
    assert len(guess) <= room
    expected = []
    for size in GRAM_SIZES:
        ends = [
            at
            for at in range(size, len(tokens))
            if len(tokens) >= size and tokens[at - size : at] == tokens[-size:]
        ]
        if ends:
            expected = tokens[ends[-1] :]
            break
    assert guess[: len(expected)] == expected[: len(guess)]
    assert bool(guess) == bool(expected)
