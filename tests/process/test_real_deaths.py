"""Real children killed and stopped while they serve: what clients see, and that the service comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("default_model")
Serve = Callable[..., Any]


@pytest.mark.slow
def test_worker_killed_ends_every_request_well_and_a_new_one_serves_J5(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve("--step-ms=20", "--max-num-seqs=4")
    server.wait_ready()
    http, worker = server.pids()
    api = client(server)
    streams = [api.stream(max_tokens=5_000, ignore_eos=True) for _ in range(2)]
    for stream in streams:
        stream.wait_first()
    with ThreadPoolExecutor(4) as pool:
        # Two run beside the streams, two wait behind them.
        plain = [
            pool.submit(client(server).complete, max_tokens=5_000, ignore_eos=True)
            for _ in range(4)
        ]
        until(lambda: server.status()["in_flight"] == 6, "six in flight")
        os.kill(worker, signal.SIGKILL)
        for stream in streams:
            *_, error = [text for text in stream.rest() if text != "[DONE]"]
            assert "error" in json.loads(error)
        for answer in plain:
            status, body = answer.result()
            assert status >= 500
            assert "error" in json.loads(body)
    health = api.get("/health")
    assert health.status in (503, 200)
    until(lambda: api.get("/health").status == 200, "healthy again")
    assert server.pids("http") == [http]
    assert api.stream(max_tokens=3).rest()[-1] == "[DONE]"


@pytest.mark.slow
def test_health_is_503_with_the_reason_until_the_new_worker_is_ready_J5(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve()
    server.wait_ready()
    (worker,) = server.pids("worker")
    os.kill(worker, signal.SIGKILL)
    until(lambda: client(server).get("/health").status == 503, "unhealthy")
    status, body = client(server).complete(max_tokens=3)
    assert status == 503
    assert "error" in json.loads(body)
    until(lambda: client(server).get("/ready").status == 200, "ready again")


@pytest.mark.slow
def test_front_end_killed_keeps_the_worker_and_the_port(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    http, worker = server.pids()
    stream = client(server).stream(max_tokens=5_000, ignore_eos=True)
    stream.wait_first()
    os.kill(http, signal.SIGKILL)
    until(lambda: client(server).get("/ready").status == 200, "the successor")
    assert server.pids("worker") == [worker]
    assert server.pids("http") != [http]
    assert client(server).stream(max_tokens=3).rest()[-1] == "[DONE]"
    until(lambda: server.status()["in_flight"] == 0, "the dead front end's sequence is freed")


@pytest.mark.slow
def test_stopped_worker_is_unhealthy_and_goes_on_where_it_was_J5(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    (worker,) = server.pids("worker")
    stream = client(server).stream(max_tokens=30, ignore_eos=True)
    stream.wait_first()
    os.kill(worker, signal.SIGSTOP)
    until(lambda: client(server).get("/health").status == 503, "unhealthy")
    os.kill(worker, signal.SIGCONT)
    until(lambda: client(server).get("/health").status == 200, "healthy again")
    assert stream.rest()[-1] == "[DONE]"
    assert server.pids("worker") == [worker]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["idle", "decode"])
def test_supervisor_killed_takes_everybody_along_and_a_new_start_works_J1(
    serve: Serve, client: Any, until: Any, is_alive: Any, free_port: int, phase: str
) -> None:
    server = serve("--port", str(free_port), "--step-ms=20")
    server.wait_ready()
    pids = server.pids()
    stream = None
    if phase == "decode":
        stream = client(server).stream(max_tokens=5_000, ignore_eos=True)
        stream.wait_first()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    if stream is not None:
        *_, error = [text for text in stream.rest() if text != "[DONE]"]
        assert "error" in json.loads(error)
    until(lambda: not any(is_alive(pid) for pid in pids), "both children end")
    successor = serve("--port", str(free_port), name=server.name)
    successor.wait_ready()
    assert len(successor.segments()) == 5
    assert client(successor).stream(max_tokens=3).rest()[-1] == "[DONE]"


@pytest.mark.slow
def test_everybody_killed_again_and_again_leaves_one_set_J2(serve: Serve) -> None:
    bystander = serve()
    bystander.wait_ready()
    segments = bystander.segments()
    name = f"test-{os.getpid()}-victim"
    for _ in range(3):
        victim = serve(name=name)
        victim.wait_ready()
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
    last = serve(name=name)
    last.wait_ready()
    assert len(last.segments()) == 5
    assert bystander.segments() == segments
