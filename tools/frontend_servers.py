"""The two servers of `bench_frontend.py`: shmserve with its simulated GPU, and the bare floor.

Owns: starting them, finding and pinning the measured process, stopping them. Never: measures.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mortal
from bench_common import ROOT, children_of, command_line, pin, stop_process, wait_for
from frontend_run import EmissionLog

HERE = Path(__file__).resolve().parent
STOP_GRACE_S = 15.0
ORPHAN_GRACE_S = 2.0
PROMPT = "Write a long story about the sea."


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def still_running(tree: dict[int, str], grace_s: float) -> list[int]:
    """Those of these processes that run on after the grace, with the command line they had: a pid may be another's by now."""
    deadline = time.monotonic() + grace_s
    while True:
        left = [pid for pid, cmdline in tree.items() if command_line(pid) == cmdline]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


class Server:
    """A server process that answers GET /health, and the log of what it emitted."""

    name = ""

    pins = True
    """Whether the measured process gets a core of its own."""

    def __init__(self, folder: Path, core: int, over_unix: bool) -> None:
        self.port = free_port()
        self.unix_path = str(folder / f"{self.name}.sock") if over_unix else None
        self.log_path = folder / f"{self.name}-emission.jsonl"
        self.log = EmissionLog(self.log_path)
        self.body_file = folder / f"{self.name}-body.json"
        self.measured_pids: list[int] = []
        self._output = folder / f"{self.name}-output.txt"
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def find_measured(self, pid: int) -> list[int]:
        raise NotImplementedError

    @property
    def measured_pid(self) -> int:
        """The first of the measured processes; most servers have one."""
        return self.measured_pids[0]

    @property
    def client_address(self) -> list[str]:
        return ["-x", self.unix_path] if self.unix_path else ["-p", str(self.port)]

    def _is_up(self) -> bool:
        assert self._process is not None, "not started"
        if self._process.poll() is not None:
            raise SystemExit(
                f"{self.name} ended with {self._process.returncode}:\n{self._output.read_text()[-4000:]}"
            )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def __enter__(self) -> Self:
        with self._output.open("wb") as output:
            self._process = mortal.start(
                self.command(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_for(self._is_up, 120, f"{self.name} on port {self.port}")
            self.measured_pids = self.find_measured(self._process.pid)
            for pid in self.measured_pids if self.pins else ():
                pin(pid, self._core)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """SIGTERM and a grace; what is left of its tree after that is killed."""
        assert self._process is not None, "not started"
        tree = children_of(self._process.pid)
        stop_process(self._process, STOP_GRACE_S)
        left = still_running(tree, ORPHAN_GRACE_S)
        for pid in left:
            print(f"{self.name} left pid {pid} behind ({tree[pid]}): killed", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                os.kill(pid, signal.SIGKILL)
        still_running({pid: tree[pid] for pid in left}, ORPHAN_GRACE_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class OurServer(Server):
    """shmserve over its simulated runner; the measured processes are the front ends, `-m shmserve.http`."""

    name = "shmserve"

    def __init__(
        self,
        folder: Path,
        max_num_seqs: int,
        num_tokens: int,
        step_ms: float,
        core: int,
        over_unix: bool,
        options: tuple[str, ...],
        *,
        pins: bool = True,
        num_http: int = 1,
    ) -> None:
        super().__init__(folder, core, over_unix)
        self.pins = pins
        self._num_http = num_http
        self._max_num_seqs = max_num_seqs
        self._step_ms = step_ms
        self._options = options
        self._body = {
            "model": "default",
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
        }
        self.body_file.write_text(json.dumps(self._body))

    def command(self) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "shmserve",
            "start",
            "--runner",
            "simulated",
            "--step-ms",
            str(self._step_ms),
        ]
        words += ["--max-num-seqs", str(self._max_num_seqs), "--port", str(self.port)]
        words += ["--emission-log", str(self.log_path)]
        if self.unix_path:
            words += ["--uds", self.unix_path]
        if self._num_http > 1:
            words += ["--http-processes", str(self._num_http)]
        return [*words, *self._options]

    def find_measured(self, pid: int) -> list[int]:
        found = [
            child
            for child, cmdline in children_of(pid).items()
            if re.search(r"-m shmserve\.http\b", cmdline)
        ]
        if len(found) != self._num_http:
            raise SystemExit(
                f"expected {self._num_http} front ends (-m shmserve.http) under pid {pid}, found {len(found)}"
            )
        return found

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._use_served_model()
        except BaseException:
            self.stop()
            raise
        return self

    def _use_served_model(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read())
        connection.close()
        self._body["model"] = models["data"][0]["id"]
        self.ask_for({})

    def ask_for(self, fields: dict[str, Any]) -> None:
        """What each request says from now on, beside the prompt and its length."""
        self.body_file.write_text(json.dumps(self._body | fields))

    def probe_frame(self) -> bytes:
        """A real content frame of median length, blank line included; the streams' log entries are forgotten later."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(self._body), headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            raise SystemExit(
                f"the probe was answered with {response.status}: {text[:500].decode(errors='replace')}"
            )
        frames = [
            frame + b"\n\n"
            for frame in text.split(b"\n\n")
            if re.search(rb'"content":"[^"]', frame)
        ]
        if not frames:
            raise SystemExit(
                f"the probe's stream has no frame with content: {text[:500].decode(errors='replace')}"
            )
        return sorted(frames, key=len)[len(frames) // 2]


class FloorServer(Server):
    """`bench_floor.py` with our server's frame; the measured process is itself."""

    name = "floor"

    def __init__(
        self,
        folder: Path,
        frame: bytes,
        num_tokens: int,
        step_ms: float,
        core: int,
        over_unix: bool,
    ) -> None:
        super().__init__(folder, core, over_unix)
        self._num_tokens = num_tokens
        self._step_ms = step_ms
        self._frame_file = folder / "frame.bin"
        self._frame_file.write_bytes(frame)
        self.body_file.write_text(json.dumps({"stream": True}))

    def command(self) -> list[str]:
        words = [
            sys.executable,
            str(HERE / "bench_floor.py"),
            "--port",
            str(self.port),
            "--tokens",
            str(self._num_tokens),
        ]
        words += ["--step-ms", str(self._step_ms), "--frame-file", str(self._frame_file)]
        words += ["--emission-log", str(self.log_path)]
        return [*words, "--uds", self.unix_path] if self.unix_path else words

    def find_measured(self, pid: int) -> list[int]:
        return [pid]
