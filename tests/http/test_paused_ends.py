"""Sequences that their clients have paused, and what ends them from elsewhere: their time, a drain, the death of their worker."""

import os
import signal

import pytest
from serving import until

LAST_CHUNK = b"\r\n0\r\n\r\n"


def pause(server, wire, count=1, **more):
    """Streams whose clients read nothing, until their sequences are paused."""
    stuck = [wire(server, 4096) for _ in range(count)]
    for seed, each in enumerate(stuck):
        body = {"prompt": "Hi", "stream": True, "max_tokens": 2000, "seed": seed}
        each.send("/v1/completions", body | {"on_slow_client": "block"} | more)
    until(lambda: server.words("worker")["paused"] == count, "they are paused")
    return stuck


def test_the_time_of_a_paused_request_is_up_though_no_step_is_computed(server, wire):
    (stuck,) = pause(server, wire, timeout_ms=1500)
    server.wait_idle()  # nobody else asks: the engine sleeps, and wakes for this
    data = stuck.read_until(LAST_CHUNK)
    assert b'"finish_reason":"length"' in data and b'"timeout"' in data
    assert data.count(b"data: [DONE]") == 1


@pytest.mark.slow
def test_a_drain_ends_paused_streams_at_its_timeout_and_tells_those_who_read(start_server, wire):
    server = start_server("--step-ms=1", "--drain-timeout=1")
    stuck, silent = pause(server, wire, 2)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.words("supervisor")["draining"], "it drains")
    data = stuck.read_all()
    assert data.endswith(LAST_CHUNK) and b'"error"' in data
    assert server.process.wait(20) == 0
    silent.close()


@pytest.mark.slow
def test_the_death_of_the_worker_frees_paused_streams_and_the_next_one_serves(start_server, wire):
    server = start_server("--step-ms=1")
    stuck = pause(server, wire, 2)
    os.kill(server.worker_pid, signal.SIGKILL)
    for each in stuck:
        data = each.read_until(LAST_CHUNK)
        assert b'"worker_died"' in data and data.count(b"data: [DONE]") == 1
    until(lambda: server.get("/health").status == 200, "the next worker is ready")
    server.wait_idle()
    assert server.text(max_tokens=3)
