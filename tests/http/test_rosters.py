"""What a front end shows of single requests and clients: who is in flight, and who is slowest."""

import asyncio

import numpy as np
import pytest
from sockets import SilentTransport

from shmserve.boards import MOST_SLOW_SHOWN
from shmserve.config import RingConfig
from shmserve.http.client import WorkerClient
from shmserve.http.errors import ApiError
from shmserve.http.slow_client import SlowClientRules, SlowClients
from shmserve.request import SamplingParams
from shmserve.rings.board import BoardReader

RULES = SlowClientRules("coalesce", 1 << 20, 1000.0)


@pytest.fixture
def reader(board):
    made = BoardReader.attach(board.segment.name)
    yield made
    made.close()


class Link:
    """A worker that takes every record, or refuses it."""

    def __init__(self, worker, refuses=False):
        self.worker = worker
        self.is_serving = True
        self.in_flight = {}
        self.refuses = refuses

    async def submit(self, entry, record, num_slots):
        if self.refuses:
            raise ApiError(503, "no room")


def submit(client, num_prompt_tokens):
    prompt, params = np.zeros(num_prompt_tokens, np.int32), SamplingParams(max_tokens=1)
    return client.submit(prompt, params, index=0, signal=None, arrival_ns=55)


def test_requests_in_flight_are_shown_from_their_submit_until_they_are_forgotten(board, reader):
    async def run():
        client = WorkerClient(0, RingConfig(table_size=4), board)
        client.links[1] = Link(1)
        first = await submit(client, 7)
        second = await submit(client, 8)
        rows = reader.roster("requests")
        assert [row["req_id"] for row in rows] == [first.req_id, second.req_id]
        assert [row["prompt_tokens"] for row in rows] == [7, 8]
        assert {(row["worker"], row["arrival_ns"]) for row in rows} == {(1, 55)}
        assert rows[0]["submitted_ns"] == first.submitted_ns
        client.forget(first)
        assert [row["req_id"] for row in reader.roster("requests")] == [second.req_id]
        client.forget(second)
        assert reader.roster("requests") == []

    asyncio.run(run())


def test_request_that_was_refused_is_not_shown(board, reader):
    async def run():
        client = WorkerClient(0, RingConfig(table_size=4), board)
        client.links[0] = Link(0, refuses=True)
        with pytest.raises(ApiError):
            await submit(client, 7)
        assert reader.roster("requests") == []

    asyncio.run(run())


def test_the_slowest_clients_are_shown_the_deepest_first_and_none_that_has_read_on(board, reader):
    async def run():
        clients = SlowClients(board)
        sizes = range(1000, 1000 + MOST_SLOW_SHOWN + 5)
        watched = [
            clients.watch(
                SilentTransport(size), RULES, "a test", lambda is_stuck: None, req_id=size
            )
            for size in sizes
        ]
        clients._look()
        rows = reader.roster("slow_clients")
        assert [row["req_id"] for row in rows] == list(reversed(sizes))[:MOST_SLOW_SHOWN]
        assert [row["num_bytes"] for row in rows] == [row["req_id"] for row in rows]
        assert all(row["since_ns"] and not row["text_bytes"] for row in rows)
        for one in watched:
            clients.release(one)
        assert reader.roster("slow_clients") == []

    asyncio.run(run())
