"""Clients for tests of deaths: they send, wait for what they must, and say how it ended."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

PATIENCE_S = 30.0


class Ask:
    """One streamed completion on a connection of its own. The request is out when this returns; nothing is read yet."""

    def __init__(self, port: int, receive_buffer: int = 0, **fields: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        if receive_buffer:
            sock = self._connection.sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.settimeout(PATIENCE_S)
            sock.connect(("127.0.0.1", port))
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True} | fields
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._response: http.client.HTTPResponse | None = None

    def wait_first(self) -> None:
        """Read the first event: from here on the request decodes."""
        response = self._response = self._connection.getresponse()
        assert response.status == 200, response.read()
        while not response.readline().startswith(b"data: "):
            continue

    def outcome(self) -> str:
        """Read to the end: "done", "error" (well-formed: JSON, and a body that ends as it must), or "broken"."""
        try:
            response = self._response or self._connection.getresponse()
            body = response.read()  # raises if the body is cut short
        except (ConnectionError, http.client.HTTPException):
            return "broken"
        finally:
            self._connection.close()
        if response.status != 200:
            assert "message" in json.loads(body)["error"], body
            if response.status == 503:
                assert int(response.headers["Retry-After"]) > 0
            return "error"
        events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
        last = json.loads(next(e for e in reversed(events) if e != b"[DONE]"))
        if "error" in last:
            assert set(last["error"]) >= {"message", "type", "code"}, last
            return "error"
        assert events[-1] == b"[DONE]", body[-300:]
        assert last["choices"][0]["finish_reason"] == "length", last
        return "done"

    def leave(self) -> None:
        """Close the connection, whatever was read."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def status_of(port: int, path: str) -> tuple[int, str]:
    """(status, Retry-After) of a GET; (0, "") if the connection broke before an answer. Being refused is an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.connect()
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status, response.headers.get("Retry-After", "")
    except (ConnectionError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def metric(port: int, start: str) -> float:
    """The value of the one sample whose line begins so."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(start)]
    return float(value)
