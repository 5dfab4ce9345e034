"""`shmserve chat` and `shmserve bench` against a real server of the simulated runner; chat also in a real terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import PATIENCE_S, ROOT, Server, until

from shmserve import cli
from shmserve.commands.bench import _read_prompts

pytestmark = pytest.mark.slow

Run = Callable[..., int]


@pytest.fixture
def run(simulated: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """run(*args, stdin=""): a command line in this process, beside the simulated server; its exit code."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(simulated.log.parent))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SHMSERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: str, stdin: str = "") -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return cli.main(args)

    return call


def test_a_pipe_gets_the_answer_and_nothing_else(
    run: Run, simulated: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By name, by port, by URL, and as the only one that runs: greedy answers of a seed are the same."""
    args = ("--max-tokens", "5", "--seed", "3", "--temperature", "0")
    url = f"http://127.0.0.1:{simulated.port}"
    ways: tuple[tuple[str, ...], ...] = (
        ("--instance", simulated.name),
        ("--port", str(simulated.port)),
        ("--url", f"{url}/v1/"),
        (),
    )
    answers = set()
    for way in ways:
        assert run("chat", *way, *args, stdin="Hi\n") == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        answers.add(captured.out)
    (answer,) = answers
    assert answer.strip() and answer.endswith("\n") and "\x1b" not in answer
    assert not (tmp_path / "state" / "shmserve" / "chat_history").exists()


@pytest.mark.parametrize(
    ("args", "stdin", "code", "words"),
    [
        (("chat",), "", 2, "nothing to ask"),
        (("chat", "--url", "u", "--port", "1"), "x", 2, "--url and --port exclude each other"),
        (("chat", "--url", "ftp://x"), "x", 2, "no http:// or https:// URL"),
        (("chat", "--url", "http://127.0.0.1:9"), "x", 1, "nobody answers on http://127.0.0.1:9"),
        (("chat", "--uds", "/no/such"), "x", 1, "unix:/no/such"),
        (("chat", "--instance", "nobody"), "x", 1, "nobody"),
        (("chat", "--ca-file", "/no/such"), "x", 1, "--ca-file /no/such"),
        (("chat", "--model", "other"), "x", 1, "other"),
        (("chat", "--temperature", "-1"), "x", 2, "--temperature"),
        (("chat", "--top-p", "2"), "x", 2, "--top-p"),
        (("bench",), "", 2, "--rate or --concurrency"),
        (("bench", "--rate", "fast"), "", 2, "--rate"),
        (("bench", "--rate", "-1"), "", 2, "rate must be above 0"),
        (("bench", "--rate", "50,-1", "--num-requests", "1"), "", 2, "rate must be above 0"),
        (("bench", "--rate", "1", "--max-tokens", "9-3"), "", 2, "9-3"),
        (("bench", "--rate", "1", "--slo", "x=1"), "", 2, "ttft, itl, tpot, e2e"),
        (("bench", "--rate", "1", "--extra", "[]"), "", 2, "not a JSON object"),
        (("bench", "--rate", "1", "--json", "/no/such/x"), "", 1, "--json /no/such/x"),
        (("bench", "--rate", "1", "--plot", "x.gif"), "", 1, ".png, .svg"),
    ],
)
def test_an_error_is_one_line(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    stdin: str,
    code: int,
    words: str,
) -> None:
    assert run(*args, stdin=stdin) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("shmserve: error: ") and words in line


def test_prompts_are_a_line_each_whatever_else_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes('one\x0cpage\r\n\n"two\\nlines \u2028"\n\u2029three'.encode())
    assert _read_prompts(str(path)) == ("one\x0cpage", "two\nlines \u2028", "\u2029three")


def test_a_sweep_is_measured_printed_and_written(
    run: Run, simulated: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "loads.json"
    args = ("--rate", "40", "--concurrency", "2", "--num-requests", "6", "--warmup", "2")
    more = ("--max-tokens", "4-9", "--ignore-eos", "--timing-every", "2", "--slo", "e2e=60000")
    assert run("bench", *args, *more, "--json", str(path), "--model", "") == 0
    out = capsys.readouterr().out
    assert "rate 40/s: 6 of 6 requests whole" in out
    assert "2 clients: 6 of 6 requests whole" in out
    assert "(100 %)" in out
    assert "\nload " in out  # the sweep's table
    whole = json.loads(path.read_text())
    assert whole["target"] == f"http://127.0.0.1:{simulated.port}"
    for load in whole["loads"]:
        detail = load["requests_detail"]
        assert len(detail) == load["good"] == 6
        assert all(4 <= request["output_tokens"] <= 9 for request in detail)
        assert {request["finish_reason"] for request in detail} == {"length"}
        asked = [len(request["lags_ms"]) for request in detail]
        assert asked == [d["output_tokens"] * (i % 2 == 0) for i, d in enumerate(detail)]
        assert load["lag_p50_ms"] > 0
    simulated.wait_idle()


def test_refused_requests_are_errors_by_kind_and_the_exit_code_says_that_none_was_whole(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--concurrency", "1", "--num-requests", "2", "--extra", '{"temperature": -1}')
    assert run("bench", *args) == 1
    out = capsys.readouterr().out
    assert "0 of 2 requests whole" in out
    assert "error: 2 x 400: " in out and "temperature" in out


@pytest.mark.slow
def test_a_load_is_drawn(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    assert run("bench", "--rate", "50", "--num-requests", "5", "--plot", str(path)) == 0
    assert b"</svg>" in path.read_bytes()
    assert f"drew {path}" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_load_and_shows_what_came_so_far(simulated: Server) -> None:
    environ = os.environ | {"XDG_RUNTIME_DIR": str(simulated.log.parent), "PYTHONPATH": ROOT}
    argv = [sys.executable, "-m", "shmserve", "bench", "--instance", simulated.name]
    argv += ["--concurrency", "2", "--duration", "600", "--max-tokens", "20"]
    bench = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    until(lambda: simulated.words("worker")["running"] == 2, "both clients run")
    time.sleep(1.0)
    bench.send_signal(signal.SIGINT)
    out, _ = bench.communicate(timeout=PATIENCE_S)
    assert bench.returncode == 130
    assert re.search(r"^2 clients: [1-9]\d* of [1-9]\d* requests whole", out)
    simulated.wait_idle()


class Terminal:
    """A chat in a terminal of its own: what it shows, and keys for it."""

    def __init__(self, runtime_dir: Path, state_home: Path, *args: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ |= {"XDG_RUNTIME_DIR": str(runtime_dir), "XDG_STATE_HOME": str(state_home)}
        environ |= {"PYTHONPATH": ROOT, "TERM": "xterm"}
        argv = [sys.executable, "-m", "shmserve", "chat", *args]
        self._pid = os.posix_spawn(
            sys.executable, argv, environ, setsid=True, file_actions=self._open()
        )
        os.close(self._theirs)
        self._rest = b""
        self._exit_code: int | None = None

    def _open(self) -> list[tuple[int, ...]]:
        self._fd, self._theirs = pty.openpty()
        path = os.ttyname(self._theirs)
        # Opened by the leader of a new session, it is that session's terminal: Ctrl-C becomes a signal.
        first = (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0)
        return [first, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]  # type: ignore[list-item]

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def interrupt(self, mark: str) -> str:
        """Press Ctrl-C until it shows `mark`: Python looks at no signal between its prompt and the first wait for a key."""
        for _ in range(int(PATIENCE_S) - 1):
            self.press("\x03")
            if self._comes(mark, 1.0):
                break
        return self.until(mark)

    def _comes(self, mark: str, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while mark.encode() not in self._rest and (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left_s)[0]:
                self._rest += os.read(self._fd, 65536)
        return mark.encode() in self._rest

    def until(self, mark: str) -> str:
        """What it shows up to and with `mark`."""
        deadline = time.monotonic() + PATIENCE_S
        while mark.encode() not in self._rest:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited in vain for {mark!r}: {self._rest!r}"
            try:
                self._rest += os.read(self._fd, 65536)
            except OSError:
                pytest.fail(f"it ended before {mark!r}: {self._rest!r}")
        end = self._rest.index(mark.encode()) + len(mark.encode())
        shown, self._rest = self._rest[:end], self._rest[end:]
        return shown.decode()

    def wait(self) -> int:
        """Its exit code."""
        while self._exit_code is None:
            with contextlib.suppress(OSError):  # at its end the terminal is an error to read
                if select.select([self._fd], [], [], 0.05)[0]:
                    self._rest += os.read(self._fd, 65536)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def close(self) -> None:
        if self._exit_code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def terminal(simulated: Server, tmp_path: Path) -> Iterator[Terminal]:
    chat = Terminal(simulated.log.parent, tmp_path, "--instance", simulated.name)
    try:
        yield chat
    finally:
        chat.close()


def test_ctrl_c_stops_an_answer_and_frees_its_sequence_and_ctrl_d_ends_the_chat(
    simulated: Server, terminal: Terminal, tmp_path: Path
) -> None:
    terminal.until(">>> ")
    num_aborted = simulated.words("worker")["num_aborted"]
    terminal.press("tell me all\n")
    until(lambda: simulated.words("worker")["running"] == 1, "its sequence runs")
    time.sleep(0.05)  # some tokens of an answer that would last long
    terminal.press("\x03")
    terminal.until("(stopped)")
    terminal.until(">>> ")
    simulated.wait_idle()
    assert simulated.words("worker")["num_aborted"] == num_aborted + 1
    terminal.press("/clear\n")
    terminal.until("(a new conversation)")
    terminal.until(">>> ")
    terminal.interrupt("Ctrl-D ends")  # at the prompt it only drops the line
    terminal.until(">>> ")
    terminal.press("\x04")
    assert terminal.wait() == 0
    history = tmp_path / "shmserve" / "chat_history"
    assert history.read_text() == "tell me all\n/clear\n"
    assert history.stat().st_mode & 0o077 == 0
