"""A cell of each row of the death matrix with the real model: native code does not change what is promised."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from asking import Ask, status_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_model")]
FLAGS = ("--runner=cpu", "--threads=1", "--max-num-seqs=8")
PREFILL, DECODE = 4, 5


@pytest.fixture
def busy(serve: Any, until: Any, words_of: Any) -> Callable[[int], tuple[Any, list[Ask]]]:
    """busy(phase): a server whose worker is in this phase, and who made it so."""

    def begin(phase: int) -> tuple[Any, list[Ask]]:
        server = serve(*FLAGS)
        server.wait_ready()
        port = server.port()
        if phase == PREFILL:
            asks = [Ask(port, prompt=list(range(1000, 3500)), max_tokens=5)]
        else:
            asks = [Ask(port, max_tokens=400) for _ in range(8)]
            for each in asks:
                each.wait_first()
        until(lambda: words_of(server, "worker")["phase"] == phase, "the phase")
        return server, asks

    return begin


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_supervisor_killed_takes_native_code_along(
    busy: Any, until: Any, is_alive: Any, phase: int
) -> None:
    server, asks = busy(phase)
    pids = server.pids()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert {ask.outcome() for ask in asks} == {"error"}
    until(lambda: not any(map(is_alive, pids)), "both end")
    assert server.leftovers() == []


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_worker_killed_fails_its_requests_well(busy: Any, until: Any, phase: int) -> None:
    server, asks = busy(phase)
    (worker,) = server.pids("worker")
    os.kill(worker, signal.SIGKILL)
    assert {ask.outcome() for ask in asks} == {"error"}
    until(lambda: status_of(server.port(), "/ready")[0] == 200, "a new worker")
    assert Ask(server.port(), max_tokens=3).outcome() == "done"


def test_front_end_killed_frees_its_sequences(busy: Any, until: Any, words_of: Any) -> None:
    server, asks = busy(DECODE)
    http, worker = server.pids()
    os.kill(http, signal.SIGSEGV)
    assert {ask.outcome() for ask in asks} == {"broken"}
    until(lambda: words_of(server, "worker")["kv_blocks_used"] == 0, "its blocks are free")
    until(lambda: status_of(server.port(), "/ready")[0] == 200, "a new front end")
    assert server.pids("worker") == [worker]
    assert Ask(server.port(), max_tokens=3).outcome() == "done"


def test_worker_stopped_in_a_step_goes_on_where_it_was(busy: Any, until: Any) -> None:
    server, asks = busy(PREFILL)
    (worker,) = server.pids("worker")
    os.kill(worker, signal.SIGSTOP)
    until(lambda: status_of(server.port(), "/health")[0] == 503, "unhealthy")
    os.kill(worker, signal.SIGCONT)
    assert {ask.outcome() for ask in asks} == {"done"}
    assert server.pids("worker") == [worker]


def test_supervisor_told_to_end_while_the_model_loads_leaves_nothing(
    serve: Any, until: Any
) -> None:
    server = serve(*FLAGS)
    until(lambda: "worker 0" in server.output(), "the worker tells how it loads")
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []
