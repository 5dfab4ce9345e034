"""The ids that the front end composes are those of the picture in `shmserve.wire`."""

import asyncio
import os

import numpy as np

from shmserve.boards import HTTP_BOARD
from shmserve.config import RingConfig
from shmserve.http.client import WorkerClient
from shmserve.request import SamplingParams
from shmserve.rings.board import Board
from shmserve.wire.submit_slots import submit_head


class StillLink:
    """A worker that serves and takes every record."""

    worker = 0
    is_serving = True

    def __init__(self) -> None:
        self.in_flight: dict[int, object] = {}

    async def submit(self, entry, record: bytes, num_slots: int) -> None:
        assert submit_head(record)[0] == entry.req_id


async def ids_of_requests(board: Board, http_index: int, table_size: int, count: int) -> list[int]:
    """The req_ids that a front end gives to requests that come and go."""
    client = WorkerClient(http_index, RingConfig(table_size=table_size), board)
    client.links[0] = StillLink()
    ids = []
    for _ in range(count):
        params = SamplingParams(max_tokens=1)
        entry = await client.submit(
            np.zeros(1, np.int32), params, index=0, signal=None, arrival_ns=0
        )
        ids.append(entry.req_id)
        if len(client.in_flight) == table_size:
            client.forget(entry)
    return ids


def test_req_id_is_generation_front_end_and_table_slot():
    """What the front end composes is what the picture says, and no two lives of a table slot share an id."""
    board = Board.create(f"/shmserve.test-ids-{os.getpid()}.1.http5.board", HTTP_BOARD, 1)
    board.segment.unlink()
    ids = asyncio.run(ids_of_requests(board, http_index=5, table_size=3, count=7))
    assert [req_id & 0xFFFF for req_id in ids] == [0, 1, 2, 2, 2, 2, 2]
    assert {req_id >> 16 & 0xFF for req_id in ids} == {5}
    generations = [req_id >> 24 for req_id in ids]
    assert generations == list(range(generations[0], generations[0] + 7))
    assert max(ids) < 2**64
