"""What /debug/stream says of boards and rings, to how many, and what it costs when nobody listens: nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import Asker, Server, Stream, Wire, until

from shmserve.http.debug_stream import LOOKS_PER_SAMPLE, MOST_LISTENERS


class Listening:
    """One listener: its constants, and then its samples."""

    def __init__(self, asker: Asker) -> None:
        connection = asker.connect()
        connection.request("GET", "/debug/stream")
        self.stream = Stream(connection)
        self._events = self.stream.events()
        self.hello: dict[str, Any] = json.loads(next(self._events))

    def sample(self) -> dict[str, Any]:
        sample: dict[str, Any] = json.loads(next(self._events))
        return sample

    def sample_where(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        for _ in range(100):
            if condition(sample := self.sample()):
                return sample
        raise AssertionError(f"none of 100 samples, the last {sample}")


@pytest.fixture
def listen(server: Server) -> Iterator[Callable[[], Listening]]:
    opened: list[Listening] = []

    def one() -> Listening:
        opened.append(Listening(server))
        return opened[-1]

    yield one
    for each in opened:
        each.stream.leave()
    until(lambda: not server.words("http")["debug_listeners"], "no listener")


def of(sample: dict[str, Any], role: str) -> dict[str, Any]:
    (process,) = [each for each in sample["processes"] if each["role"] == role]
    return process


def test_hello_tells_what_does_not_change(listen: Callable[[], Listening]) -> None:
    listening = listen()
    hello = listening.hello
    assert hello["policies"] == {"token": "coalesce", "submit": "block", "slow_client": "coalesce"}
    assert (hello["num_http"], hello["num_workers"]) == (1, 1)
    assert hello["limits"]["slow_client_bytes"] == 16384
    histograms = {**of(listening.sample(), "http")["histograms"]}
    for name, reading in histograms.items():
        assert len(reading["counts"]) == len(hello["bounds_us"][name]) + 1


def test_samples_show_the_boards_and_rings_of_all_processes(
    asker: Asker, listen: Callable[[], Listening]
) -> None:
    listening = listen()
    first = listening.sample()
    asker.complete(max_tokens=20, ignore_eos=True)
    generated = of(first, "worker")["words"]["generation_tokens"] + 20

    def is_later(sample: dict[str, Any]) -> bool:
        is_counted = of(sample, "worker")["words"]["generation_tokens"] >= generated
        return is_counted and not any(ring["num_torn"] for ring in sample["rings"])

    later = listening.sample_where(is_later)
    assert later["time_ms"] > first["time_ms"]
    assert {each["role"] for each in later["processes"]} == {"http", "supervisor", "worker"}
    rings = {ring["kind"]: ring for ring in later["rings"]}
    assert rings.keys() == {"submit", "tokens"}
    for ring in rings.values():
        assert ring["has_producer"] and ring["has_consumer"] and ring["num_torn"] == 0
        assert len(ring["depths"]) == LOOKS_PER_SAMPLE
        assert all(0 <= depth <= ring["capacity"] for depth in ring["depths"])
    before = next(ring for ring in first["rings"] if ring["kind"] == "tokens")
    assert rings["tokens"]["write_cursor"] >= before["write_cursor"] + 20
    assert later["here"]["workers"][0]["state"] == "ready"


def test_who_asks_for_its_head_alone_is_told_that_there_is_none(server: Server) -> None:
    """A stream would follow, and never end."""
    answer = server.request("HEAD", "/debug/stream")
    assert (answer.status, answer.body, answer.headers["allow"]) == (405, b"", "GET")


def test_one_listener_too_many_is_refused_and_all_others_are_served_by_one_thread(
    server: Server, listen: Callable[[], Listening]
) -> None:
    tasks = f"/proc/{server.words('http')['pid']}/task"
    listeners = [listen()]
    listeners[0].sample()  # later than the end of an earlier test's thread
    num_threads = len(os.listdir(tasks)) - 1
    listeners += [listen() for _ in range(MOST_LISTENERS - 1)]
    assert server.words("http")["debug_listeners"] == MOST_LISTENERS
    assert len(os.listdir(tasks)) == num_threads + 1
    refused = server.get("/debug/stream")
    assert (refused.status, refused.error()["code"]) == (503, "too_many_listeners")
    assert f"the limit is {MOST_LISTENERS}" in refused.error()["message"]
    assert int(refused.headers["retry-after"]) > 0
    told = [each.sample() for each in listeners[:3]]
    for _ in range(100):
        behind = min(range(3), key=lambda i: told[i]["time_ms"])
        if told[behind]["time_ms"] == max(one["time_ms"] for one in told):
            break
        told[behind] = listeners[behind].sample()  # it has listened for longer
    assert told[0] == told[1] == told[2], "the same reader's"
    for each in listeners:
        each.stream.leave()
    until(lambda: len(os.listdir(tasks)) == num_threads, "the thread ends with the last listener")
    assert listen().sample()["here"]["listeners"] == 1


@pytest.mark.slow
def test_end_of_the_server_ends_the_stream_well(start_server: Callable[..., Server]) -> None:
    server = start_server()
    wire = Wire(server.port)
    wire.send("/debug/stream", method="GET")
    wire.read_until(b'"here"')
    server.stop()
    assert wire.read_all().endswith(b"0\r\n\r\n")
    wire.close()


@pytest.mark.slow
def test_listener_that_does_not_read_misses_samples_and_is_cut_in_the_end(
    start_server: Callable[..., Server],
) -> None:
    server = start_server("--slow-client-seconds=2")
    wire = Wire(server.port, receive_buffer=2048)
    wire.send("/debug/stream", method="GET")
    until(lambda: server.words("http")["num_debug_skipped"], "a sample that was replaced")
    until(lambda: not server.words("http")["debug_listeners"], "the end of the listener")
    assert server.get("/live").status == 200
    wire.close()
