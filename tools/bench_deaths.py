"""How long each death takes to be noticed, told and made good: the seconds behind the promises.

    python tools/bench_deaths.py [--streams 32] [--times 3] [--json FILE]

A server over the simulated runner with so many streams open; a process of it is killed or stopped, and clocks run until each thing
has happened that is promised. Each row is the median and the worst of `--times` runs; exit code 1 if a worst is above its limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mortal
from bench_common import ROOT, Row, end_on_sigterm, median, print_table, stop_process, write_json

from shmserve.instance_socket import ask, runtime_dir
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import boards_of
from shmserve.rings.segment import SegmentError, names

PATIENCE_S = 60.0
LOOK_S = 0.005

# (death, what is awaited): limit in seconds
LIMITS: dict[tuple[str, str], float | None] = {
    ("worker SIGKILL", "every stream has its error and its end"): 2.0,
    ("worker SIGKILL", "/health is 503"): 1.0,
    ("worker SIGKILL", "/health is 200 again"): None,
    ("front end SIGKILL", "its sequences are freed in the worker"): 2.0,
    ("front end SIGKILL", "a new one answers on the port"): 2.0,
    ("front end SIGSTOP", "status says stopped"): 1.0,
    ("worker SIGSTOP", "/health is 503"): 1.0,
    ("worker SIGCONT", "/health is 200 again"): 1.0,
    ("supervisor SIGKILL", "every stream has its error and its end"): 5.0,
    ("supervisor SIGKILL", "no process, segment or socket is left"): 5.0,
}


class Stream(threading.Thread):
    """Reads one endless stream; `ended_at` and `how` say when and how it ended."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self.has_begun = threading.Event()
        self.ended_at = 0.0
        self.how = ""
        self.start()

    def run(self) -> None:
        body = {"prompt": "Once", "stream": True, "max_tokens": 8_000, "ignore_eos": True}
        head = {"Content-Type": "application/json"}
        last = b""
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(body), head)
            for line in self._connection.getresponse():
                last = line if line.startswith(b"data: {") else last
                self.has_begun.set()
            self.how = "error" if b'"error"' in last else "short"
        except (OSError, http.client.HTTPException):
            self.how = "broken"
        self.ended_at = time.monotonic()


class Served:
    """A server that is up, and what the clocks look at."""

    def __init__(self, folder: str, num_streams: int) -> None:
        self.name = f"deaths-{os.getpid()}"
        own = {"XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder, "PYTHONPATH": str(ROOT)}
        self._environ = os.environ | own
        self._files = Path(folder) / "shmserve"
        argv = [sys.executable, "-m", "shmserve", "start", "--runner=simulated", "--step-ms=20"]
        argv += [f"--max-num-seqs={num_streams}", f"--instance={self.name}", "--port=0"]
        self.process = mortal.start(
            argv,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        if b"ready" not in self.process.stdout.readline():
            raise SystemExit("the server did not become ready")
        status = self.status()
        self.port = int(status["url"].rpartition(":")[2])
        self.pids = {child["role"]: child["pid"] for child in status["children"]}
        self.pids["supervisor"] = self.process.pid
        self.streams = [Stream(self.port) for _ in range(num_streams)]
        for stream in self.streams:
            if not stream.has_begun.wait(PATIENCE_S):
                raise SystemExit("a stream did not begin")

    def status(self) -> dict[str, Any]:
        return ask(runtime_dir(self._environ), self.name, {"type": "status"}, PATIENCE_S)

    def state(self, role: str) -> str:
        rows = self.status()["children"]
        return str(next(row["state"] for row in rows if row["role"] == role))

    def answer(self, path: str) -> int:
        """The status of a GET; 0 if the connection broke. A refused one ends the bench: the port must never refuse."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.connect()
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def num_running(self) -> int:
        for name in boards_of(self.name):
            if ".worker0." in name:
                try:
                    reader = BoardReader.attach(name)
                except SegmentError:
                    continue
                running = reader["running"]
                reader.close()
                return running
        return 0

    def is_gone(self) -> bool:
        for pid in self.pids.values():
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                return False
        return not names(f"shmserve.{self.name}.") and not list(self._files.glob("*"))


def since(begin: float, has_happened: Callable[[], Any]) -> float:
    """Seconds from `begin` until it has."""
    while not has_happened():
        if time.monotonic() - begin > PATIENCE_S:
            raise SystemExit("waited in vain")
        time.sleep(LOOK_S)
    return time.monotonic() - begin


def ends(begin: float, streams: list[Stream], how: str) -> float:
    """Seconds until the last stream had ended. Each must have ended so."""
    for stream in streams:
        stream.join(PATIENCE_S)
        if stream.how != how:
            raise SystemExit(f"a stream ended {stream.how or 'never'}, not {how}")
    return max(stream.ended_at for stream in streams) - begin


def kill(served: Served, role: str, number: int) -> float:
    os.kill(served.pids[role], number)
    return time.monotonic()


def worker_killed(s: Served) -> Iterator[float]:
    begin = kill(s, "worker", signal.SIGKILL)
    unhealthy = since(begin, lambda: s.answer("/health") == 503)
    yield ends(begin, s.streams, "error")
    yield unhealthy
    yield since(begin, lambda: s.answer("/health") == 200)


def front_end_killed(s: Served) -> Iterator[float]:
    begin = kill(s, "http", signal.SIGKILL)
    yield since(begin, lambda: s.num_running() == 0)
    yield since(begin, lambda: s.answer("/live") == 200)


def front_end_stopped(s: Served) -> Iterator[float]:
    yield since(kill(s, "http", signal.SIGSTOP), lambda: s.state("http") == "stopped")
    kill(s, "http", signal.SIGCONT)


def worker_stopped(s: Served) -> Iterator[float]:
    yield since(kill(s, "worker", signal.SIGSTOP), lambda: s.answer("/health") == 503)
    yield since(kill(s, "worker", signal.SIGCONT), lambda: s.answer("/health") == 200)


def supervisor_killed(s: Served) -> Iterator[float]:
    begin = kill(s, "supervisor", signal.SIGKILL)
    s.process.wait()
    gone = since(begin, s.is_gone)
    yield ends(begin, s.streams, "error")
    yield gone


DEATHS = (worker_killed, front_end_killed, front_end_stopped, worker_stopped, supervisor_killed)


def measure(num_streams: int) -> list[float]:
    """One value for each of LIMITS, in its order; a server for each death."""
    values: list[float] = []
    for death in DEATHS:
        with tempfile.TemporaryDirectory() as folder:
            served = Served(folder, num_streams)
            try:
                values += death(served)
            finally:
                if served.process.poll() is None:
                    served.process.send_signal(signal.SIGTERM)  # one drains, the second hurries
                    time.sleep(0.1)
                stop_process(served.process, 10.0)
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    end_on_sigterm()
    runs = [measure(options.streams) for _ in range(options.times)]
    rows: list[Row] = [
        {
            "death": death,
            "until": what,
            "median_s": median(values),
            "worst_s": max(values),
            "limit_s": limit,
        }
        for ((death, what), limit), values in zip(
            LIMITS.items(), zip(*runs, strict=True), strict=True
        )
    ]
    print_table(rows)
    write_json(options.json, rows)
    return int(any(row["limit_s"] is not None and row["worst_s"] > row["limit_s"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
