"""Real servers for the tests, and clients that see every byte.

`Server` is `python -m shmserve start` as a process of its own; at its end nothing of it may be left. `Asker` asks it with the
standard library, one connection a request; `Wire` is a bare socket for what no polite client does.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mortal
from prometheus_client.parser import text_string_to_metric_families

import shmserve
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import boards_of
from shmserve.rings.segment import names

ROOT = str(Path(shmserve.__file__).parents[1])
PATIENCE_S = 30.0
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails after a long patience, which is no bar."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    headers: Mapping[str, str]  # by lower-case name
    body: bytes

    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON: {self.body!r}")

        return json.loads(self.body, parse_constant=refuse)

    def error(self) -> dict[str, Any]:
        """The error object of a refusal, its shape checked."""
        assert self.status >= 400, self
        assert self.headers["content-type"].startswith("application/json"), self
        whole = self.json()
        assert list(whole) == ["error"], whole
        error: dict[str, Any] = whole["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and error["message"]
        assert isinstance(error["type"], str) and error["type"]
        assert error["param"] is None or isinstance(error["param"], str)
        assert "Traceback" not in error["message"]
        return error


class Stream:
    """One SSE response, read event by event. `raw` is what came so far, without the chunk framing."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.response = connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.headers["Content-Type"].startswith("text/event-stream")
        self.raw = b""
        self.comments = 0

    def events(self) -> Iterator[str]:
        """The data of every event up to the body's end, [DONE] included."""
        while line := self.response.readline():
            self.raw += line
            if line.startswith(b":"):
                self.comments += 1
            elif line.startswith(b"data: "):
                yield line[6:-1].decode()
            else:
                assert line == b"\n" or line.startswith(b"event: "), line

    def objects(self) -> list[dict[str, Any]]:
        """Every event but [DONE], which must be the last, and there only once; then the body ends."""
        try:
            data = list(self.events())
        finally:
            self.leave()
        assert data and data[-1] == "[DONE]" and data.count("[DONE]") == 1, data[-3:]
        return [json.loads(text) for text in data[:-1]]

    def take(self, count: int) -> list[str]:
        events = self.events()
        return [next(events) for _ in range(count)]

    def leave(self) -> None:
        """Close the connection, read or not."""
        self.response.close()
        self._connection.close()


class Wire:
    """A bare connection."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(("127.0.0.1", port))

    def send(
        self, path: str, body: Any = None, *, version: str = "1.1", method: str = "POST"
    ) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self.sock.sendall(head.encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            more = self.sock.recv(65536)
            assert more, f"closed before {mark!r}: {data[-300:]!r}"
            data += more
        return data

    def read_all(self) -> bytes:
        """To the end of the connection; a reset counts as one."""
        data = b""
        while True:
            try:
                more = self.sock.recv(1 << 20)
            except ConnectionResetError:
                return data
            if not more:
                return data
            data += more

    def close(self) -> None:
        self.sock.close()


class Asker:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            all_headers = {"Content-Type": "application/json"} | dict(headers or {})
            connection.request(method, path, data, all_headers)
            response = connection.getresponse()
            lower = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, lower, response.read())
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Answer:
        return self.request("POST", path, body)

    def complete(self, **fields: Any) -> Any:
        """The JSON of a plain completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": "Hi"} | fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def text(self, **fields: Any) -> str:
        text: str = self.complete(**fields)["choices"][0]["text"]
        return text

    def stream(
        self, path: str = "/v1/completions", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Stream:
        connection = self.connect()
        body = {"stream": True} | fields
        if path == "/v1/completions":
            body = {"prompt": "Hi"} | body
        connection.request("POST", path, json.dumps(body).encode(), dict(headers or {}))
        return Stream(connection)

    def metrics(self) -> dict[tuple[str, str], float]:
        """(sample name, its one label's value) -> value, of a text that must parse."""
        answer = self.get("/metrics")
        assert answer.status == 200
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                labels = [v for k, v in sample.labels.items() if k != "le"]
                found[sample.name, labels[0] if labels else ""] = sample.value
        return found


class Server(Asker):
    """A server process. Use `stop` at the end: it checks that it ended well and left nothing."""

    def __init__(
        self, folder: Path, name: str, *flags: str, stderr: int = subprocess.STDOUT
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / "log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ |= {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        environ |= {"PYTHONPATH": ROOT}
        argv = [sys.executable, "-m", "shmserve", "start", f"--instance={name}", "--port=0", *flags]
        with open(self.log, "wb") as log:
            self.process = mortal.start(
                argv, env=environ, stdout=log, stderr=stderr, start_new_session=True
            )
        super().__init__(0)

    def wait_ready(self, patience_s: float = PATIENCE_S) -> Server:
        def ready() -> re.Match[str] | None:
            assert self.process.poll() is None, self.output()
            return re.search(r"ready: http://[^:]+:(\d+) .*worker 0 (\d+)[,)]", self.output())

        match = until(ready, "the line that says ready", patience_s)
        self.port = int(match[1])
        self.worker_pid = int(match[2])
        return self

    def output(self) -> str:
        return self.log.read_text()

    def words(self, role: str, index: int = 0) -> dict[str, int]:
        """The words of the board of this child, read from shared memory."""
        for name in boards_of(self.name):
            if f".{role}{index}." in name:
                reader = BoardReader.attach(name)
                try:
                    return reader.words()
                finally:
                    reader.close()
        raise AssertionError(f"{self.name} has no board of {role}")

    def is_idle(self) -> bool:
        worker = self.words("worker")
        busy = ("running", "waiting", "paused", "kv_blocks_used")
        return not any(worker[word] for word in busy) and not self.words("http")["in_flight"]

    def wait_idle(self) -> None:
        """Every sequence and every block is free, and the front end's table is empty."""
        until(self.is_idle, f"idle: {self.words('worker')} {self.words('http')}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(PATIENCE_S)
        assert self.process.returncode == 0, self.output()
        assert names(f"shmserve.{self.name}.") == []
        assert "Traceback" not in self.output(), self.output()


@dataclass(frozen=True)
class Told:
    """One completion as a client is told of it, and the deltas that it came in (one if it came whole)."""

    text: str
    finish: str
    matched: Any
    num_tokens: int
    deltas: tuple[str, ...] = field(default=(), compare=False)


def native_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of /v1/completions as /generate has them."""
    renamed = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
    renamed |= {"include_stop_str_in_output": "no_stop_trim"}
    return {renamed.get(name, name): value for name, value in fields.items()}


def _native(answer: dict[str, Any], deltas: Sequence[str]) -> Told:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    return Told(
        "".join(deltas),
        finish["type"],
        finish.get("matched"),
        meta["completion_tokens"],
        tuple(deltas),
    )


def _streamed(objects: Sequence[dict[str, Any]], kind: str) -> Told:
    *chunks, last = objects
    assert last["choices"] == []
    deltas, end = [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert end is None, "something came behind the finishing event"
        deltas.append(choice["delta"].get("content", "") if kind == "chat" else choice["text"])
        if choice["finish_reason"] is not None:
            end = choice
    assert end is not None, objects
    count = last["usage"]["completion_tokens"]
    return Told("".join(deltas), end["finish_reason"], end["matched_stop"], count, tuple(deltas))


def every_way(asker: Asker, **fields: Any) -> Told:
    """One completion asked for in all seven ways, which must tell the same; the Told of the completions stream.

    `fields` are those of /v1/completions; they must fix the tokens (by a script's seed or a forcing bias).
    """
    fields = {"prompt": "Hi"} | fields
    whole = asker.complete(**fields)
    (choice,) = whole["choices"]
    plain = Told(
        choice["text"],
        choice["finish_reason"],
        choice["matched_stop"],
        whole["usage"]["completion_tokens"],
    )
    usage = {"stream_options": {"include_usage": True}}
    streamed = _streamed(asker.stream(**fields, **usage).objects(), "completion")

    chat = {k: v for k, v in fields.items() if k != "prompt"}
    chat["messages"] = [{"role": "user", "content": "Hi"}]
    answer = asker.post("/v1/chat/completions", chat)
    assert answer.status == 200, answer.body
    (choice,) = answer.json()["choices"]
    chat_plain = Told(
        choice["message"]["content"],
        choice["finish_reason"],
        choice["matched_stop"],
        answer.json()["usage"]["completion_tokens"],
    )
    chat_streamed = _streamed(
        asker.stream("/v1/chat/completions", **chat, **usage).objects(), "chat"
    )

    sampling = {k: v for k, v in native_fields(fields).items() if k != "prompt"}
    native = {"text": fields["prompt"], "sampling_params": sampling}
    answer = asker.post("/generate", native)
    assert answer.status == 200, answer.body
    native_plain = _native(answer.json(), [answer.json()["text"]])
    frames = asker.stream("/generate", **native).objects()
    texts = ["", *[frame["text"] for frame in frames]]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before), "a cumulative text took something back"
    deltas = [b.removeprefix(a) for a, b in itertools.pairwise(texts)]
    cumulative = _native(frames[-1], deltas)
    frames = asker.stream("/generate", **native, incremental=True).objects()
    ids = [token_id for frame in frames for token_id in frame["output_ids"]]
    incremental = _native({**frames[-1], "output_ids": ids}, [frame["text"] for frame in frames])
    for told in (streamed, chat_plain, chat_streamed, native_plain, cumulative, incremental):
        assert told == plain, (told, plain)
    return streamed
