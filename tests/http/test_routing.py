"""Which worker gets a prompt: the rule, the index behind it, and the client's own choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmserve.http.errors import ApiError
from shmserve.http.routing import MOST_LIVES, PrefixIndex, Router, rank_of
from shmserve.rings.board import Board

BLOCK = 4


def ids(*blocks: int, rest: int = 0) -> np.ndarray:
    """A prompt of blocks, each told by one number, and `rest` tokens behind them."""
    return np.array([n for block in blocks for n in [block] * BLOCK] + [9] * rest, np.int32)


class Bench:
    """A router over workers that only count."""

    def __init__(self, board: Board, num_workers: int, **settings: Any) -> None:
        self.links = {
            worker: SimpleNamespace(worker=worker, is_serving=True, in_flight={})
            for worker in range(num_workers)
        }
        self.board = board
        self.router = Router(self.links, board, block_size=BLOCK, **settings)  # type: ignore[arg-type]

    def send(self, prompt: np.ndarray, salt: bytes = b"", rank: int | None = None) -> int | None:
        """Choose a worker; the request stays in flight to it."""
        link = self.router.choose(prompt, salt, rank)
        if link is None:
            return None
        link.in_flight[len(link.in_flight)] = object()
        return link.worker

    def end_all(self) -> None:
        for link in self.links.values():
            link.in_flight.clear()


@pytest.fixture
def bench(board: Board) -> Callable[..., Bench]:
    return lambda num_workers=2, **settings: Bench(board, num_workers, **settings)


def test_a_prompt_goes_where_the_longest_part_of_it_went(bench: Any) -> None:
    b = bench(3, margin=4)
    sent = [b.send(ids(n, 1, 1, 1)) for n in range(3)]
    assert sorted(sent) == [0, 1, 2], "strangers are spread"
    b.end_all()
    for n in (2, 0, 1, 1, 2, 0):
        assert b.send(ids(n, 1, 1, 1, 5, 5)) == sent[n]
        b.end_all()


def test_who_is_busier_by_more_than_the_margin_loses_it(bench: Any) -> None:
    b = bench(2, margin=3)
    home = b.send(ids(1, 2, 3))
    other = 1 - home
    assert [b.send(ids(1, 2, 3)) for _ in range(3)] == [home] * 3
    assert b.send(ids(1, 2, 3)) == other, "four are more than three"
    assert b.board["num_routed_by_load"] == 1
    assert b.board["num_routed_by_prefix"] == 3
    # Now both have it: the less busy one is as good.
    assert b.send(ids(1, 2, 3)) == other


def test_the_margin_shrinks_with_the_share_of_the_prompt_that_is_cached(bench: Any) -> None:
    b = bench(2, margin=4)
    home = b.send(ids(1, 2))
    assert b.send(ids(1, *range(10, 17))) == 1 - home, "an eighth of four is less than one"
    b.end_all()
    b.router.clear()
    home = b.send(ids(1, 2))
    assert b.send(ids(1, 2, 30, 31)) == home, "half of four is two"
    b.send(ids(40), rank=home)
    assert b.send(ids(1, 2, 50, 51)) == 1 - home, "which is less than three"


def test_without_a_match_the_least_busy_gets_it_and_equals_take_turns(bench: Any) -> None:
    b = bench(3)
    fresh = itertools.count(100)
    assert [b.send(ids(next(fresh), 1)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    b.links[1].in_flight.clear()
    assert [b.send(ids(next(fresh), 1)) for _ in range(2)] == [1, 1]


def test_salts_do_not_share(bench: Any) -> None:
    b = bench(2)
    home = b.send(ids(1, 2, 3), b"a")
    assert b.send(ids(1, 2, 3), b"b") == 1 - home
    b.end_all()
    assert b.send(ids(1, 2, 3), b"a") == home


def test_a_dead_worker_gets_nothing_and_its_cache_is_forgotten(bench: Any) -> None:
    b = bench(2)
    home = b.send(ids(1, 2, 3))
    b.end_all()
    b.links[home].is_serving = False
    b.router.forget(home)
    assert b.send(ids(1, 2, 3)) == 1 - home
    b.links[home].is_serving = True
    b.end_all()
    assert b.send(ids(1, 2, 3)) == 1 - home, "who came anew has computed nothing"
    b.links[0].is_serving = b.links[1].is_serving = False
    assert b.send(ids(1, 2, 3)) is None


def test_a_pinned_request_waits_for_nobody_else(bench: Any) -> None:
    b = bench(2)
    assert [b.send(ids(1, 2), rank=1) for _ in range(20)] == [1] * 20
    b.links[1].is_serving = False
    assert b.send(ids(1, 2), rank=1) is None
    assert b.send(ids(1, 2)) == 0


def test_other_policies_do_not_look_at_the_prompt(bench: Any) -> None:
    b = bench(2, policy="round-robin")
    assert [b.send(ids(1, 2, 3)) for _ in range(4)] == [0, 1, 0, 1]
    b = bench(2, policy="least-busy")
    b.links[0].in_flight["x"] = object()
    assert [b.send(ids(1, 2, 3)) for _ in range(3)] == [1, 0, 1]
    assert len(b.router.index) == 0


def test_what_other_front_ends_sent_counts(board: Board) -> None:
    class Others:
        def in_flight_to(self, worker: int) -> int:
            return 10 if worker == 0 else 0

    b = Bench(board, 2, neighbours=Others())
    assert [b.send(ids(n, 1)) for n in range(50, 60)] == [1] * 10


def test_the_index_never_passes_its_bound_and_forgets_ends_first() -> None:
    index = PrefixIndex(BLOCK, most_blocks=6)
    old, new = (index.keys_of(ids(n, n, n, n), b"") for n in (1, 2))
    index.note(old, 0)
    index.note(new, 1)
    assert len(index) == 6
    assert index.match(old, [0, 1]) == {0: 2, 1: 0}, "the beginning is what is left"
    assert index.match(new, [0, 1]) == {0: 0, 1: 4}
    long = index.keys_of(ids(*range(100)), b"")
    assert len(long) == 6, "of a prompt beyond the bound only what fits"
    index.note(long, 1)
    assert len(index) == 6 and index.match(long, [1]) == {1: 6}


def test_an_index_outlives_any_number_of_workers() -> None:
    index = PrefixIndex(BLOCK)
    keys = index.keys_of(ids(1, 2), b"")
    for life in range(3 * MOST_LIVES):
        worker = life % 2
        index.note(keys, worker)
        assert index.match(keys, [worker]) == {worker: 2}
        index.forget(worker)
        assert index.match(keys, [0, 1]) == {0: 0, 1: 0}
        assert max(index._workers.values()).bit_length() <= MOST_LIVES


def test_only_whole_blocks_count_and_each_by_all_before_it() -> None:
    index = PrefixIndex(BLOCK)
    index.note(index.keys_of(ids(1, 2, 3, rest=3), b""), 0)
    assert len(index) == 3
    assert index.match(index.keys_of(ids(1, 2, rest=3), b""), [0]) == {0: 2}
    assert index.match(index.keys_of(ids(2, 3), b""), [0]) == {0: 0}
    assert index.keys_of(ids(rest=3), b"") == []


def num_shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_the_index_is_a_dictionary_of_prefixes_whatever_comes() -> None:
    """Against the plain definition: for each worker the longest common run of blocks with anything it was sent."""
    draw = random.Random(4)
    index = PrefixIndex(BLOCK)
    sent: list[tuple[tuple[int, ...], int]] = []
    for _ in range(300):
        blocks = tuple(draw.choices((1, 2), k=draw.randint(0, 6)))
        keys = index.keys_of(ids(*blocks), b"")
        found = {
            worker: max(
                (num_shared(blocks, each) for each, to in sent if to == worker),
                default=0,
            )
            for worker in range(3)
        }
        assert index.match(keys, range(3)) == found
        if draw.random() < 0.05:
            dead = draw.randrange(3)
            index.forget(dead)
            sent = [(each, to) for each, to in sent if to != dead]
        else:
            worker = draw.randrange(3)
            index.note(keys, worker)
            sent.append((blocks, worker))


@pytest.mark.parametrize(
    ("value", "header", "rank"),
    [(None, None, None), (1, None, 1), (None, "0", 0), (1, "1", 1)],
)
def test_the_body_or_the_header_names_a_worker(value: Any, header: Any, rank: Any) -> None:
    assert rank_of(_request(header), value, 2) == rank


@pytest.mark.parametrize(
    ("value", "header", "words"),
    [
        (2, None, "data_parallel_rank must be 0 to 1, got 2"),
        (-1, None, "data_parallel_rank must be 0 to 1, got -1"),
        (None, "2", "X-data-parallel-rank must be 0 to 1, got 2"),
        (None, "one", "must be the number of a worker, got 'one'"),
        (None, "٣", "must be the number of a worker"),
        (0, "1", "data_parallel_rank is 0, but X-data-parallel-rank is 1"),
    ],
)
def test_a_worker_that_there_is_not_is_a_400(value: Any, header: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        rank_of(_request(header), value, 2)
    assert refused.value.status == 400


def _request(header: str | None) -> Any:
    return SimpleNamespace(headers={} if header is None else {"X-data-parallel-rank": header})
