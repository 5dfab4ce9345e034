"""Two simulated instances on this machine, and a router in front of them: started, hurt and ended.

Owns: the processes and their ports, each router's command made of its file in deploy/, and what is asked of an instance directly. Never:
judges (router_checks.py), or talks to another machine. Used by check_routers.py and by tests/e2e/routers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import mortal
from bench_common import ROOT

DEPLOY: Final = ROOT / "deploy"
PATIENCE_S: Final = 60.0
HEALTH_S: Final = 2.0
"""How often the routers of deploy/ look; three bad looks put an instance out (HAProxy: 1 s, two)."""


class Waited(AssertionError):
    """Something did not come within a patience that is no bar."""


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Waited(f"waited in vain: {what}")
        time.sleep(0.02)
    return value


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
        return ports


def get(url: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """(status, headers by lower-case name, body); status 0 where nobody answers."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()
    except OSError:
        return 0, {}, b""


def samples_of(url: str) -> dict[str, float]:
    """Every sample of an exposition text, labels dropped, values of one name added up."""
    found: dict[str, float] = {}
    for line in get(url)[2].decode().splitlines():
        if line and not line.startswith("#"):
            name, value = line.partition("{")[0].split()[0], line.split()[-1]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def rss_bytes(pid: int) -> int:
    """Resident memory of a process and its children; 0 once it is gone."""
    total = 0
    for each in [pid, *_children(pid)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )
    return total


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children."""
    total = 0
    for each in [pid, *_children(pid)]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """SIGTERM, and if that is not enough SIGKILL to all of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


@dataclass(slots=True)
class Instance:
    """`shmserve start` with the simulated runner on a fixed port, in a process group of its own."""

    name: str
    port: int
    folder: Path
    flags: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Instance:
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "shmserve", "start", "--runner=simulated"]
        argv += [f"--instance={self.name}", f"--port={self.port}", *self.flags]
        with open(self.folder / "log", "ab") as log:
            self.process = mortal.start(
                argv,
                env=self._environ(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self) -> Instance:
        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise Waited(f"{self.name} ended: {self.output()}")
            return get(f"{self.url}/ready")[0] == 200

        until(is_ready, f"{self.name} is ready")
        return self

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def load(self) -> dict[str, Any]:
        loads: dict[str, Any] = json.loads(get(f"{self.url}/v1/loads")[2])["loads"][0]
        return loads

    def num_running(self) -> int:
        return int(self.load()["num_running_reqs"])

    def metrics(self) -> dict[str, float]:
        return samples_of(f"{self.url}/metrics")

    def num_requests(self) -> int:
        """Generations that it has ended or refused so far (not what else is POSTed: vllm-router tokenises here before each chat)."""
        return int(self.metrics()["shmserve_completions_total"]) + self.num_refused()

    def num_refused(self) -> int:
        return int(self.metrics()["shmserve_refusals_total"])

    def worker_pid(self) -> int:
        """Of the one worker that runs now."""
        return next(pid for pid in _children(self.process.pid) if "worker" in _command(pid))

    def kill_worker(self) -> None:
        os.kill(self.worker_pid(), signal.SIGKILL)

    def kill(self) -> None:
        """All of it at once, as a host that loses its power."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def drain(self) -> subprocess.Popen[bytes]:
        """`shmserve drain`, begun: it returns when the instance has ended."""
        argv = [sys.executable, "-m", "shmserve", "drain", f"--instance={self.name}"]
        return subprocess.Popen(argv, env=self._environ(), stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        _end(self.process, PATIENCE_S)

    def _environ(self) -> dict[str, str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ |= {"XDG_RUNTIME_DIR": str(self.folder), "XDG_STATE_HOME": str(self.folder)}
        return environ | {"PYTHONPATH": str(ROOT)}


def _command(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One router: how it is started, and what it does differently."""

    name: str
    program: str
    has_error_frame: bool  # ends the streams of a host that is gone with an event of its own
    is_router: bool = (
        True  # of the Rust ones: it has /workers or the like, and health probes of its own
    )


KINDS: Final[Mapping[str, Kind]] = {
    each.name: each
    for each in (
        Kind("smg", "smg", True),
        Kind("vllm-router", "vllm-router", False),
        Kind("sglang-router", "sglang-router", False),
        Kind("nginx", "nginx", False, False),
        Kind("haproxy", "haproxy", False, False),
    )
}


@dataclass(slots=True)
class Router:
    """A running router in front of two instances."""

    kind: Kind
    port: int
    metrics_port: int
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    def start(self, workers: Sequence[str], program: str, *flags: str) -> Router:
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = dict(os.environ)
        if self.kind.is_router:
            argv = ["sh", str(DEPLOY / self.kind.name / "start.sh"), "--port", str(self.port)]
            argv += ["--prometheus-port", str(self.metrics_port), *flags]
            argv += ["--worker-urls", *workers]
            environ[self.kind.name.upper().replace("-", "_")] = program
        elif self.kind.name == "nginx":
            argv = [
                program,
                "-p",
                str(self.folder),
                "-c",
                self.configuration("nginx.conf", workers),
            ]
            argv += ["-g", "daemon off;"]
        else:
            argv = [program, "-db", "-f", self.configuration("haproxy.cfg", workers)]
        with open(self.folder / "log", "ab") as log:
            self.process = mortal.start(
                argv, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def configuration(self, name: str, workers: Sequence[str]) -> str:
        """The file of deploy/ with the addresses of this run. Each of its own must be there, or it is not the file that is tested."""
        text = (DEPLOY / self.kind.name / name).read_text()
        addresses = {"127.0.0.1:30000": f"127.0.0.1:{self.port}"}
        for default, worker in zip(("127.0.0.1:8001", "127.0.0.1:8002"), workers, strict=True):
            addresses[default] = worker.removeprefix("http://")
        for default, address in addresses.items():
            assert default in text, f"{name} has no {default}"
            text = text.replace(default, address)
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def wait_ready(self, num_workers: int = 2) -> Router:
        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise Waited(f"{self.kind.name} ended: {self.output()[-3000:]}")
            if self.kind.name != "smg":
                return get(f"{self.url}/v1/models")[0] == 200
            return sum(bool(each["is_healthy"]) for each in self.workers()) == num_workers

        until(is_ready, f"{self.kind.name} has its workers")
        return self

    def workers(self) -> list[dict[str, Any]]:
        """smg's list."""
        status, _, body = get(f"{self.url}/workers")
        listed: list[dict[str, Any]] = json.loads(body)["workers"] if status == 200 else []
        return listed

    def has_seen_idle(self, since: datetime) -> bool:
        """Whether it goes by reports of `since` or later, and all of them say that nothing runs. Only smg asks for any."""
        if self.kind.name != "smg":
            return True
        reports = [each.get("engine_load") for each in self.workers()]
        return bool(reports) and all(
            report is not None
            and datetime.fromisoformat(report["timestamp"]) >= since
            and not any(load["num_total_reqs"] for load in report["loads"])
            for report in reports
        )

    def output(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        _end(self.process, 10.0)


@dataclass(slots=True)
class Fleet:
    """Instances a and b behind one router."""

    a: Instance
    b: Instance
    router: Router

    @property
    def url(self) -> str:
        return self.router.url

    def restore(self) -> None:
        """Both instances up and idle, and served by the router again: what a check hurt is whole for the next."""
        for each in (self.a, self.b):
            if each.process.poll() is not None:
                each.start()
        for each in (self.a, self.b):
            each.wait_ready()
        self.router.wait_ready()
        self.settle()

    def settle(self) -> None:
        """Both instances are idle, and the router knows it.

        smg sends a prompt that it does not know to who is done first, by a report that is up to a second old: of one that was busy in it and
        one that was not, at 50 tokens a second a stream, the next 40 requests all go to the other.
        """
        for each in (self.a, self.b):
            until(lambda each=each: not each.load()["num_total_reqs"], f"{each.name} is idle")
        now = datetime.now(UTC)
        until(lambda: self.router.has_seen_idle(now), f"{self.router.kind.name} sees both idle")


@contextlib.contextmanager
def fleet(
    kind: Kind,
    folder: Path,
    program: str,
    flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
) -> Iterator[Fleet]:
    """A fleet, ended at the end. Ports are taken at random: two of them may run side by side."""
    port_a, port_b, port, metrics_port = free_ports(4)
    suffix = f"{kind.name}-{os.getpid()}-{port}"
    a = Instance(f"a-{suffix}", port_a, folder / "a", tuple(flags))
    b = Instance(f"b-{suffix}", port_b, folder / "b", tuple(flags))
    router = Router(kind, port, metrics_port, folder / "router")
    with contextlib.ExitStack() as stack:
        for each in (a, b):
            stack.callback(each.start().stop)
        for each in (a, b):
            each.wait_ready()
        router.start([a.url, b.url], program, *router_flags)
        stack.callback(router.stop)
        router.wait_ready()
        yield Fleet(a, b, router)
