"""What a front end takes in: connections, bodies, waiting requests and tokens; and who goes when somebody better comes."""

import json
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from serving import until

from shmserve.http.occupancy import most_connections
from shmserve.http.tokenizer import Tokenizer
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import boards_of

MOST_CONNECTIONS = 8
KIB = 1024


@pytest.fixture(scope="module")
def server(start_server):
    """One sequence at a time, three or 1,500 prompt tokens may wait, and all other bounds are small as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    server = start_server(
        "--step-ms=2",
        "--max-num-seqs=4",
        "--max-running-requests=1",
        "--max-queued-requests=3",
        "--max-queued-tokens=1500",
        "--queue-full-status=429",
        f"--max-concurrent-connections={MOST_CONNECTIONS}",
        "--max-body-bytes=64K",
        "--max-bodies-bytes=96K",
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return server


@pytest.fixture
def busy(server):
    """A stream that has the one slot until the test is over."""
    stream = server.stream(max_tokens=8000, ignore_eos=True)
    stream.take(1)
    yield stream
    stream.leave()
    server.wait_idle()


def wait_alone(server):
    """The connections of other tests are gone: a heartbeat that is later than this call says so."""
    begin_ns = time.monotonic_ns()

    def is_alone():
        words = server.words("http")
        return words["heartbeat_ns"] > begin_ns and not words["connections"]

    until(is_alone, "those of other tests are gone")


def submitted(server):
    """The ids of all sequences that are in."""
    (name,) = [name for name in boards_of(server.name) if ".http0." in name]
    reader = BoardReader.attach(name)
    try:
        return {row["req_id"] for row in reader.roster("requests")}
    finally:
        reader.close()


class Waiting:
    """A request that will wait, in a thread of its own."""

    def __init__(self, server, path="/v1/completions", **fields):
        before = submitted(server)
        body = {"max_tokens": 1} | fields
        self._thread = threading.Thread(target=lambda: self._ask(server, path, body))
        self._thread.start()
        until(lambda: submitted(server) - before, "it is in line")

    def _ask(self, server, path, body):
        self._answer = server.post(path, body)

    @property
    def is_over(self):
        return not self._thread.is_alive()

    def answer(self):
        self._thread.join(30)
        return self._answer


def test_a_better_request_takes_the_place_of_the_worst_that_waits(server, busy):
    before = server.words("http")
    bodies = [
        {"prompt": "Hi", "priority": 1},
        {"prompt": "Hi", "priority": 5, "stream": True},
        {"prompt": "Hi", "priority": 5},
    ]
    first, older, newer = [Waiting(server, **body) for body in bodies]
    refused = server.post("/v1/completions", {"prompt": "Hi", "priority": 5})
    assert (refused.status, refused.error()["message"]) == (429, "The request queue is full.")
    better = Waiting(server, prompt="Hi", priority=4)
    error = newer.answer().error()
    assert (newer.answer().status, error["code"]) == (429, "queue_full")
    assert error["message"] == "The request is aborted by a higher priority request."
    assert newer.answer().headers["retry-after"]
    # On /generate higher is better: as SGLang has it.
    native = {"text": "Hi", "priority": -6, "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", native).status == 429
    best = Waiting(server, "/generate", **(native | {"priority": -3, "max_tokens": None}))
    assert older.answer().status == 429, "a stream, and no 200 before"
    assert not first.is_over and not better.is_over
    after = server.words("http")
    assert after["num_refused_evicted"] - before["num_refused_evicted"] == 2
    assert after["num_refused_queue_full"] - before["num_refused_queue_full"] == 2
    assert len(busy.take(5)) == 5
    busy.leave()
    assert [each.answer().status for each in (first, better, best)] == [200] * 3


def test_a_better_request_that_is_invalid_sends_nobody_away(server, busy):
    waiting = [Waiting(server, prompt="Hi", priority=5) for _ in range(3)]
    answer = server.post("/v1/completions", {"prompt": "Hi", "priority": 0, "temperature": -1})
    assert answer.status == 400
    assert not any(each.is_over for each in waiting)
    busy.leave()
    assert [each.answer().status for each in waiting] == [200] * 3


def test_prompt_tokens_that_wait_are_bounded_and_a_lonely_one_is_let_in(server, busy):
    long = Waiting(server, prompt=[19556] * 2000)
    refused = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    message = refused.error()["message"]
    assert refused.status == 429 and "2000 prompt tokens wait" in message and "1500" in message
    busy.leave()
    assert long.answer().status == 200
    server.wait_idle()
    assert server.metrics()["shmserve_refusals_total", "tokens"] >= 1


def test_the_tokens_that_a_text_has_at_least_are_never_more_than_it_has(default_model):
    tokenizer = Tokenizer(default_model, 1)
    try:
        for text in (
            "Hi",
            " " * 5_000,
            "\n" * 999,
            "Once upon a time. " * 300,
            "é😀" * 500,
            "=" * 4_000,
        ):
            least = tokenizer.least_tokens([text])
            assert 1 <= least <= len(tokenizer._encode(text)), text[:9]
        ids = np.array([5, 6, 7], np.int32)
        assert tokenizer.least_tokens([ids, "Hi", ids]) == 7
        assert tokenizer.least_tokens(["a" * 100_000]) > 100
    finally:
        tokenizer.close()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server, wire):
    said = wire(server)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    said.sock.sendall(f"{head}Content-Length: {64 * KIB + 1}\r\n\r\n".encode())
    answer = said.read_until(b"}}").decode()  # and not a byte of it was sent
    assert answer.startswith("HTTP/1.1 413 ")
    assert "has 65537 bytes" in answer and "65536 are allowed (--max-body-bytes)" in answer
    chunked = wire(server)
    chunked.sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    part = b"%x\r\n" % (8 * KIB) + b" " * (8 * KIB) + b"\r\n"
    chunked.sock.sendall(part * 8)
    time.sleep(0.05)
    chunked.sock.sendall(part)  # one too many; the last chunk has not come
    answer = chunked.read_until(b"}}").decode()
    assert answer.startswith("HTTP/1.1 413 ")
    num_seen = int(answer.partition("has at least ")[2].split()[0])
    assert 64 * KIB < num_seen <= 72 * KIB
    assert server.post("/v1/completions", {"prompt": "x" * 64 * KIB}).status == 413
    assert server.metrics()["shmserve_refusals_total", "body"] == 3


def test_a_head_that_goes_on_and_on_is_refused_though_no_line_of_it_is_long(server, wire):
    endless = wire(server)
    endless.sock.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n")
    for number in range(9):
        time.sleep(0.005)
        endless.sock.sendall(b"X-%d: " % number + b"x" * 7_500 + b"\r\n")
    answer = endless.read_until(b"}}").decode()
    assert answer.startswith("HTTP/1.1 431 ") and "65536 bytes" in answer


def test_all_bodies_together_are_bounded_while_they_come_and_while_they_are_answered(server, wire):
    stuck = wire(server)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    stuck.sock.sendall(f"{head}Content-Length: {60 * KIB}\r\n\r\n".encode())
    until(lambda: server.words("http")["body_bytes"] == 60 * KIB, "its room is kept")
    prompt = " " * 40 * KIB
    refused = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert (refused.status, refused.error()["code"]) == (503, "bodies_full")
    assert str(96 * KIB) in refused.error()["message"] and refused.headers["retry-after"] == "1"
    assert server.text(max_tokens=1), "a small one fits beside it"
    stuck.close()
    until(lambda: server.words("http")["body_bytes"] == 0, "its room is free")
    stream = server.stream(prompt=prompt, max_tokens=4000, ignore_eos=True)
    stream.take(1)
    assert server.words("http")["body_bytes"] > 40 * KIB
    stream.leave()
    server.wait_idle()
    until(lambda: server.words("http")["body_bytes"] == 0, "its room is free")


def test_one_connection_too_many_is_answered_and_closed_and_the_others_live(server, wire):
    wait_alone(server)
    before = server.words("http")["num_refused_connections"]
    open_ones = [wire(server) for _ in range(MOST_CONNECTIONS)]
    for each in open_ones:
        each.send("/live", method="GET")
        each.read_until(b"\r\n\r\n")
    for _ in range(3):
        late = wire(server)
        late.send("/v1/completions", {"prompt": "x" * 30_000})
        head, _, body = late.read_all().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert server.words("http")["num_refused_connections"] - before == 3
    open_ones[0].send("/v1/completions", {"prompt": "Hi", "max_tokens": 1})
    assert b" 200 OK" in open_ones[0].read_until(b'"usage"')
    open_ones.pop().close()
    until(lambda: server.get("/live").status == 200, "one has left, and its place is free")


def test_every_descriptor_that_is_allowed_may_be_used(server):
    for role in ("http", "worker"):
        limits = Path(f"/proc/{server.words(role)['pid']}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard != "256"


def test_connections_are_as_many_as_descriptors_last(monkeypatch):
    def bounded_by(descriptors, asked=4_096, num_places=512, num_workers=1):
        limit = (descriptors, descriptors)
        monkeypatch.setattr("shmserve.http.occupancy.resource.getrlimit", lambda _: limit)
        return most_connections(asked, num_places, num_workers)

    assert bounded_by(65_536) == bounded_by(resource.RLIM_INFINITY) == 4_096
    few = bounded_by(1_024)
    assert 0 < few < 1_024 - 512, "a stream sends on a second descriptor"
    assert bounded_by(1_024, num_places=513) == few - 1
    assert bounded_by(1_024, num_workers=2) < few
    assert bounded_by(256) == 0


def test_worker_and_front_end_agree_on_how_many_run(server):
    wait_alone(server)
    info = server.get("/server_info").json()
    assert (info["max_running_requests"], info["max_queued_requests"]) == (1, 3)
    assert server.words("worker")["max_num_seqs"] == 1
