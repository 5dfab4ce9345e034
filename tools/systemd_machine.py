"""The machine on which systemd_checks.py runs: where things are in it, and how its systemd and its server are asked.

Runs inside the container, as root of a machine on which nothing else runs; on the host only its constants are read.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PATIENCE_S: Final = 60.0
SOURCE: Final = "/opt/shmserve/source"
SITE: Final = "/opt/shmserve/site-packages"
MODEL: Final = "/opt/shmserve/model.gguf"
REPORT: Final = "/opt/shmserve/report"
PYTHON = ["/usr/bin/python3", "-P", "-m", "shmserve"]
PORT = 8000
UNIT = "shmserve.service"
START_OPTIONS: Final = (
    *("--port", str(PORT), "--runner", "simulated", "--model", MODEL),
    *("--step-ms", "20", "--drain-timeout", "20", "--hang-timeout", "60"),
)


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(argv)}: {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def show(unit: str = UNIT) -> dict[str, str]:
    text = run(
        "systemctl", "show", unit, "-p", "ActiveState,SubState,StatusText,MainPID,NRestarts,Result"
    )
    return dict(line.split("=", 1) for line in text.splitlines())


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}; {show()}"
        time.sleep(0.05)
    return value


def ask(method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
    """(status, body); (0, b"") if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (ConnectionError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def complete(num_tokens: int, stream: bool = False) -> tuple[int, bytes]:
    fields = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": stream}
    return ask("POST", "/v1/completions", fields)


def status() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(*PYTHON, "status", "--json"))
    return answer


def pid_of(role: str) -> int:
    return next(int(row["pid"]) for row in status()["children"] if row["role"] == role)


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith("shmserve.")]


def is_active() -> bool:
    return show()["ActiveState"] == "active"


def is_serving() -> bool:
    return is_active() and ask("GET", "/ready")[0] == 200


def main_pid() -> int:
    return int(show()["MainPID"])


def install(*more_options: str, drop_in: str = "") -> None:
    """Write the units that the command prints."""
    folder = Path("/etc/systemd/system")
    options = (*START_OPTIONS, *more_options)
    (folder / UNIT).write_text(run(*PYTHON, "unit", *options))
    (folder / "shmserve.socket").write_text(run(*PYTHON, "unit", "--socket", *options))
    extra = folder / f"{UNIT}.d"
    shutil.rmtree(extra, ignore_errors=True)
    if drop_in:
        extra.mkdir()
        (extra / "test.conf").write_text(drop_in)
    run("systemctl", "daemon-reload")


def restart_with(drop_in: str) -> None:
    """The unit anew with this drop-in, until it serves."""
    install(drop_in=drop_in)
    run("systemctl", "restart", UNIT)
    until(is_serving, "service")


def journal() -> str:
    """What the unit, and systemd of it, has said."""
    return run("journalctl", "-u", UNIT, "-o", "cat", "--no-pager", check=False)
