"""The end as clients see it: nothing new from the first moment on, what runs is finished or cut with a word, and counted."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shmserve.instance_socket import ask, runtime_dir

Serve = Callable[..., Any]


def request(port: int, method: str, path: str, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps(fields) if fields else None
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_drain_refuses_what_is_new_at_once_and_finishes_what_runs(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    port = server.port()
    plain: list[tuple[int, dict[str, str], bytes]] = []
    fields = {"prompt": "Once", "max_tokens": 120, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: plain.append(request(port, "POST", "/v1/completions", **fields))
    )
    thread.start()
    until(lambda: server.status()["in_flight"], "the plain request")
    stream = client(server).stream(max_tokens=100, ignore_eos=True)
    stream.wait_first()
    os.killpg(server.pid, signal.SIGINT)  # as Ctrl-C does
    until(lambda: server.output().count("draining"), "draining")
    for path in ("/ready", "/health"):
        status, headers, body = request(port, "GET", path)
        assert (status, json.loads(body)["status"]) == (503, "draining")
        assert int(headers["Retry-After"]) >= 1
    assert request(port, "GET", "/live")[0] == 200
    status, headers, body = request(port, "POST", "/v1/completions", prompt="Once", stream=True)
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
    assert int(headers["Retry-After"]) >= 1
    assert stream.rest()[-1] == "[DONE]"
    thread.join()
    assert plain[0][0] == 200
    assert json.loads(plain[0][2])["usage"]["completion_tokens"] == 120
    assert server.wait() == 0
    assert "ended; 0 requests were cut" in server.output()
    assert server.leftovers() == []


@pytest.mark.slow
@pytest.mark.usefixtures("default_model")
def test_drain_timeout_cuts_what_is_left_with_a_word_and_counts_requests(
    serve: Serve, client: Any, until: Any
) -> None:
    server = serve("--step-ms=20", "--drain-timeout=0.3")
    server.wait_ready()
    port = server.port()
    api = client(server)
    streams = [api.stream(max_tokens=100_000, ignore_eos=True) for _ in range(2)]
    for stream in streams:
        stream.wait_first()
    plain: list[tuple[int, dict[str, str], bytes]] = []
    # One request, two sequences.
    fields = {"prompt": "Once", "max_tokens": 8_000, "ignore_eos": True, "n": 2, "temperature": 1}
    thread = threading.Thread(
        target=lambda: plain.append(request(port, "POST", "/v1/completions", **fields))
    )
    thread.start()
    until(lambda: server.status()["in_flight"] == 4, "all sequences")
    os.kill(server.pid, signal.SIGTERM)
    for stream in streams:
        error = json.loads([data for data in stream.rest() if "error" in data][-1])
        assert "shutting down" in error["error"]["message"]
    thread.join()
    assert plain[0][0] == 503
    assert server.wait() == 0
    assert "ended; 3 requests were cut" in server.output()
    assert server.leftovers() == []


def test_second_word_to_drain_waits_and_a_word_to_stop_hurries(
    start: Callable[..., Any], until: Any
) -> None:
    server = start(modes={"http": "slow_drain"})
    server.wait_ready()
    directory = runtime_dir(server.environ)
    for _ in range(2):
        ask(directory, server.name, {"type": "drain"}, 10.0)
        until(lambda: server.told()["draining"], "the front end drains")
        assert server.status()["state"] == "draining"
    ask(directory, server.name, {"type": "stop"}, 10.0, until_gone=True)
    assert server.wait() == 0
    assert "ended; 1 request was cut" in server.output()
