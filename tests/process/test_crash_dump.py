"""A worker dies while it serves: what its rings held is a file, which says who was in flight and how far, to the token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strange_worker import SEEDS

from shmserve.dump import requests_of
from shmserve.recording import take

pytestmark = pytest.mark.usefixtures("default_model")
NUM_STREAMS = 32
WORKER = {"runner": "simulated", "step_ms": 10.0, "max_num_seqs": NUM_STREAMS}


def shmserve(server: Any, *args: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "shmserve", *args],
        env=server.environ,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def dump_of(server: Any, until: Any, number: int = 1) -> Path:
    """The number-th dump that the server said it has written."""
    mark = "shmserve dump "
    until(lambda: server.output().count(mark) >= number, "the word of a dump")
    lines = [line for line in server.output().splitlines() if mark in line]
    return Path(lines[number - 1].rpartition(mark)[2])


def read(server: Any, path: Path, *args: str) -> dict[str, Any]:
    dump: dict[str, Any] = json.loads(shmserve(server, "dump", str(path), "--json", *args))
    return dump


def last_indices(events: list[str]) -> tuple[str, int, bool]:
    """(id, index of the last token that came, whether it ended in an error) of one stream's events."""
    name, num_tokens = "", 0
    for text in events:
        event = json.loads(text)
        if "error" in event:
            return name, num_tokens - 1, True
        name = event["id"].removeprefix("cmpl-")
        num_tokens = event["usage"]["completion_tokens"]
    return name, num_tokens - 1, False


@pytest.mark.slow
def test_worker_killed_in_decode_leaves_a_dump_of_every_request_to_its_last_token(
    start: Callable[..., Any], client: Any, until: Any, tmp_path: Path
) -> None:
    server = start(strange=str(tmp_path), config={"worker": WORKER})
    server.wait_ready()
    (worker,) = server.pids("worker")
    api = client(server)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streams = [
        api.stream(max_tokens=5_000, ignore_eos=True, stream_options=options, prompt="A secret")
        for _ in range(NUM_STREAMS)
    ]
    first = [stream.wait_first() for stream in streams]
    live = {f"{state.req_id:016x}" for state in requests_of(take(server.name)).in_flight}
    os.kill(worker, signal.SIGKILL)
    path = dump_of(server, until)
    dump = read(server, path)
    got = {}
    for stream, event in zip(streams, first, strict=True):
        name, index, has_failed = last_indices(
            [event, *(text for text in stream.rest() if text != "[DONE]")]
        )
        assert has_failed
        got[name] = index
    in_flight = {request["id"]: request for request in dump["in_flight"]}
    assert in_flight.keys() == got.keys() == live
    assert len(got) == NUM_STREAMS and dump["in_flight_is_exact"]
    # A batch that was published and not announced was never read: one step more.
    ahead = {in_flight[name]["last_index"] - index for name, index in got.items()}
    assert ahead in ({0}, {1})
    assert {request["state"] for request in dump["in_flight"]} == {"decoding"}
    assert dump["death"]["pid"] == worker
    assert dump["death"]["reason"] == "killed by SIGKILL"
    tokens = next(ring for ring in dump["rings"] if ring["kind"] == "tokens")
    assert not tokens["has_producer"]
    assert path.parent == Path(server.environ["XDG_STATE_HOME"]) / "shmserve" / server.name
    text = shmserve(server, "dump", str(path), "--text")
    assert f"{NUM_STREAMS} requests in flight" in text
    assert "A secret" not in text  # of what clients sent nothing is written down
    until(lambda: api.get("/ready").status == 200, "ready again")
    assert requests_of(take(server.name)).in_flight == ()


@pytest.mark.slow
def test_death_inside_a_publish_is_shown_as_torn(
    start: Callable[..., Any], client: Any, until: Any, tmp_path: Path
) -> None:
    server = start(strange=str(tmp_path), config={"worker": WORKER})
    server.wait_ready()
    api = client(server)
    others = [api.stream(max_tokens=5_000, ignore_eos=True) for _ in range(3)]
    for stream in others:
        stream.wait_first()
    deadly = api.stream(max_tokens=50, ignore_eos=True, seed=SEEDS["dies_inside_a_publish"])
    dump = read(server, dump_of(server, until))
    for stream in (*others, deadly):
        assert "error" in json.loads([text for text in stream.rest() if text != "[DONE]"][-1])
    tokens = next(ring for ring in dump["rings"] if ring["kind"] == "tokens")
    claimed = range(tokens["write_cursor"], tokens["claim_cursor"])
    assert len(claimed) == 4  # a slot for each of the four that decode
    assert [claim["cursor"] for claim in tokens["claimed"]] == list(claimed)
    assert all(claim["is_torn"] for claim in tokens["claimed"])
    assert tokens["records"][-1]["cursor"] == claimed[0] - 1
    assert "4 slots TORN" in shmserve(server, "dump", str(dump_of(server, until)))


@pytest.mark.slow
def test_dump_that_cannot_be_written_is_one_warning_and_the_worker_comes_back(
    start: Callable[..., Any], client: Any, until: Any, environ: dict[str, str], tmp_path: Path
) -> None:
    Path(environ["XDG_STATE_HOME"]).touch()  # a file where a directory should be
    server = start(strange=str(tmp_path), config={"worker": WORKER})
    server.wait_ready()
    os.kill(server.pids("worker")[0], signal.SIGKILL)
    until(lambda: "no crash dump of worker 0" in server.output(), "the warning")
    until(lambda: client(server).get("/ready").status == 200, "ready again")
    assert server.output().count("crash dump") == 1
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_no_crash_dump_writes_none(serve: Callable[..., Any], client: Any, until: Any) -> None:
    server = serve("--no-crash-dump")
    server.wait_ready()
    os.kill(server.pids("worker")[0], signal.SIGKILL)
    until(lambda: "worker 0 is ready" in server.output(), "the successor")
    assert not Path(server.environ["XDG_STATE_HOME"]).exists()


@pytest.mark.slow
def test_what_a_killed_instance_left_can_be_read_until_the_next_start(
    serve: Callable[..., Any], client: Any, until: Any
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    stream = client(server).stream(max_tokens=5_000, ignore_eos=True)
    name = json.loads(stream.wait_first())["id"].removeprefix("cmpl-")
    for pid in (server.pid, *server.pids()):
        os.kill(pid, signal.SIGSTOP)  # nobody tidies up
    pids = [
        server.pid,
        *(
            int(p)
            for p in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        ),
    ]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.wait()
    dump = json.loads(shmserve(server, "dump", "--json", "--instance", server.name))
    assert [request["id"] for request in dump["in_flight"]] == [name]
    assert not any(ring["has_producer"] or ring["has_consumer"] for ring in dump["rings"])
    shmserve(server, "sweep")
    with pytest.raises(subprocess.CalledProcessError):
        shmserve(server, "dump", "--instance", server.name)


@pytest.mark.slow
def test_front_end_killed_leaves_a_dump_too(
    serve: Callable[..., Any], client: Any, until: Any
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    stream = client(server).stream(max_tokens=5_000, ignore_eos=True)
    name = json.loads(stream.wait_first())["id"].removeprefix("cmpl-")
    (front_end,) = server.pids("http")
    os.kill(front_end, signal.SIGKILL)
    dump = read(server, dump_of(server, until))
    assert dump["death"]["role"] == "http"
    assert [request["id"] for request in dump["in_flight"]] == [name]
