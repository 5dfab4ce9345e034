"""`shmserve start` with its real children and the simulated runner: signals, and bad input."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import Ask

pytestmark = pytest.mark.usefixtures("default_model")
Serve = Callable[..., Any]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_idle_server_ends_at_a_signal_with_code_0_J3(serve: Serve, number: int) -> None:
    server = serve()
    server.wait_ready()
    pids = server.pids()
    os.kill(server.pid, number)
    assert server.wait() == 0
    assert server.leftovers() == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_second_signal_within_100_ms_ends_streams_and_leaves_nothing_J3(
    serve: Serve, client: Any
) -> None:
    server = serve("--step-ms=50")
    server.wait_ready()
    stream = client(server).stream(max_tokens=100_000, ignore_eos=True)
    stream.wait_first()
    server.end_twice()
    assert server.wait() == 0
    assert "ended; 1 request was cut" in server.output()
    assert server.leftovers() == []


@pytest.mark.parametrize(
    "delay_s",
    [0.0, 0.6, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.15, 0.3, 1.0, 1.5))],
)
def test_signal_at_any_moment_of_a_start_leaves_nothing_J3(serve: Serve, delay_s: float) -> None:
    server = serve()
    time.sleep(delay_s)
    os.killpg(server.pid, signal.SIGTERM)
    assert server.wait() in (0, 143, -signal.SIGTERM)
    assert server.leftovers() == []


@pytest.mark.slow
def test_second_server_on_a_port_is_refused_before_anything_is_loaded_J6(
    serve: Serve, client: Any, free_port: int
) -> None:
    first = serve("--port", str(free_port))
    first.wait_ready()
    second = serve("--port", str(free_port))
    assert second.wait() == 1
    (line,) = second.output().splitlines()
    assert f"127.0.0.1:{free_port}" in line
    assert (
        second.leftovers() == first.leftovers()[: len(first.leftovers())] or second.segments() == []
    )
    assert client(first).get("/health").status == 200


def _unreadable(folder: Path) -> str:
    path = folder / "locked.gguf"
    path.write_bytes(b"GGUF")
    path.chmod(0)
    return str(path)


def _empty(folder: Path) -> str:
    (folder / "empty.gguf").touch()
    return str(folder / "empty.gguf")


def _text(folder: Path) -> str:
    (folder / "text.gguf").write_text("It was a dark and stormy night")
    return str(folder / "text.gguf")


def _no_config(folder: Path) -> str:
    (folder / "bare").mkdir()
    return str(folder / "bare")


@pytest.mark.parametrize(
    "make",
    [lambda folder: "/no/such.gguf", lambda folder: "./no/such", _empty, _text, _no_config]
    + ([_unreadable] if os.getuid() else []),
)
def test_model_path_that_cannot_be_is_one_line_that_names_it_J7(
    serve: Serve, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    spec = make(tmp_path)
    server = serve("--model", spec)
    assert server.wait() == 1
    *_, line = server.output().splitlines()  # the lines before it may tell of progress
    assert server.output().count("error") == 1
    assert line.startswith("shmserve: error: ")
    assert spec in line
    assert server.leftovers() == []


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small /dev/shm needs root")
def test_64_mib_of_dev_shm_are_enough_for_many_streams_of_long_prompts_J4(
    serve: Serve,
) -> None:
    """What a container has by default; the rings are reserved at the start, so nothing can run out later."""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    server = serve("--step-ms=1", wrapper=["unshare", "-m", "sh", "-c", mount, "sh"])
    server.wait_ready()
    pids = server.pids()
    port = server.port()
    asks = [Ask(port, prompt=[19556 + i] * 2500, max_tokens=100) for i in range(64)]
    assert {ask.outcome() for ask in asks} == {"done"}
    assert server.pids() == pids


@pytest.mark.slow
def test_status_stop_and_sweep_are_commands(serve: Serve) -> None:
    server = serve()
    status = server.wait_ready()

    def shmserve(*args: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "shmserve", *args],
            env=server.environ,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    shown = shmserve("status")
    assert status["url"] in shown
    assert str(server.pids("worker")[0]) in shown
    assert '"state": "ready"' in shmserve("status", "--json", "--instance", server.name)
    assert "test-" not in shmserve("sweep")  # it lives: nothing of it is swept
    shmserve("stop")
    assert server.wait() == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_worker_started_by_hand_serves(serve: Serve, client: Any, until: Any) -> None:
    server = serve("--external", "worker")
    until(lambda: "waiting for it to join" in server.output(), "the invitation")
    control = f"unix:{server.environ['XDG_RUNTIME_DIR']}/shmserve/{server.name}.sock"
    argv = [sys.executable, "-m", "shmserve.worker", "--control", control]
    with subprocess.Popen(argv, env=server.environ) as worker:
        server.wait_ready()
        assert client(server).stream(max_tokens=3).rest()[-1] == "[DONE]"
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0
        assert worker.wait(30) == 0


@pytest.mark.slow
def test_connections_wait_while_the_front_end_starts(serve: Serve, free_port: int) -> None:
    """From the bind on nobody is refused: who connects early is answered when the front end is there."""
    server = serve("--port", str(free_port))
    answers: list[bytes] = []

    def connect() -> None:
        while True:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", free_port)) == 0:
                    sock.settimeout(30)
                    sock.sendall(
                        b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                    )
                    answers.append(sock.recv(12))
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(30)
    assert answers == [b"HTTP/1.1 200"]
    server.wait_ready()
