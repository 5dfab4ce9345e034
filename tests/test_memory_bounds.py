"""The formula of --print-limits: what it counts, that it adds up, and the sizes in it."""

import gc
import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from shmserve.boards import HTTP_BOARD
from shmserve.config import Config
from shmserve.http import fields
from shmserve.http.openai.endpoints import prompts_of
from shmserve.http.openai.schemas import CompletionRequest
from shmserve.memory_bounds import BODY_FACTOR, bounds_of, logprobs_bound, table, total_of
from shmserve.rings.board import Board
from shmserve.rings.board_table import board_bytes

DEFAULT = Config()


def bounds(config=DEFAULT, max_model_len=1000):
    return bounds_of(config, max_model_len, kv_bytes=1 << 20, num_kv_blocks=100)


def changed(group, **values):
    return replace(DEFAULT, **{group: replace(getattr(DEFAULT, group), **values)})


@pytest.mark.parametrize(
    ("config", "processes"),
    [
        (changed("rings", submit_slots=2_048), {"shm"}),
        (changed("rings", token_slots=32_768), {"shm"}),
        (changed("rings", table_size=2_048), {"shm", "http", "worker"}),
        (changed("rings", coalesce_tokens=100_000), {"worker"}),
        (changed("http", max_concurrent_connections=5_000), {"http"}),
        (changed("http", ssl_certfile="server.pem"), {"http"}),
        (changed("http", max_bodies_bytes=1 << 30), {"http"}),
        (changed("http", max_body_bytes=1 << 30), {"http"}),
        (changed("http", max_queued_requests=500), {"http", "worker"}),
        (changed("http", slow_client_bytes=1 << 20), {"http"}),
        (changed("worker", max_num_seqs=64), {"http", "worker"}),
        (replace(DEFAULT, num_http=2), {"shm", "http", "worker"}),
        (replace(DEFAULT, num_workers=2), {"shm", "http", "worker"}),
    ],
)
def test_each_bound_moves_the_sum_of_the_processes_that_hold_what_it_bounds(config, processes):
    moved = {
        process
        for process in ("shm", "http", "worker")
        if total_of(bounds(config), process) > total_of(bounds(), process)
    }
    assert moved == processes


def test_the_parts_add_up_and_every_number_is_shown():
    parts = bounds()
    assert total_of(parts) == sum(total_of(parts, name) for name in ("shm", "http", "worker"))
    text = table(parts, [logprobs_bound(DEFAULT, 1000)])
    for part in parts:
        assert f"{part.count:>10,} x {part.size:>13,} B  {part.what}" in text
    assert f"all of it: {total_of(parts) / 2**20:,.1f} MiB" in text


def test_a_board_takes_what_the_formula_says(tmp_path):
    board = Board.create("/shmserve.test-bounds.1.http0.board", HTTP_BOARD, 1)
    try:
        assert len(board.segment.mapping) >= board_bytes(HTTP_BOARD)
        assert len(board.words) * 8 == board_bytes(HTTP_BOARD)
    finally:
        board.segment.unlink()
        board.close()


@pytest.mark.parametrize("first", [1, 257, 10_000], ids=["cached ints", "short", "long"])
def test_a_body_and_what_is_made_of_it_take_no_more_than_the_factor(first):
    body = json.dumps({"prompt": [first] * 200_000}, separators=(",", ":")).encode()
    gc.collect()
    tracemalloc.start()
    try:
        copy = bytes(bytearray(body))
        parsed, _ = fields.decode(copy, CompletionRequest, {})
        (ids,) = prompts_of("prompt", parsed.prompt, 49_152)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(ids, np.ndarray) and len(ids) == 200_000
    assert most <= BODY_FACTOR * len(body), f"{most / len(body):.1f} times"
