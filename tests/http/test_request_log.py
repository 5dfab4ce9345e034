"""The line of each request: what it says, that it says no more, and that nobody waits for whoever reads it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import threading

import numpy as np
import pytest
from serving import Server, until

from shmserve.http.interval_log import MOST_ROWS, IntervalLog
from shmserve.http.request_log import as_text


@pytest.mark.parametrize("step_ms", [0.05, 1.0, 4.48, 333.0, 9_000.0])
def test_quantiles_are_within_three_percent(step_ms) -> None:
    log = IntervalLog(8)
    row = log.take_row()
    times_ns = np.full(1000, step_ms * 1e6, np.int64)
    times_ns[-20:] *= 10 if step_ms < 1000 else 1
    log.observe(np.full(1000, row, np.int32), times_ns)
    p50, p99 = log.quantiles_ms(row, (0.5, 0.99))
    assert p50 == pytest.approx(step_ms, rel=0.03)
    assert p99 == pytest.approx(step_ms * (10 if step_ms < 1000 else 1), rel=0.03)


def test_times_out_of_all_bounds_are_counted_in_the_outermost_buckets() -> None:
    log = IntervalLog(8)
    row = log.take_row()
    log.observe(np.array([row] * 3, np.int32), np.array([-5, 0, 10**18], np.int64))
    p33, p100 = log.quantiles_ms(row, (0.33, 1.0))
    assert p33 == 0.0 and p100 > 16_000


def test_a_row_that_was_given_back_is_empty_and_the_last_is_nobodys() -> None:
    log = IntervalLog(8)
    rows = [log.take_row() for _ in range(MOST_ROWS)]
    assert rows[-1] == 0 and len(set(rows)) == MOST_ROWS
    log.observe_one(rows[0], 5_000_000, 2)
    log.observe_one(0, 5_000_000, 2)
    assert log.quantiles_ms(0, (0.5,)) is None
    assert log.quantiles_ms(rows[0], (0.5,)) == (0.0,)  # two of three came with another
    log.give_back(rows[0])
    assert log.take_row() == rows[0]
    assert log.quantiles_ms(rows[0], (0.5,)) is None


def test_values_that_could_be_taken_for_more_fields_are_quoted() -> None:
    told = as_text({"a": 'x y="z"', "b": "1\n2", "c": True, "d": 1.5, "e": "/v1/models/{name:.+}"})
    assert told == 'a="x y=\\"z\\"" b="1\\n2" c=true d=1.5 e=/v1/models/{name:.+}'
    assert "\n" not in told


@pytest.fixture(scope="module")
def json_server(start_server):
    """All that it says is JSON."""
    return start_server("--step-ms=2", "--log-format=json")


def lines_of(server: Server) -> list[dict]:
    whole, _, _ = server.output().rpartition("\n")  # the last one may be only half written
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def request_lines(server: Server) -> list[dict]:
    return [line for line in lines_of(server) if line["message"] == "request"]


def next_line(server: Server, ask) -> dict:
    before = len(request_lines(server))
    ask()
    until(lambda: len(request_lines(server)) > before, "its line")
    (line,) = request_lines(server)[before:]
    return line


def test_a_stream_is_told_with_its_tokens_and_times(json_server) -> None:
    def ask() -> None:
        headers = {"X-Request-Id": 'mine "1"'}
        json_server.stream(prompt="Hello world", max_tokens=300, headers=headers).objects()

    line = next_line(json_server, ask)
    assert re.fullmatch("[0-9a-f]{16}", line["id"])
    assert line["request_id"] == 'mine "1"'
    assert (line["endpoint"], line["status"], line["stream"]) == ("/v1/completions", 200, True)
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish"]) == (2, 300, "length")
    assert line["cached_tokens"] == 0
    assert 0 < line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
    assert 0 < line["itl_p50_ms"] <= line["itl_p99_ms"] <= line["e2e_ms"]
    assert line["itl_engine_ms"] >= 1.9  # --step-ms=2
    assert line["client"] == "127.0.0.1"
    assert (line["level"], line["process"]) == ("info", "http[0]")


def test_a_plain_answer_of_several_completions_is_one_line(json_server) -> None:
    line = next_line(json_server, lambda: json_server.complete(prompt="Hi", max_tokens=5, n=3))
    assert (line["n"], line["completion_tokens"], line["stream"]) == (3, 15, False)
    assert line["prompt_tokens"] == 1
    assert "itl_p50_ms" not in line


def test_slow_way_tokens_have_their_intervals(json_server) -> None:
    """A stop regex that never comes keeps the stream off the pump's direct way."""
    params = {"max_new_tokens": 300, "stop_regex": ["[0-9]{30}"]}
    body = {"text": "Hi", "sampling_params": params}
    line = next_line(json_server, lambda: json_server.stream("/generate", **body).objects())
    assert line["endpoint"] == "/generate"
    assert line["itl_p50_ms"] > 0


def test_a_refusal_is_told_with_its_code(json_server) -> None:
    line = next_line(json_server, lambda: json_server.post("/v1/completions", {"prompt": ""}))
    assert (line["status"], line["error"]) == (400, "empty_prompt")
    assert "id" not in line and "completion_tokens" not in line


def test_a_client_that_leaves_is_told_with_the_tokens_that_were_made(json_server) -> None:
    def ask() -> None:
        stream = json_server.stream(prompt="Hello", max_tokens=4000)
        stream.take(5)
        stream.leave()

    line = next_line(json_server, ask)
    assert (line["status"], line["finish"]) == (499, "abort")
    assert line["completion_tokens"] >= 5
    assert line["stream"] is True


def test_gets_have_no_line(json_server) -> None:
    before = len(request_lines(json_server))
    for path in ("/health", "/metrics", "/v1/models", "/nothing"):
        json_server.get(path)
    line = next_line(json_server, lambda: json_server.post("/nothing", {}))
    assert (line["endpoint"], line["status"]) == ("/nothing", 404)
    assert len(request_lines(json_server)) == before + 1


def test_no_line_holds_text_of_a_request(json_server) -> None:
    secret = "xyzzyplugh"
    for body in (
        {"prompt": f"tell {secret}", "max_tokens": 2, "user": secret},
        {"prompt": {secret: 1}},
    ):
        next_line(json_server, lambda body=body: json_server.post("/v1/completions", body))
    assert secret not in json_server.output()


def test_every_line_is_json_the_supervisors_too(json_server) -> None:
    lines = [line for line in json_server.output().splitlines() if "ready: http" not in line]
    told = [json.loads(line) for line in lines]
    assert all({"time", "level", "process", "message"} <= set(line) for line in told)


@pytest.mark.slow
def test_a_stderr_that_nobody_reads_holds_up_nobody(tmp_path, default_model) -> None:
    """A pipe of one page, full: front end and worker go on, a worker dies and the supervisor fills its place. Read again,
    everything that was said is there."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    flags = ("--runner=simulated", "--step-ms=1")
    server = Server(tmp_path, f"unread-{os.getpid()}", *flags, stderr=writer)
    os.close(writer)
    said = b""

    def read() -> None:
        nonlocal said
        while more := os.read(reader, 65_536):
            said += more

    thread = threading.Thread(target=read)
    try:
        server.wait_ready()
        for _ in range(40):
            server.complete(prompt="Hi", max_tokens=1)
        until(lambda: server.metrics()["shmserve_log_bytes", "http0"] > 4096, "lines wait")
        assert len(server.stream(prompt="Hi", max_tokens=20).objects()) >= 20
        os.kill(server.worker_pid, signal.SIGKILL)

        def is_back() -> bool:
            was_counted = server.words("supervisor")["worker_restarts_signal"] == 1
            return was_counted and server.metrics()["shmserve_workers_ready", ""] == 1

        until(is_back, "another worker")
        assert server.complete(prompt="Hi", max_tokens=1)
        assert server.metrics()["shmserve_log_lines_lost_total", "http0"] == 0
        thread.start()
        server.stop()
        thread.join()
    finally:
        if thread.is_alive() or not thread.ident:
            server.process.kill()
            thread.ident or thread.start()
            thread.join()
        os.close(reader)
    text = said.decode()
    assert text.count(" INFO http[0] request ") == 42
    assert "killed by SIGKILL" in text and "lost here" not in text


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--no-log-requests", "--log-level=warning"])
def test_who_does_not_want_the_lines_has_none(start_server, flag) -> None:
    server = start_server("--step-ms=1", flag)
    server.complete(prompt="Hi", max_tokens=1)
    server.stop()  # what waits for a heartbeat is said at the end
    assert " request " not in server.output()
