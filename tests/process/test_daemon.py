"""`start --daemon`, and the commands for several named instances: real processes over the simulated runner."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shmserve.daemon import _receive
from shmserve.rings.segment import names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_model")]
DRIVER = str(Path(__file__).with_name("run_supervisor.py"))


@dataclass(frozen=True)
class Commands:
    """The command line, in a runtime and a state directory of its own."""

    folder: Path
    environ: dict[str, str]
    prefix: str

    def __call__(self, *args: str, code: int = 0) -> str:
        """stdout of `shmserve ARGS`; of one that should fail, its one line on stderr."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shmserve", *args],
            env=self.environ,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def start(self, name: str, *flags: str, code: int = 0) -> str:
        options = ["--runner=simulated", f"--instance={self.prefix}-{name}", *flags]
        return self("start", "--daemon", *options, code=code)

    def status(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            self("status", "--json", f"--instance={self.prefix}-{name}")
        )
        return answer

    def log(self, name: str) -> Path:
        return self.folder / "state" / "shmserve" / f"{self.prefix}-{name}.log"


def is_running(pid: int) -> bool:
    """A daemon is init's: nobody here reaps it, and a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def shmserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """The commands, and two instances that run: `a`, on a port, and `b`, on a Unix socket."""
    folder = tmp_path_factory.mktemp("daemon")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
    environ = kept | {
        "XDG_RUNTIME_DIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONPATH": os.getcwd(),
    }
    commands = Commands(folder, environ, f"test-{os.getpid()}")
    for module in (
        "queue",
        "types",
        "click",
    ):  # what lies in the working directory is no part of us
        (folder / f"{module}.py").write_text("raise SystemExit('a stranger was imported')\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = commands.start("a", f"--port={port}", "--step-ms=20")
    assert said.startswith(f"shmserve: ready: http://127.0.0.1:{port} serves ")
    with socket.socket(socket.AF_UNIX) as killed_one:
        killed_one.bind(str(folder / "b.sock"))
    commands.start("b", "--uds=b.sock")
    yield commands
    pids = [each["pid"] for each in json.loads(commands("status", "--all", "--json"))]
    for name in ("a", "b"):
        commands("stop", f"--instance={commands.prefix}-{name}")
    assert not any(is_running(pid) for pid in pids)
    assert names(f"shmserve.{commands.prefix}") == []
    assert list((folder / "shmserve").iterdir()) == []
    assert not (folder / "b.sock").exists()


def get(commands: Commands, name: str, path: str) -> int:
    url = commands.status(name)["url"]
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_start_returns_when_it_serves_and_leaves_no_terminal_behind(shmserve: Commands) -> None:
    assert get(shmserve, "a", "/ready") == 200
    pid = shmserve.status("a")["pid"]
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/2") == str(shmserve.log("a"))
    assert shmserve.log("a").stat().st_mode & 0o777 == 0o600


def test_several_instances_are_told_apart_by_name_and_by_port(shmserve: Commands) -> None:
    line = shmserve("status", code=1)
    assert f"{shmserve.prefix}-a | {shmserve.prefix}-b" in line
    every = json.loads(shmserve("status", "--all", "--json"))
    assert [each["instance"] for each in every] == [f"{shmserve.prefix}-a", f"{shmserve.prefix}-b"]
    port = every[0]["url"].rpartition(":")[2]
    found = json.loads(shmserve("status", "--json", "--port", port))
    assert found["pid"] == every[0]["pid"]
    assert found["queue"]["max_running"] == 256
    shown = shmserve("status", "--all")
    assert str(shmserve.log("a")) in shown
    assert f"unix:{shmserve.folder}/b.sock" in shown


def test_unix_socket_is_private_replaces_a_stale_file_and_is_not_taken_from_who_lives(
    shmserve: Commands,
) -> None:
    path = shmserve.folder / "b.sock"
    assert path.stat().st_mode & 0o777 == 0o600
    line = shmserve.start("c", "--uds=b.sock", code=1)
    assert "b.sock is in use" in line
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"


def test_start_that_fails_ends_with_the_servers_own_line_and_its_log(shmserve: Commands) -> None:
    line = shmserve.start("x", "--port=0", "--model=/no/such.gguf", code=1).splitlines()[-1]
    assert line.startswith("shmserve: error: ")
    assert "/no/such.gguf" in line
    assert str(shmserve.log("x")) in line
    (line,) = shmserve.start("a", "--port=0", code=1).splitlines()
    assert f"'{shmserve.prefix}-a' is already running" in line


@pytest.mark.slow
def test_restart_drains_and_starts_the_same_command_line(shmserve: Commands) -> None:
    before = shmserve.status("a")
    url = before["url"].removeprefix("http://")
    connection = http.client.HTTPConnection(url, timeout=30)
    fields = {"prompt": "Once", "max_tokens": 30, "stream": True, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    said = shmserve("restart", f"--instance={shmserve.prefix}-a")
    assert said.startswith("shmserve: ready: ")
    assert response.read().rstrip().endswith(b"[DONE]")
    connection.close()
    after = shmserve.status("a")
    assert not is_running(before["pid"])
    assert after["pid"] != before["pid"]
    assert (after["url"], after["log_file"]) == (before["url"], before["log_file"])
    argv = Path(f"/proc/{after['pid']}/cmdline").read_bytes()
    assert argv.split(b"\0")[3:-1].count(b"--step-ms=20") == 1
    assert "ended; 0 requests were cut" in shmserve.log("a").read_text()


def test_status_and_stop_reach_an_instance_that_still_prepares_its_model(
    start: Callable[..., Any], until: Any, shmserve: Commands
) -> None:
    server = start(prepare_s=60)
    until(lambda: "preparing" in server.output(), "preparing")
    own = Commands(shmserve.folder, server.environ, "")
    assert "prepares its model for http://127.0.0.1:" in own("status", f"--instance={server.name}")
    own("stop", f"--instance={server.name}")
    assert server.wait() == 128 + signal.SIGTERM
    assert server.leftovers() == []


LAUNCH = """
import json, os, sys
from shmserve.daemon import launch
argv = [sys.executable, sys.argv[1], sys.argv[2]]
launch(argv, environ=os.environ, log_path=sys.argv[3], on_status=lambda text: print(text, flush=True))
"""


def test_interrupt_of_the_wait_ends_the_server_that_was_waited_for(
    environ: dict[str, str], tmp_path: Path
) -> None:
    name = f"test-{os.getpid()}-launch"
    options: dict[str, Any] = {
        "config": {"instance": name, "http": {"port": 0}},
        "modes": {},
        "prepare_s": 60,
    }
    options |= {"external": [], "strange": "", "restarts": {}}
    argv = [sys.executable, "-c", LAUNCH, DRIVER, json.dumps(options), str(tmp_path / "log")]
    with subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "preparing\n"
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(30) != 0
    assert list((tmp_path / "shmserve").iterdir()) == []


def test_ready_is_believed_only_of_the_process_that_was_started() -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as somebody,
    ):
        news.bind("")
        news.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for _ in range(2):
            somebody.sendto(b"READY=1\nSTATUS=serving", news.getsockname())
        assert _receive(news, os.getpid() + 1) == {}
        assert _receive(news, os.getpid()) == {"READY": "1", "STATUS": "serving"}
