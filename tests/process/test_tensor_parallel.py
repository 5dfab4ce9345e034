"""`--tensor-parallel` as a user starts it: one worker of several processes, which live and end as one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from asking import Ask, status_of

FLAGS = ("--runner=torch", "--threads=2", "--max-num-seqs=4", "--max-model-len=512")
SHARED = (*FLAGS, "--tensor-parallel=2")


def text_of(client: Any, **fields: Any) -> bytes:
    status, body = client.complete(prompt="The capital of France is", temperature=0, **fields)
    assert status == 200, body
    return body.partition(b'"text":')[2].partition(b'"finish_reason"')[0]


def ranks_of(server: Any) -> list[int]:
    pids: list[int] = server.child("worker")["rank_pids"]
    return pids


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_answers_are_those_of_one_rank_and_the_end_leaves_nobody(
    serve: Any, client: Any, is_alive: Any, until: Any
) -> None:
    alone = serve(*FLAGS)
    alone.wait_ready()
    text = text_of(client(alone), max_tokens=24)
    assert b"Paris" in text and ranks_of(alone) == []
    os.kill(alone.pid, signal.SIGTERM)
    assert alone.wait() == 0
    shared = serve(*SHARED)
    shared.wait_ready()
    assert text_of(client(shared), max_tokens=24) == text
    (rank,) = ranks_of(shared)
    assert is_alive(rank)
    assert "the C kernels do not share a model" in shared.output()
    assert "3 kv heads do not divide evenly: a rank has 1 or 2" in shared.output()
    os.kill(shared.pid, signal.SIGTERM)
    assert shared.wait() == 0
    until(lambda: not is_alive(rank), "the other rank ends")
    assert shared.leftovers() == []


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_a_rank_killed_ends_its_worker_whose_successor_has_new_ones(
    serve: Any, until: Any, is_alive: Any
) -> None:
    server = serve(*SHARED)
    server.wait_ready()
    (worker,), (rank,) = server.pids("worker"), ranks_of(server)
    epoch = server.child("worker")["epoch"]
    asks = [Ask(server.port(), max_tokens=400) for _ in range(2)]
    for each in asks:
        each.wait_first()
    os.kill(rank, signal.SIGKILL)
    assert {ask.outcome() for ask in asks} == {"error"}
    until(lambda: status_of(server.port(), "/ready")[0] == 200, "a new worker")
    child = server.child("worker")
    assert child["pid"] != worker and child["epoch"] > epoch and child["deaths"] == 1
    assert f"rank 1 of 2 (pid {rank}) was killed by SIGKILL" in child["last_death"]
    (new,) = ranks_of(server)
    assert is_alive(new) and not is_alive(worker) and new != rank
    assert Ask(server.port(), max_tokens=3).outcome() == "done"


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_rank_0_killed_takes_the_others_along(serve: Any, until: Any, is_alive: Any) -> None:
    server = serve(*SHARED)
    server.wait_ready()
    (worker,), (rank,) = server.pids("worker"), ranks_of(server)
    os.kill(worker, signal.SIGKILL)
    until(lambda: not is_alive(rank), "the other rank ends")
    until(lambda: server.child("worker")["deaths"] == 1, "the supervisor knows")
    until(lambda: status_of(server.port(), "/ready")[0] == 200, "a new worker")
    assert Ask(server.port(), max_tokens=3).outcome() == "done"


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_a_model_that_cannot_be_shared_is_refused_in_one_line(serve: Any) -> None:
    server = serve("--runner=torch", "--tensor-parallel=5")
    assert server.wait() == 1
    assert (
        "--tensor-parallel 5: the model's 9 heads over 3 kv heads cannot be shared among 5 ranks "
        "(up to 3, or 9 ranks)" in server.output()
    )
