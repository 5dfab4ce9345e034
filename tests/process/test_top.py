"""`shmserve top` and `shmserve dump` beside a real server: stopped, restarted, ended, and a terminal given back."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("default_model")
Serve = Callable[..., Any]
TOP = [sys.executable, "-m", "shmserve", "top", "--interval=0.3"]
PATIENCE_S = 30.0


@pytest.fixture
def watch() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """watch(server, *flags): `shmserve top --json` as a process, which is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(server: Any, *flags: str) -> subprocess.Popen[str]:
        argv = [*TOP, "--json", *flags, "--instance", server.name]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(argv, env=server.environ, stdout=pipe, stderr=pipe, text=True)
        )
        return started[-1]

    yield start
    for process in started:
        with process:
            process.kill()


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    report: dict[str, Any] = json.loads(line)
    return report


def row(report: dict[str, Any], role: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in report["processes"] if row["role"] == role)
    return found


@pytest.mark.slow
def test_top_follows_a_server_while_it_is_stopped_restarted_and_ended(
    serve: Serve, client: Any, watch: Callable[..., subprocess.Popen[str]]
) -> None:
    server = serve("--step-ms=20")
    server.wait_ready()
    (front_end,), (worker,) = server.pids("http"), server.pids("worker")
    stream = client(server).stream(max_tokens=5_000, ignore_eos=True)
    stream.wait_first()
    top = watch(server)
    running = report_of(top)
    assert row(running, "worker")["words"]["running"] == 1
    assert row(running, "worker")["per_s"]["step"] > 0
    assert {ring["kind"] for ring in running["rings"]} == {"submit", "tokens"}
    assert all(ring["has_producer"] and ring["has_consumer"] for ring in running["rings"])

    os.kill(front_end, signal.SIGSTOP)  # nobody answers HTTP, and nobody reads the ring
    try:
        while not row(report := report_of(top), "http")["is_silent"]:
            continue
        tokens = next(ring for ring in report["rings"] if ring["kind"] == "tokens")
        assert tokens["depth"] > 0
        assert row(report, "worker")["per_s"]["step"] > 0
    finally:
        os.kill(front_end, signal.SIGCONT)

    os.kill(worker, signal.SIGKILL)
    epochs = {ring["epoch"] for ring in running["rings"]}
    while not (rings := report_of(top)["rings"]) or {ring["epoch"] for ring in rings} == epochs:
        continue
    assert {ring["epoch"] for ring in rings}.isdisjoint(epochs)

    os.kill(server.pid, signal.SIGTERM)
    os.kill(server.pid, signal.SIGTERM)
    _, talk = top.communicate(timeout=PATIENCE_S)
    assert top.returncode == 0
    assert talk == f"shmserve: instance {server.name} has ended\n"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_terminal_is_given_back_as_it_was(serve: Serve, number: int, code: int) -> None:
    server = serve()
    server.wait_ready()
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    environ = {**server.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    top = subprocess.Popen(
        [*TOP, "--instance", server.name], env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + PATIENCE_S
    while shown.count(b"0-0 tokens") < 3:
        assert time.monotonic() < deadline, shown
        if select.select([ours], [], [], 0.1)[0]:
            shown += os.read(ours, 65536)
    top.send_signal(number)
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # its end of the terminal is closed
        assert top.wait(PATIENCE_S) == code
    os.close(ours)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1  # the other screen
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") > 0  # the cursor
    assert b"Traceback" not in shown


@pytest.mark.slow
def test_one_screen_is_printed_where_there_is_no_terminal(serve: Serve) -> None:
    server = serve()
    server.wait_ready()
    done = subprocess.run(
        [*TOP, "--instance", server.name], env=server.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "0-0 tokens" in done.stdout and "\x1b" not in done.stdout
    assert done.stdout.count("worker 0") == 1


@pytest.mark.slow
def test_commands_say_in_one_line_that_there_is_nothing_to_see(environ: dict[str, str]) -> None:
    for command in ("top", "dump"):
        done = subprocess.run(
            [sys.executable, "-m", "shmserve", command, "--instance", "nobody-is-called-so"],
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("shmserve: error: nothing of instance 'nobody-is-called-so'")
        assert done.stdout == ""
