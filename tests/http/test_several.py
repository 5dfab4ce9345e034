"""Two front ends before two workers: one server to its clients, whichever process serves them."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import PATIENCE_S, Server, until

pytestmark = pytest.mark.slow

RUN_SLOTS, QUEUED = 2, 2  # of a worker; of all
MOST = 2 * RUN_SLOTS + QUEUED
FOREVER = 4_000  # tokens: longer than any test


@pytest.fixture(scope="module")
def emission_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emission") / "log.jsonl"


@pytest.fixture(scope="module")
def pair(start_server: Callable[..., Server], emission_log: Path) -> Server:
    return start_server(
        f"--emission-log={emission_log}",
        "--http-processes=2",
        "--workers=2",
        "--step-ms=20",
        f"--max-num-seqs={RUN_SLOTS}",
        f"--max-queued-requests={QUEUED}",
    )


def front_of(answer: dict[str, Any]) -> int:
    """The front end that gave it: it stands in the id."""
    return int(answer["id"][-16:], 16) >> 16 & 0xFF


class Line:
    """A connection that stays open, and so with one front end."""

    def __init__(self, server: Server) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
        status, answer, _ = self.ask("/v1/completions", prompt="Hi", max_tokens=1)
        assert status == 200, answer
        self.front = front_of(answer)

    def send(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        body = json.dumps(fields) if fields else None
        headers = {"Content-Type": "application/json"} | (headers or {})
        self.connection.request("POST" if fields else "GET", path, body, headers)

    def receive(self) -> tuple[int, Any, Any]:
        response = self.connection.getresponse()
        body = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(body) if is_json else body, response.headers

    def ask(self, path: str, headers: Any = None, **fields: Any) -> tuple[int, Any, Any]:
        self.send(path, headers, **fields)
        return self.receive()

    def begin(self, **fields: Any) -> Running:
        """A stream whose first event has come."""
        self.send("/v1/completions", **{"prompt": "Hi", "stream": True, "max_tokens": 400} | fields)
        return Running(self)


class Running:
    """A stream that runs; its line is taken until it ends."""

    def __init__(self, line: Line) -> None:
        self.response = line.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        self.front = line.front
        self.id = json.loads(self._next()[6:])["id"]

    def _next(self) -> bytes:
        while not (found := self.response.readline()).startswith(b"data: "):
            assert found, "the stream has ended"
        return found

    def rest(self) -> str:
        """How it ended: "done", "error", or "broken"."""
        try:
            body = self.response.read()
        except (ConnectionError, http.client.IncompleteRead):
            return "broken"
        assert body.endswith(b"data: [DONE]\n\n"), body[-200:]
        return "error" if b'"error":{' in body else "done"


@pytest.fixture
def lines(pair: Server) -> Iterator[Callable[[int], Line]]:
    """lines(i): a new connection to front end i. At the end all are closed, and the server is idle."""
    opened: list[Line] = []

    def to(front: int) -> Line:
        for _ in range(100):
            opened.append(Line(pair))
            if opened[-1].front == front:
                return opened[-1]
        raise AssertionError(f"of 100 connections none came to front end {front}")

    yield to
    for line in opened:
        line.connection.close()
    if pair.process.poll() is None:
        until(lambda: is_idle(pair), "idle")


def is_idle(server: Server) -> bool:
    fronts = [server.words("http", i) for i in (0, 1)]
    workers = [server.words("worker", i) for i in (0, 1)]
    held = [w["running"] + w["waiting"] + w["kv_blocks_used"] for w in workers]
    held += [f["in_flight"] + f["places"] + f["worst_waiting"] for f in fronts]
    return not any(held)


@pytest.mark.slow
def test_the_bound_on_requests_holds_over_both_front_ends(pair: Server, lines: Any) -> None:
    askers, queued = [lines(0), lines(1)], [lines(i % 2) for i in range(QUEUED)]
    for i in range(2 * RUN_SLOTS):
        lines(i % 2).begin()
    for line in queued:
        line.send("/v1/completions", prompt="Hi", max_tokens=400)
    until(lambda: num_waiting(pair) == QUEUED, "a full queue")
    assert sum(pair.words("http", i)["places"] for i in (0, 1)) == MOST
    for asker in askers * 2:
        status, answer, headers = _on(asker)
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        assert int(headers["Retry-After"]) > 0
        assert asker.ask("/load")[1] == {"server_load": MOST}


def num_waiting(server: Server) -> int:
    return sum(server.words("worker", i)["waiting"] for i in (0, 1))


def test_a_better_request_evicts_a_worse_one_of_the_other_front_end(
    pair: Server, lines: Any
) -> None:
    better, worse, other = lines(0), lines(1), lines(1)
    running = [lines(i % 2).begin() for i in range(2 * RUN_SLOTS)]
    worse.send("/v1/completions", prompt="Hi", max_tokens=4, priority=5)
    other.send("/v1/completions", prompt="Hi", max_tokens=4, priority=1)
    until(lambda: num_waiting(pair) == QUEUED, "a full queue")
    assert pair.words("http", 1)["worst_waiting"] == 5 + 2**31 + 1
    evicted = pair.words("http", 1)["num_refused_evicted"]
    better.send("/v1/completions", prompt="Hi", max_tokens=4, priority=0)
    status, answer, headers = worse.receive()
    assert (status, answer["error"]["code"]) == (503, "queue_full"), answer
    assert "higher priority" in answer["error"]["message"] and int(headers["Retry-After"]) > 0
    assert pair.words("http", 1)["num_refused_evicted"] == evicted + 1
    # The next in line is not worse than this one, and stays.
    status, answer, _ = _on(worse, priority=1)
    assert status == 503 and "higher priority" not in answer["error"]["message"]
    for stream in running:
        pair.post("/abort_request", {"rid": stream.id})
    assert better.receive()[0] == other.receive()[0] == 200


def _on(line: Line, **fields: Any) -> tuple[int, Any, Any]:
    return line.ask("/v1/completions", **{"prompt": "Hi", "max_tokens": 4} | fields)


def test_any_front_end_aborts_by_any_id(pair: Server, lines: Any) -> None:
    asker = lines(0)
    for front in (0, 1):
        line = lines(front)
        stream = line.begin()
        assert asker.ask("/abort_request", rid=stream.id)[1] == {"num_aborted": 1}
        assert stream.rest() in ("done", "error")
        line.send(
            "/v1/completions",
            {"X-Request-Id": f"mine-{front}"},
            prompt="Hi",
            stream=True,
            max_tokens=400,
        )
        stream = Running(line)
        assert asker.ask("/abort_request", rid=f"mine-{front}")[1] == {"num_aborted": 1}
        assert stream.rest() in ("done", "error")
    streams = [lines(front).begin() for front in (0, 1)]
    assert asker.ask("/abort_request", abort_all=True)[1] == {"num_aborted": 2}
    assert [stream.rest() in ("done", "error") for stream in streams] == [True, True]
    assert asker.ask("/abort_request", rid="cmpl-0123456789abcdef")[1] == {"num_aborted": 0}


def test_a_rank_pins_a_request_to_its_worker(pair: Server, lines: Any) -> None:
    line = lines(0)

    def admitted() -> list[int]:
        return [pair.words("worker", i)["num_admitted"] for i in (0, 1)]

    pair.wait_idle()  # what others asked for is counted
    before = admitted()
    for _ in range(3):
        assert _on(line, data_parallel_rank=1)[0] == 200
    status, _, _ = line.ask(
        "/v1/chat/completions",
        {"X-data-parallel-rank": "1"},
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
    )
    assert status == 200
    sampling = {"max_new_tokens": 2}
    status, _, _ = line.ask("/generate", text="Hi", sampling_params=sampling, data_parallel_rank=1)
    assert status == 200
    after = admitted()
    assert (after[0] - before[0], after[1] - before[1]) == (0, 5)
    status, answer, _ = _on(line, data_parallel_rank=2)
    assert status == 400 and answer["error"]["param"] == "data_parallel_rank"


def test_each_worker_has_an_entry_in_the_loads_of_each_front_end(pair: Server, lines: Any) -> None:
    for front in (0, 1):
        line = lines(front)
        told = line.ask("/v1/loads")[1]
        assert told["dp_rank_count"] == 2
        assert [entry["dp_rank"] for entry in told["loads"]] == [0, 1]
        assert [entry["dp_rank"] for entry in line.ask("/get_load")[1]] == [0, 1]
        told = line.ask("/server_info")[1]
        assert (told["dp_size"], told["num_http_processes"]) == (2, 2)
        metrics = line.ask("/metrics")[1].decode()
        for process in ("http0", "http1", "worker0", "worker1"):
            assert f'shmserve_process_id{{process="{process}"}}' in metrics


def test_conversations_stay_with_their_worker(pair: Server, lines: Any) -> None:
    line = lines(0)
    before = pair.words("http", 0)["num_routed_by_prefix"]
    words = [f"story {i} " * 40 for i in range(4)]
    for _ in range(3):
        for word in words:
            assert _on(line, prompt=word)[0] == 200
    assert pair.words("http", 0)["num_routed_by_prefix"] - before >= 8
    hits = [pair.words("worker", i)["prefix_hit_tokens"] for i in (0, 1)]
    assert all(hits), "both have some of them"


def test_a_worker_that_dies_takes_only_its_own_requests(pair: Server, lines: Any) -> None:
    """And a pinned request to it is refused meanwhile, while others are served."""
    free = lines(0)
    ready = {(front, rank): lines(front) for front in (0, 1) for rank in (0, 1)}
    streams = {
        (front, rank): line.begin(data_parallel_rank=rank, max_tokens=FOREVER if rank else 60)
        for (front, rank), line in ready.items()
    }
    os.kill(_pid(pair, "worker", 1), signal.SIGKILL)
    assert [streams[front, 1].rest() for front in (0, 1)] == ["error", "error"]
    status, answer, headers = _on(free, data_parallel_rank=1)
    assert (status, answer["error"]["code"]) == (503, "no_worker") and headers["Retry-After"]
    assert _on(free)[0] == 200 and free.ask("/health")[0] == 200
    assert [streams[front, 0].rest() for front in (0, 1)] == ["done", "done"]
    until(lambda: _on(free, data_parallel_rank=1)[0] == 200, "worker 1 again")


def test_a_front_end_that_dies_breaks_only_its_own_connections(pair: Server, lines: Any) -> None:
    asker, (own, others) = lines(1), [[lines(front) for _ in range(2)] for front in (0, 1)]
    own = [line.begin(max_tokens=FOREVER) for line in own]
    others = [line.begin(max_tokens=60) for line in others]
    os.kill(_pid(pair, "http", 0), signal.SIGKILL)
    assert [stream.rest() for stream in own] == ["broken"] * 2
    assert [stream.rest() for stream in others] == ["done"] * 2
    until(lambda: asker.ask("/load")[1] == {"server_load": 0}, "nobody counts with what it held")
    # The port answers: who comes to the dead one's socket waits for the next one.
    assert all(pair.complete(max_tokens=1) for _ in range(8))


def test_each_worker_logs_to_a_file_of_its_own(
    pair: Server, lines: Any, emission_log: Path
) -> None:
    line = lines(0)
    ids = [_on(line, data_parallel_rank=rank)[1]["id"][-16:] for rank in (0, 1)]
    paths = [Path(f"{emission_log}.{rank}") for rank in (0, 1)]
    until(lambda: all(ids[i] in paths[i].read_text() for i in (0, 1)), "both in their files")
    assert ids[0] not in paths[1].read_text() and not emission_log.exists()


def test_a_drain_lets_the_requests_of_both_front_ends_end(pair: Server, lines: Any) -> None:
    """The last test: the server ends with it."""
    askers = [lines(front) for front in (0, 1)]
    ready = [lines(front) for front in (0, 1)]
    streams = [line.begin(max_tokens=150) for line in ready]
    pair.process.send_signal(signal.SIGTERM)
    for asker in askers:
        until(lambda line=asker: line.ask("/health")[0] == 503, "draining")
        status, answer, headers = _on(asker)
        assert (status, answer["error"]["code"]) == (503, "draining") and headers["Retry-After"]
    assert [stream.rest() for stream in streams] == ["done", "done"]
    assert pair.process.wait(PATIENCE_S) == 0
    assert "0 requests were cut" in pair.output()


def _pid(server: Server, role: str, index: int) -> int:
    found = re.findall(rf"{role} {index}(?: is ready)? \(?(?:pid )?(\d+)", server.output())
    return int(found[-1])
