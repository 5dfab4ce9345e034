"""Bad words as ids: what may not come next, against the rule in plain words."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.bad_words import BadWords

ids = st.integers(0, 3)  # few, so that words are met, and overlap themselves
words_of = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=6)


@given(words_of, st.lists(ids, max_size=4), st.lists(ids, max_size=10))
def test_the_last_id_of_a_word_is_banned_exactly_behind_its_others(words, prompt, output):
    bad = BadWords(words, np.array([*prompt, *output, 99], np.int32), len(prompt))
    for length in (*range(len(output) + 1), 0):  # in any order: it keeps nothing
        found = bad.banned(length)
        said = output[:length]
        expected = {
            word[-1]
            for word in words
            if len(word) <= length + 1 and tuple(said[length - len(word) + 1 :]) == word[:-1]
        }
        assert set([] if found is None else found.tolist()) == expected


def test_a_word_that_begins_in_the_prompt_is_none():
    bad = BadWords([(5, 6, 7)], np.array([5, 6, 5, 6, 0], np.int32), 1)
    assert bad.banned(1) is None
    assert bad.banned(3).tolist() == [7]
