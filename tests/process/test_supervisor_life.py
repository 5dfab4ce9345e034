"""The supervisor over fake children: start, drain, stop, and what is left after each."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]


def test_ready_line_names_url_and_pids(start: Start) -> None:
    server = start()
    status = server.wait_ready()
    line = next(line for line in server.output().splitlines() if "ready:" in line)
    assert status["url"] in line
    for pid in (server.pid, *server.pids()):
        assert str(pid) in line


def test_status_tells_pids_states_and_channels(start: Start) -> None:
    server = start()
    status = server.wait_ready()
    assert status["pid"] == server.pid
    assert status["state"] == "ready"
    assert [(c["role"], c["state"]) for c in status["children"]] == [
        ("http", "ready"),
        ("worker", "ready"),
    ]
    assert [c["submit"] in server.segments() for c in status["channels"]] == [True]


def test_children_block_terminal_signals_and_know_what_they_must(start: Start) -> None:
    server = start(extra_environ={"NOTIFY_SOCKET": "/nowhere"})
    server.wait_ready()
    told = server.told()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= set(told["blocked"])
    assert told["notify"] is None
    assert set(told["boards"]) == {"supervisor0", "http0", "worker0"}
    assert told["workers"]["0"]["state"] == "ready"
    assert told["workers"]["0"]["info"] == {"max_model_len": 77}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_one_signal_ends_all_with_code_0_and_leaves_nothing(start: Start, number: int) -> None:
    server = start()
    server.wait_ready()
    pids = server.pids()
    os.kill(server.pid, number)
    assert server.wait() == 0
    assert server.leftovers() == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert "Traceback" not in server.output()


def test_two_signals_within_100_ms_end_all_with_code_0(start: Start) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    server.end_twice()
    assert server.wait() == 0
    assert server.leftovers() == []
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_ctrl_c_to_the_whole_group_still_drains(start: Start, until: Any) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    http = server.child("http")["pid"]
    os.killpg(server.pid, signal.SIGINT)
    until(lambda: server.status()["state"] == "draining", "draining")
    assert server.told()["draining"] is True  # the front end lives, and serves
    os.kill(http, signal.SIGUSR1)
    assert server.wait() == 0
    assert server.leftovers() == []


def test_second_signal_cuts_a_drain_and_says_how_many(start: Start, until: Any) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    os.kill(server.pid, signal.SIGTERM)
    until(lambda: server.told()["draining"], "the front end drains")
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert "ended; 1 request was cut" in server.output()
    assert server.leftovers() == []


def test_drain_timeout_ends_a_drain(start: Start) -> None:
    server = start(modes={"http": "slow_drain"}, config={"drain_timeout_s": 0.2})
    server.wait_ready()
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_children_that_ignore_stop_are_killed(start: Start) -> None:
    server = start(modes={"http": "deaf", "worker": "deaf"}, config={"drain_timeout_s": 0.1})
    server.wait_ready()
    pids = server.pids()
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert server.leftovers() == []


def test_signal_while_the_model_is_prepared_ends_cleanly_and_clients_were_told_how_far_it_is(
    start: Start, until: Any, free_port: int
) -> None:
    server = start(prepare_s=60, config={"http": {"port": free_port}})
    until(lambda: "preparing" in server.output(), "preparing")
    connection = http.client.HTTPConnection("127.0.0.1", free_port, timeout=30)
    connection.request("GET", "/ready")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["phase"]) == (503, "preparing")
    connection.close()
    os.kill(server.pid, signal.SIGTERM)
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert server.leftovers() == []
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_signal_while_the_worker_loads_ends_with_code_0(start: Start, until: Any) -> None:
    server = start(modes={"worker": "never_ready"})
    until(lambda: server.leftovers() and server.segments(), "segments")
    until(lambda: server.child("http")["state"] == "ready", "the front end")
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []


def test_front_end_serves_while_the_worker_loads(start: Start, until: Any) -> None:
    server = start(modes={"worker": "never_ready"})
    until(lambda: "shmserve" in server.output() or server.segments(), "a start")
    until(lambda: server.leftovers(), "the instance socket")
    until(lambda: server.child("http")["state"] == "ready", "the front end")
    until(lambda: server.told()["workers"].get("0", {}).get("state") == "loading", "the news")
    assert "ready:" not in server.output()


def test_worker_that_fails_to_load_ends_the_start_with_its_one_line(start: Start) -> None:
    server = start(modes={"worker": "fails"})
    assert server.wait() == 1
    errors = [line for line in server.output().splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "the weights are made of cheese" in errors[0]
    assert server.leftovers() == []


def test_unix_socket_is_served_private_and_removed(start: Start, tmp_path: Any) -> None:
    path = tmp_path / "api.sock"
    server = start(config={"http": {"uds": str(path)}})
    assert server.wait_ready()["url"] == f"unix:{path}"
    assert path.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert client.recv(12) == b"HTTP/1.0 200"
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()
