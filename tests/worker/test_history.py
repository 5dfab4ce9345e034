"""What penalties know of a sequence: each id once, prompt included, and how often it was generated."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.history import History

tokens = st.lists(st.integers(0, 200), max_size=150)


@given(tokens, tokens, st.data())
def test_it_counts_what_was_generated_however_it_grew(prompt, output, data):
    row = np.array([*prompt, *output, 7, 7, 7], np.int32)
    history, total = History(row, len(prompt)), len(prompt) + len(output)
    steps = data.draw(st.lists(st.integers(len(prompt), total), max_size=5).map(sorted))
    for num_tokens in [*steps, total]:
        ids, counts = history.upto(num_tokens)
        expected = Counter(dict.fromkeys(prompt, 0))
        expected.update(row[len(prompt) : num_tokens].tolist())
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == dict(expected)
        assert len(set(ids.tolist())) == len(ids)


def test_a_history_after_a_preemption_is_the_one_before_it():
    row = np.array([5, 5, 9, 3, 9, 9], np.int32)
    grown = History(row, 2)
    for num_tokens in range(2, 7):
        grown.upto(num_tokens)
    for one, other in zip(grown.upto(6), History(row.copy(), 2).upto(6), strict=True):
        assert one.tolist() == other.tolist()
