"""Who answers before there is a front end: the truth, in bounded time and number, and nobody is lost at the end."""

from __future__ import annotations

import http.client
import json
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shmserve import lobby as lobby_module
from shmserve.http.errors import ApiError
from shmserve.lobby import MOST_CONNECTIONS, Lobby


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(256)
        sock.setblocking(False)
        yield sock


@pytest.fixture
def lobby(listener: socket.socket) -> Iterator[Lobby]:
    with Lobby([listener, listener]) as it:
        it.tell("fetching m.gguf", 0.25)
        yield it


def ask(
    listener: socket.socket, method: str, path: str, body: bytes = b""
) -> tuple[int, dict, bytes]:  # type: ignore[type-arg]
    connection = http.client.HTTPConnection(*listener.getsockname(), timeout=30)
    connection.request(method, path, body or None)
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


def test_live_is_200_and_ready_says_how_far_it_is(listener: socket.socket, lobby: Lobby) -> None:
    assert ask(listener, "GET", "/live")[0] == 200
    for path in ("/ready", "/health?verbose=1"):
        status, headers, body = ask(listener, "GET", path)
        assert (status, headers["Retry-After"]) == (503, "1")
        news = json.loads(body)
        assert (news["status"], news["phase"], news["fraction"]) == (
            "preparing",
            "fetching m.gguf",
            0.25,
        )
    lobby.tell("hashing", None)
    assert json.loads(ask(listener, "GET", "/ready")[2])["phase"] == "hashing"


def test_request_gets_503_in_the_shape_that_front_ends_use(
    listener: socket.socket, lobby: Lobby
) -> None:
    status, headers, body = ask(listener, "POST", "/v1/completions", b'{"prompt": "x"}' * 10_000)
    assert (status, headers["Retry-After"]) == (503, "1")
    error = json.loads(body)["error"]
    assert error.keys() == ApiError(503, "x").body()["error"].keys()
    assert (error["code"], error["type"]) == ("loading", "server_error")
    assert "fetching m.gguf, 25%" in error["message"]


def test_head_has_no_body(listener: socket.socket, lobby: Lobby) -> None:
    assert ask(listener, "HEAD", "/ready")[::2] == (503, b"")


@pytest.mark.parametrize(
    "data", [b"\r\n\r\n", b"nonsense\r\n\r\n", b"\x16\x03\x01" * 9_000, b" " * 20_000]
)
def test_what_is_no_http_is_answered_and_harms_nobody(
    listener: socket.socket, lobby: Lobby, data: bytes
) -> None:
    with socket.create_connection(listener.getsockname(), 30) as client:
        client.sendall(data)
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert ask(listener, "GET", "/live")[0] == 200


def test_silent_clients_fill_the_lobby_only_for_a_while(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(lobby_module, "_TICK_S", 0.05)
    with Lobby([listener]):
        silent = [
            socket.create_connection(listener.getsockname(), 30)
            for _ in range(MOST_CONNECTIONS + 9)
        ]
        assert ask(listener, "GET", "/live")[0] == 200  # behind all of them
        for client in silent:
            assert client.recv(4096).startswith(b"HTTP/1.1 503 ")
            client.close()


def test_who_waits_in_the_backlog_at_the_end_is_left_for_the_front_end(
    listener: socket.socket,
) -> None:
    with Lobby([listener]):
        assert ask(listener, "GET", "/live")[0] == 200
    with socket.create_connection(listener.getsockname(), 30):
        listener.settimeout(30)
        connection, _ = listener.accept()
        connection.close()


def test_request_on_its_way_when_the_lobby_closes_is_answered_for_what_it_asks(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "_LAST_CALL_S", 20.0)
    with socket.create_connection(listener.getsockname(), 30) as client:
        lobby = Lobby([listener])
        with lobby:
            client.sendall(b"GET /li")
            while not lobby._visitors:
                time.sleep(0.001)
            client.sendall(b"ve HTTP/1.1\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert client.recv(4096) == b""


def test_lobby_with_nobody_in_it_sleeps(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[float | None] = []

    class Counting(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> Any:
            turns.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(lobby_module.selectors, "DefaultSelector", Counting)
    with Lobby([listener]):
        assert ask(listener, "GET", "/live")[0] == 200
        while turns[-1] is not None:  # until who asked has left
            time.sleep(0.001)
        before = len(turns)
        time.sleep(0.2)
        assert (len(turns) - before, turns[-1]) == (0, None)
        assert ask(listener, "GET", "/live")[0] == 200
