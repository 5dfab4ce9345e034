"""What a step may take, by what its like has taken."""

from shmserve.worker.step_times import WINDOW, StepTimes

MS = 1_000_000


def test_nothing_is_expected_before_anything_was_seen():
    times = StepTimes()
    assert times.expected_ns(True, 512) == times.expected_ns(False, 1) == 0


def test_decode_steps_are_measured_by_decode_steps():
    """A prefill that takes a minute is no excuse for a decode step that hangs."""
    times = StepTimes()
    times.took(False, 20 * MS)
    times.took(True, 60_000 * MS)
    times.took(False, 5 * MS)
    assert times.expected_ns(False, 32) == 20 * MS
    assert times.expected_ns(True, 32) == 60_000 * MS


def test_first_long_prompt_is_measured_by_the_tokens_of_the_warm_up():
    times = StepTimes()
    times.warmed_up(16, 32 * MS)
    assert times.expected_ns(True, 8_000) == 16_000 * MS
    assert times.expected_ns(False, 8_000) == 0
    times.took(True, 20_000 * MS)
    assert times.expected_ns(True, 8_000) == 20_000 * MS


def test_a_step_that_a_stop_made_long_is_forgotten_but_not_at_once():
    times = StepTimes()
    times.took(False, 50_000 * MS)
    for _ in range(WINDOW):
        times.took(False, 5 * MS)
        assert times.expected_ns(False, 1) == 50_000 * MS
    for _ in range(WINDOW):
        times.took(False, 6 * MS)
    assert times.expected_ns(False, 1) == 6 * MS
