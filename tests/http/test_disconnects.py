"""Clients that leave: whatever they asked for and however they go, their sequences, blocks and places are free again."""

import json
import random
import socket
import time

import pytest
from serving import GENERATING, until

LONG = 4000
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": LONG, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": LONG,
        "ignore_eos": True,
    },
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}},
}


def leave(wire, how):
    """End a connection as clients do: close, half-close and stay, or reset."""
    if how == "half-close":
        wire.sock.shutdown(socket.SHUT_WR)
    elif how == "reset":
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wire.close()
    else:
        wire.close()


def num_generated(server):
    return server.words("worker")["generation_tokens"]


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_stream_whose_client_leaves_is_stopped_E1(asker, server, wire, path, how, version):
    before = num_generated(server)
    gone = wire(server)
    gone.send(path, BODIES[path] | {"stream": True}, version=version)
    gone.read_until(b"data: ")
    until(lambda: server.words("worker")["running"] == 1, "it runs")
    leave(gone, how)
    server.wait_idle()
    assert num_generated(server) - before < LONG
    assert len(asker.text(max_tokens=3)) > 0


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_plain_request_whose_client_leaves_is_stopped_E2(asker, server, wire, path, how, version):
    before = num_generated(server)
    gone = wire(server)
    gone.send(path, BODIES[path], version=version)
    until(lambda: server.words("worker")["running"] == 1, "it runs")
    leave(gone, how)
    server.wait_idle()
    assert num_generated(server) - before < LONG
    assert server.words("http")["num_aborted"] > 0


def test_requests_that_end_by_themselves_leave_no_entry_E2(asker, server):
    connection = server.connect()
    aborted = server.words("http")["num_aborted"]
    for i in range(300):
        body = {"prompt": "Hi", "max_tokens": 1 + i % 2, "stream": i % 3 == 0}
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().read()
    connection.close()
    server.wait_idle()
    assert server.words("http")["num_aborted"] == aborted


def test_a_client_that_leaves_inside_its_body_takes_no_slot(asker, server, wire):
    admitted = server.words("worker")["num_admitted"]
    for path in GENERATING:
        gone = wire(server)
        gone.sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        gone.close()
    server.wait_idle()
    assert server.words("worker")["num_admitted"] == admitted


@pytest.fixture(scope="module")
def narrow(start_server):
    """One sequence at a time, eight may wait."""
    return start_server("--step-ms=4", "--max-num-seqs=1", "--max-queued-requests=8")


@pytest.mark.parametrize(
    ("is_stream", "how"),
    [
        (True, "close"),
        (False, "half-close"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((False, "close"), (True, "reset"))
        ),
    ],
)
def test_a_waiting_request_that_is_cancelled_hurts_nobody_E3(narrow, wire, is_stream, how):
    """A runs, B waits and leaves, C waits: A gets all, C runs next, B costs no prefill."""
    before = narrow.words("worker")
    running = narrow.stream(prompt="Hi", max_tokens=300, ignore_eos=True)
    running.take(1)
    gone, patient = wire(narrow), wire(narrow)
    gone.send("/v1/completions", {"prompt": "Hello world", "max_tokens": 5, "stream": is_stream})
    patient.send("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 5})
    until(lambda: narrow.words("worker")["waiting"] == 2, "two wait")
    leave(gone, how)
    until(lambda: narrow.words("worker")["waiting"] == 1, "one waits")
    assert len(running.objects()) == 300  # the first of 301 is taken already
    assert b'"completion_tokens":5' in patient.read_until(b"}}")
    narrow.wait_idle()
    after = narrow.words("worker")
    assert after["prompt_tokens"] - before["prompt_tokens"] == 1 + 5
    assert after["num_aborted"] - before["num_aborted"] == 1


def test_waiting_requests_of_dead_clients_are_dropped_unrun_E4(narrow, wire):
    before = narrow.words("worker")
    running = narrow.stream(prompt="Hi", max_tokens=400, ignore_eos=True)
    running.take(1)
    dead = [wire(narrow) for _ in range(5)]
    for i, each in enumerate(dead):
        each.send(
            "/v1/completions", {"prompt": "Hello world", "max_tokens": 900, "stream": i % 2 == 0}
        )
    living = wire(narrow)
    living.send("/v1/completions", {"prompt": "Hi", "max_tokens": 5})
    until(lambda: narrow.words("worker")["waiting"] == 6, "six wait")
    for each in dead:
        each.close()
    until(lambda: narrow.words("worker")["waiting"] == 1, "one waits")
    running.objects()
    assert b'"completion_tokens":5' in living.read_until(b"}}")
    narrow.wait_idle()
    assert narrow.words("worker")["prompt_tokens"] - before["prompt_tokens"] == 2


@pytest.fixture(scope="module")
def crowded(start_server):
    """24 run at once, more wait."""
    return start_server("--step-ms=2", "--max-num-seqs=24")


def test_many_clients_that_leave_at_once_leave_nothing_E5(crowded):
    rng = random.Random(5)
    prompt = "word " * 60
    for _ in range(3):
        streams = []
        for i in range(64):
            connection = crowded.connect()
            body = {"prompt": prompt if i % 2 else "Hi", "max_tokens": 2000, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            streams.append(connection)
        time.sleep(rng.random() * 0.2)  # some run, some wait, some are in prefill
        for connection in streams:
            connection.close()
        crowded.wait_idle()
    streams = [crowded.stream(prompt=prompt, max_tokens=8, seed=i) for i in range(24)]
    assert all(len(stream.objects()) == 9 for stream in streams)
    crowded.wait_idle()
    assert "Traceback" not in crowded.output()


def test_a_disconnect_is_no_error_in_the_log(server):
    """What the tests above did to the shared server: clients leave, that is all."""
    assert " ERROR " not in server.output() and "Traceback" not in server.output()


def test_a_client_that_sends_half_a_body_takes_no_slot_D6(asker, server, wire):
    before = server.words("worker")["num_finished"]
    halves = [wire(server) for _ in range(40)]
    for half in halves:
        half.sock.sendall(
            b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{"prompt":'
        )
    assert asker.text(max_tokens=3)
    assert server.words("http")["in_flight"] == 0
    for half in halves:
        half.close()
    server.wait_idle()
    assert server.words("worker")["num_finished"] == before + 1
