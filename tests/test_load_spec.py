"""What is drawn before a load begins."""

import itertools

import pytest

from shmserve.load_spec import Lengths, LoadSpec, random_prompts

FIELDS = {"base_url": "", "model": "m", "prompts": ("p",), "max_tokens": (1,)}


def spec(**fields) -> LoadSpec:
    return LoadSpec(**({"num_requests": None} | FIELDS | fields))


def test_duration_bounds_the_arrivals_that_count_and_not_the_warm_up():
    long = spec(rate=50.0, duration_s=10.0, num_warmup=200)
    times = long.due_times_s()
    counted = times[200:]
    assert counted[-1] - counted[0] < 10.0
    assert len(counted) == pytest.approx(500, rel=0.2)
    assert times == sorted(times)


def test_number_and_duration_end_a_load_whichever_comes_first():
    assert len(spec(rate=10.0, duration_s=1000.0, num_requests=7, num_warmup=2).due_times_s()) == 9
    assert len(spec(rate=10.0, duration_s=1.0, num_requests=7000).due_times_s()) < 40


def test_warm_up_comes_first_and_counts_not():
    load = spec(concurrency=1, num_requests=2, num_warmup=3)
    assert [load.is_counted(i) for i in load.indices()] == [False] * 3 + [True] * 2
    endless = spec(concurrency=1, duration_s=1.0)
    assert list(itertools.islice(endless.indices(), 3)) == [0, 1, 2]


def test_only_every_so_many_counted_requests_ask_for_times():
    load = spec(concurrency=1, num_requests=9, num_warmup=1, timing_every=4)
    asks = [i for i in load.indices() if "include_timing" in load.body(i)["stream_options"]]
    assert asks == [1, 5, 9]
    assert "include_timing" not in spec(concurrency=1, num_requests=1).body(0)["stream_options"]


@pytest.mark.parametrize(
    "fields",
    [
        {"concurrency": 1},  # no end
        {"rate": 1.0, "duration_s": 0.0},
        {"rate": float("inf"), "num_requests": 1},
        {"rate": 1.0, "num_requests": 1, "num_warmup": -1},
        {"rate": 1.0, "num_requests": 1, "timing_every": -1},
    ],
)
def test_a_spec_without_sense_is_refused(fields):
    with pytest.raises(ValueError):
        spec(**fields)


def test_lengths_are_one_or_in_turn_or_drawn_from_a_range():
    assert Lengths.parse("64").draw(3, 0) == (64, 64, 64)
    assert Lengths.parse("1,2").draw(3, 0) == (1, 2, 1)
    drawn = Lengths.parse("3-5").draw(200, 0)
    assert set(drawn) == {3, 4, 5}
    assert drawn == Lengths.parse("3-5").draw(200, 0) != Lengths.parse("3-5").draw(200, 1)


@pytest.mark.parametrize("text", ["", "0", "x", "5-1", "1,", "-3", "1-2-3"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_prompts_differ_from_their_first_word_on():
    prompts = random_prompts((5, 1, 9), 3)
    assert [len(prompt.split()) for prompt in prompts] == [5, 1, 9]
    assert len({prompt.split()[0] for prompt in random_prompts((2,) * 100, 3)}) == 100
    assert prompts == random_prompts((5, 1, 9), 3) != random_prompts((5, 1, 9), 4)
