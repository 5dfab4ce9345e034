"""The rate that /v1/loads tells: since a reading of at least a second ago, and never of another process's counter."""

from shmserve.http.generation_rate import GenerationRates

SECOND = 1_000_000_000


def test_the_first_asker_is_told_nothing_and_the_next_the_rate_since():
    rates = GenerationRates()
    assert rates.look(0, 5 * SECOND, 1000) == 0.0
    assert rates.look(0, 7 * SECOND, 1500) == 250.0


def test_askers_a_moment_apart_are_told_of_a_whole_second():
    rates = GenerationRates()
    rates.look(0, 0, 0)
    rates.look(0, 2 * SECOND, 200)
    assert rates.look(0, 2 * SECOND + 1, 200) == 200 * SECOND / (2 * SECOND + 1)
    assert rates.look(0, 3 * SECOND, 500) == 300.0


def test_a_worker_that_stopped_is_at_0_within_two_looks():
    rates = GenerationRates()
    for second, tokens in enumerate((0, 100, 200, 200)):
        rate = rates.look(0, second * SECOND, tokens)
    assert rate == 0.0


def test_a_new_worker_is_not_measured_against_the_counter_of_the_dead():
    rates = GenerationRates()
    rates.look(0, 0, 0)
    assert rates.look(0, SECOND, 400) == 400.0
    assert rates.look(0, 2 * SECOND, 10) == 0.0
    assert rates.look(0, 3 * SECOND, 30) == 20.0


def test_workers_have_rates_of_their_own():
    rates = GenerationRates()
    for worker in (0, 1):
        rates.look(worker, 0, 0)
    assert [rates.look(worker, SECOND, 100 * (worker + 1)) for worker in (0, 1)] == [100.0, 200.0]
