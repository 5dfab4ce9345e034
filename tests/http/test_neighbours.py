"""Two front ends of one instance, each with its own table and rings: what they know of one another, and do to one another."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np
import pytest
from puppet import Rings, finish_record, started_record, until

from shmserve.config import HttpConfig, RingConfig
from shmserve.http.admission import EVICTED, Admission
from shmserve.http.errors import ApiError
from shmserve.http.health import Boards
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.neighbours import Neighbours
from shmserve.http.waiting_line import Party
from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.submit_slots import SubmitKind

RINGS = RingConfig(token_slots=64, submit_slots=64, table_size=32)


class Front(Rings):
    """A front end as far as its verdicts, over rings whose worker is the test."""

    def __init__(
        self, http: int, run_slots: int, config: HttpConfig, rings: RingConfig = RINGS
    ) -> None:
        super().__init__(rings, http)
        self.boards = Boards()
        self.neighbours = Neighbours(http, self.boards)
        self.admission = Admission(self.client, run_slots, config, self.neighbours)

    def sees(self, other: Front, name: str | None = None) -> None:
        """As the supervisor tells it of a board, or by "" of its end."""
        index = other.client.http_index
        self.boards.attach("http", index, other.board.segment.name if name is None else name)

    async def come(
        self, num_tokens: int = 1, priority: int = 0, n: int = 1
    ) -> tuple[Party, list[InFlight]]:
        """A request is let in and submitted."""
        party = self.admission.enter(n, priority=priority)
        try:
            self.admission.settle(party, n * num_tokens)
            entries = [
                await self.client.submit(
                    np.zeros(num_tokens, np.int32),
                    SamplingParams(max_tokens=8),
                    index=index,
                    signal=Signal(),
                    arrival_ns=time.monotonic_ns(),
                    party=party,
                )
                for index in range(n)
            ]
        except ApiError:
            self.admission.close(party)
            raise
        return party, entries

    async def start(self, entry: InFlight) -> None:
        self.put(started_record(entry.req_id))
        await until(lambda: entry.started, "STARTED")

    async def finish(self, entry: InFlight, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.put(finish_record(entry.req_id, reason))
        await until(lambda: entry.req_id not in self.client.in_flight, "FINISH")

    def evictions(self) -> list[int]:
        """The requests that it wants evicted, by what the worker has got from it."""
        return [req_id for kind, req_id, _ in self.take() if kind == SubmitKind.EVICT]


def two_fronts(scenario: Any, run_slots: int = 1, rings: RingConfig = RINGS, **config: Any) -> None:
    """Run scenario(a, b)."""

    async def run() -> None:
        http = HttpConfig(**config)
        async with Front(0, run_slots, http, rings) as a, Front(1, run_slots, http, rings) as b:
            for one in (a, b):
                for other in (a, b):
                    one.sees(other)
            try:
                await scenario(a, b)
            finally:
                for front in (a, b):
                    for reader in front.boards.readers.values():
                        reader.close()

    asyncio.run(run())


def refused(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str | None]:
    return error.value.status, error.value.code


def test_places_of_the_other_count_and_come_back_at_once() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, (first,) = await a.come()
        await b.come()
        assert (a.neighbours.num_places, b.neighbours.num_places) == (1, 1)
        assert (a.admission.num_places, b.admission.num_places) == (2, 2)
        for front in (a, b):
            with pytest.raises(ApiError) as error:
                await front.come()
            assert refused(error) == (503, "queue_full")
        await a.start(first)
        await a.finish(first)
        await b.come()
        assert a.admission.num_places == 2

    two_fronts(scenario, max_queued_requests=1)


def test_waiting_tokens_of_the_other_count() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, (entry,) = await a.come(6)
        with pytest.raises(ApiError, match="6 prompt tokens wait, and 5 more would pass 10"):
            await b.come(5)
        await a.start(entry)
        await b.come(5)
        assert (a.neighbours.num_tokens, b.neighbours.num_tokens) == (5, 0)

    two_fronts(scenario, max_queued_requests=20, max_queued_tokens=10)


def test_in_flight_is_known_by_worker_and_in_all() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, entries = await a.come(n=3)
        assert b.neighbours.num_in_flight == b.neighbours.in_flight_to(0) == 3
        assert b.neighbours.in_flight_to(1) == 0
        assert a.neighbours.num_in_flight == 0, "its own are not its neighbour's"
        assert b.client.router.load_of(b.link) == 0, "who knows no neighbours counts its own"
        await a.finish(entries[0])
        assert b.neighbours.num_in_flight == b.neighbours.in_flight_to(0) == 2

    two_fronts(scenario, max_queued_requests=20)


def test_what_a_dead_neighbour_held_is_gone_with_its_board() -> None:
    async def scenario(a: Front, b: Front) -> None:
        await a.come(n=2)
        with pytest.raises(ApiError):
            await b.come()
        b.sees(a, "")
        assert (b.neighbours.num_places, len(b.neighbours)) == (0, 0)
        await b.come(n=2)

    two_fronts(scenario, max_queued_requests=1)


def test_the_worst_of_both_goes_and_its_own_front_end_answers_it() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, (running,) = await a.come()
        await a.start(running)
        party, (worst,) = await b.come(priority=5)
        _, (bad,) = await a.come(priority=3)
        assert a.neighbours.worse_than(3)[0].req_id == worst.req_id
        assert a.neighbours.worse_than(5) == []
        a.take()
        await a.come(priority=1)
        assert a.evictions() == [worst.req_id]
        await b.finish(worst, FinishReason.EVICTED)
        assert worst.error is party.error is not None
        assert (worst.error.status, worst.error.message) == (503, EVICTED)
        assert b.board["num_refused_evicted"] == 1
        assert b.admission.line.num_places == b.board["places"] == b.board["worst_waiting"] == 0
        # The next one goes for its own front end's better one, without a word to the other.
        await a.come(priority=0)
        assert bad.error is not None and bad.error.message == EVICTED
        assert a.evictions() == []

    two_fronts(scenario, max_queued_requests=2)


def test_who_runs_or_is_as_good_stays() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, (running,) = await b.come(priority=9)
        await b.start(running)
        await b.come(priority=2)
        with pytest.raises(ApiError) as error:
            await a.come(priority=2)
        assert refused(error) == (503, "queue_full")
        assert a.evictions() == []
        assert [each.priority for each in a.neighbours.worse_than(1)] == [2]

    two_fronts(scenario, max_queued_requests=1)


def test_all_sequences_of_an_evicted_request_go() -> None:
    async def scenario(a: Front, b: Front) -> None:
        party, (first, second) = await b.come(priority=5, n=2)
        await b.finish(second, FinishReason.EVICTED)
        assert first.error is second.error is party.error is not None
        kinds = [(kind, req_id) for kind, req_id, _ in b.take()]
        assert (SubmitKind.ABORT, first.req_id) in kinds
        assert b.board["num_refused_evicted"] == 1
        await b.finish(first, FinishReason.ABORT)
        assert b.board["places"] == 0 and not b.client.in_flight

    two_fronts(scenario, max_queued_requests=5)


def test_one_whose_client_left_is_not_refused_too() -> None:
    async def scenario(a: Front, b: Front) -> None:
        _, (entry,) = await b.come(priority=5)
        b.client.abort(entry)
        await b.finish(entry, FinishReason.EVICTED)
        assert b.board["num_refused"] == 0 and b.board["places"] == 0

    two_fronts(scenario, max_queued_requests=5)


def test_who_was_sent_away_is_not_shown_for_a_second_time() -> None:
    async def scenario(a: Front, b: Front) -> None:
        await b.come(priority=5)
        await b.come(priority=0)
        await b.come(priority=0)
        assert a.neighbours.worse_than(1) == []

    two_fronts(scenario, max_queued_requests=1)


@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_hold_over_both_whatever_comes(seed: int) -> None:
    """Requests, starts and ends in a random order at both: the sum never passes the bound, and at the end it is 0."""

    async def scenario(a: Front, b: Front) -> None:
        draw = random.Random(seed)
        live: list[tuple[Front, InFlight]] = []
        num_let_in = 0
        for _ in range(150):
            front = draw.choice((a, b))
            if draw.random() < 0.6:
                try:
                    _, entries = await front.come(draw.randint(1, 4), n=draw.randint(1, 2))
                except ApiError as error:
                    assert error.code == "queue_full"
                else:
                    num_let_in += 1
                    live += [(front, entry) for entry in entries]
            elif live:
                owner, entry = live.pop(draw.randrange(len(live)))
                owner.take()
                if draw.random() < 0.5:
                    await owner.start(entry)
                await owner.finish(entry)
            shown = [each.board["places"] for each in (a, b)]
            assert shown == [each.admission.line.num_places for each in (a, b)]
            assert sum(shown) == len(live) <= 2 + 4
            waiting = [entry for _, entry in live if entry.started is None]
            assert len(waiting) == sum(each.admission.line.num_waiting for each in (a, b))
            assert sum(each.board["waiting_tokens"] for each in (a, b)) <= 12
        assert num_let_in > 20
        for owner, entry in live:
            owner.take()
            await owner.finish(entry)
        assert a.admission.num_places == b.admission.num_places == 0
        assert a.neighbours.num_tokens == b.neighbours.num_tokens == 0

    two_fronts(scenario, run_slots=2, max_queued_requests=4, max_queued_tokens=12)


def test_who_waits_beside_a_full_ring_is_not_sent_away_before_the_ring_has_it() -> None:
    """An EVICT of the other front end would reach the worker first, and mean nobody."""

    async def scenario(a: Front, b: Front) -> None:
        _, entries = await a.come(n=5, priority=5)
        *written, waiting = entries
        assert [entry.is_submitted for entry in entries] == [True] * 4 + [False]
        shown = [each.req_id for each in b.neighbours.worse_than(0)]
        assert sorted(shown) == sorted(entry.req_id for entry in written)
        a.take()
        await until(lambda: waiting.is_submitted, "it is written")
        assert waiting.req_id in [each.req_id for each in b.neighbours.worse_than(0)]

    small = RingConfig(token_slots=64, submit_slots=4, table_size=32, submit_policy="coalesce")
    two_fronts(scenario, run_slots=8, rings=small)
