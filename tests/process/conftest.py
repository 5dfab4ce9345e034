"""Servers as real processes: started, asked, signalled, and at the end looked after: nothing may be left."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mortal
import pytest

from shmserve.instance_socket import InstanceError, ask, runtime_dir
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import boards_of
from shmserve.rings.segment import names

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # asking.py, strange_worker.py
    sys.path.insert(0, HERE)

DRIVER = str(Path(__file__).with_name("run_supervisor.py"))
PATIENCE_S = 30.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "process" in Path(item.path).parts:
            item.add_marker(pytest.mark.process)


def _until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails after a long patience, which is no bar."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if value := condition():
                return value
        except InstanceError:  # its socket is a file before anybody answers on it
            value = None
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


@pytest.fixture
def until() -> Callable[..., Any]:
    """until(condition, what): waits for it, and gives its first true value."""
    return _until


@pytest.fixture
def words_of() -> Callable[[Server, str], dict[str, int]]:
    """words_of(server, role): the words of the board of its child number 0 of this role, as it lives now."""

    def read(server: Server, role: str) -> dict[str, int]:
        (name,) = [n for n in boards_of(server.name) if f".{role}0." in n]
        reader = BoardReader.attach(name)
        try:
            return reader.words()
        finally:
            reader.close()

    return read


@pytest.fixture
def is_alive() -> Callable[[int], bool]:
    """True of a process that runs. A zombie does not: an orphan's waits for whoever adopted it."""

    def check(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    return check


class Server:
    """One started supervisor: its process, and what can be asked of it."""

    def __init__(
        self, argv: list[str], environ: Mapping[str, str], name: str, pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.environ = environ
        self.log = Path(environ["XDG_RUNTIME_DIR"]) / f"log-{time.monotonic_ns()}"
        with open(self.log, "wb") as log:
            self.process = mortal.start(
                argv,
                env=dict(environ),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        self.pid = self.process.pid

    def output(self) -> str:
        return self.log.read_text()

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return ask(runtime_dir(self.environ), self.name, {"type": "status"}, timeout_s)

    def wait_ready(self) -> dict[str, Any]:
        _until(
            lambda: "shmserve: ready:" in self.output() or self.process.poll() is not None,
            "the line that says ready",
        )
        assert self.process.poll() is None, self.output()
        return self.status()

    def wait(self) -> int:
        """The exit code; one that tells of a fault shows the output."""
        code = self.process.wait(PATIENCE_S)
        if code == 1:
            print(self.output())
        return code

    def end_twice(self) -> None:
        """SIGTERM, and again 50 ms later. To a supervisor that stood still meanwhile both are one: then once more."""
        self.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)

    def pids(self, role: str = "") -> list[int]:
        return [c["pid"] for c in self.status()["children"] if c["role"].startswith(role)]

    def child(self, role: str) -> dict[str, Any]:
        return next(c for c in self.status()["children"] if c["role"] == role)

    def port(self) -> int:
        return int(self.status()["url"].rpartition(":")[2])

    def told(self) -> dict[str, Any]:
        """What the fake front end was told so far."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=PATIENCE_S)
        connection.request("GET", "/")
        body: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return body

    def segments(self) -> list[str]:
        return names(f"shmserve.{self.name}.")

    def leftovers(self) -> list[str]:
        """Segments and files of the instance that are still there."""
        folder = Path(self.environ["XDG_RUNTIME_DIR"]) / "shmserve"
        files = [str(p) for p in folder.glob("*")] if folder.exists() else []
        return self.segments() + files


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a runtime and a state directory of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
    own = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return env | own | {"PYTHONPATH": os.getcwd()}


@pytest.fixture
def start(
    environ: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Server]]:
    """Starts servers over fake children: start(modes=..., config=..., ...). At the end all are gone, and nothing is left."""
    servers: list[Server] = []

    def launch(
        modes: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        prepare_s: float = 0.0,
        external: tuple[str, ...] = (),
        name: str = "",
        extra_environ: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        strange: str = "",
        restarts: Mapping[str, float] | None = None,
        interpreter: str = "",
    ) -> Server:
        name = name or f"test-{os.getpid()}-{len(servers)}"
        rings = {"token_slots": 64, "submit_slots": 16}
        base: dict[str, Any] = {"instance": name, "http": {"port": 0}, "rings": rings}
        options = {
            "config": base | dict(config or {}),
            "modes": dict(modes or {}),
            "prepare_s": prepare_s,
            "external": external,
            "strange": strange,
            "restarts": dict(restarts or {}),
            "interpreter": interpreter,
        }
        argv = [*wrapper, sys.executable, DRIVER, json.dumps(options)]
        servers.append(Server(argv, environ | dict(extra_environ or {}), name, pass_fds))
        return servers[-1]

    yield launch
    for server in servers:
        _end(server)
    for server in servers:
        assert server.segments() == [], f"segments left behind:\n{server.output()}"


@pytest.fixture
def serve(
    environ: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Callable[..., Server]]:
    """Starts `shmserve start` as a user does, with the simulated runner: serve(*flags). At the end nothing may be left."""
    servers: list[Server] = []

    def launch(*flags: str, name: str = "", wrapper: Sequence[str] = ()) -> Server:
        name = name or f"test-{os.getpid()}-real-{len(servers)}"
        argv = [*wrapper, sys.executable, "-m", "shmserve", "start", "--runner=simulated"]
        argv += [f"--instance={name}", *([] if "--port" in flags else ["--port=0"]), *flags]
        servers.append(Server(argv, environ, name))
        return servers[-1]

    yield launch
    for server in servers:
        _end(server)
    for server in servers:
        assert server.segments() == [], f"segments left behind:\n{server.output()}"
        assert "Traceback" not in server.output(), server.output()


def _end(server: Server) -> None:
    """End what a failed test left running: the session that we made for it."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.process.wait(15)


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Stream:
    """One SSE response, read by hand."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._response = connection.getresponse()
        assert self._response.status == 200, self._response.read()

    def _data(self) -> Iterator[str]:
        for line in self._response:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()

    def wait_first(self) -> str:
        """The first event."""
        return next(self._data())

    def rest(self) -> list[str]:
        """The data of all events that are left."""
        return list(self._data())

    def close(self) -> None:
        self._response.close()


class Client:
    """The requests that the tests need, on connections of their own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[http.client.HTTPConnection] = []
        self._streams: list[Stream] = []

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        self._connections.append(connection)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        return connection

    def get(self, path: str) -> http.client.HTTPResponse:
        """The response, its body read. A connection that breaks under it is tried again: a front end may just have died."""
        while True:
            try:
                connection = self._request("GET", path)
                response: http.client.HTTPResponse = connection.getresponse()
                response.read()
                return response
            except (ConnectionResetError, http.client.BadStatusLine):
                time.sleep(0.02)

    def stream(self, **fields: Any) -> Stream:
        body = {"prompt": "Once upon a time", "stream": True} | fields
        self._streams.append(Stream(self._request("POST", "/v1/completions", body)))
        return self._streams[-1]

    def complete(self, **fields: Any) -> tuple[int, bytes]:
        """(status, body) of a plain completion."""
        connection = self._request("POST", "/v1/completions", {"prompt": "Once"} | fields)
        response = connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Close every connection, read or not."""
        for stream in self._streams:
            stream.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def client() -> Iterator[Callable[[Server], Client]]:
    """client(server): asks a real front end."""
    clients: list[Client] = []

    def of(server: Server) -> Client:
        clients.append(Client(server.port()))
        return clients[-1]

    yield of
    for each in clients:
        each.close()
