"""What is drawn ahead is what one draw at a time would give."""

import numpy as np
import pytest

from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.simulated_draws import DEPTH, Draws

CHOICES = np.arange(100, 177, dtype=np.int32)
ROWS = np.array([4, 0, 2], np.int32)


def state(seed=7):
    sampling = SamplingState(6)
    sampling.seed[:] = np.arange(6, dtype=np.uint64) + np.uint64(seed)
    sampling.position[:] = [0, 5, 11, 3, 2**31 - 100, 9]
    return sampling


def alone(sampling, rows):
    """Each row by itself, from draws that remember nothing."""
    drawn = [Draws(CHOICES).of(rows[i : i + 1], None, sampling) for i in range(len(rows))]
    return [int(d[0][0]) for d in drawn], [int(d[1][0]) for d in drawn]


def assert_drawn(draws, rows, sampling):
    indices, token_ids = draws.of(rows, None, sampling)
    assert (indices.tolist(), token_ids.tolist()) == alone(sampling, rows)


def test_rows_that_go_on_draw_as_each_alone_over_several_depths():
    draws, sampling = Draws(CHOICES), state()
    for _ in range(3 * DEPTH):
        assert_drawn(draws, ROWS, sampling)
        sampling.position[ROWS] += 1


@pytest.mark.parametrize("num_steps", [1, 2, 5, DEPTH, DEPTH + 1])
def test_whatever_changes_is_seen_in_the_same_step(num_steps):
    draws, sampling = Draws(CHOICES), state()

    def go_on():
        for _ in range(num_steps):
            assert_drawn(draws, ROWS, sampling)
            sampling.position[ROWS] += 1

    go_on()
    sampling.seed[2] = 99  # another sequence in the row
    go_on()
    sampling.position[4] -= 1  # one of them was left out of a step
    go_on()
    sampling = state(seed=1000)
    go_on()
    assert_drawn(draws, ROWS[:2], sampling)
    go_on()


def test_guesses_are_drawn_at_the_places_that_they_stand_for():
    draws, sampling = Draws(CHOICES), state()
    rows, ahead = np.array([0, 0, 0, 2], np.int32), np.array([0, 1, 2, 0], np.int32)
    _, token_ids = draws.of(rows, ahead, sampling)
    for at, place in enumerate(ahead.tolist()):
        later = sampling.ahead(place)
        assert alone(later, rows[at : at + 1])[1] == [token_ids[at]]
