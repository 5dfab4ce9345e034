"""What a real systemd must do with the units that `shmserve unit` prints: one function a promise. Runs inside the container.

Owns: the checks and their report, a JSON line each in REPORT. Never: runs on the host; systemd_boot.py puts it where it belongs,
as root of a machine on which nothing else runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from systemd_machine import (
    PORT,
    PYTHON,
    REPORT,
    START_OPTIONS,
    UNIT,
    ask,
    complete,
    install,
    is_active,
    is_serving,
    journal,
    main_pid,
    pid_of,
    restart_with,
    run,
    segments,
    show,
    status,
    until,
)


def units_are_accepted() -> str:
    install()
    verdict = subprocess.run(
        ["systemd-analyze", "verify", f"/etc/systemd/system/{UNIT}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verdict.returncode == 0, verdict.stderr
    complaints = [line for line in verdict.stderr.splitlines() if "shmserve" in line]
    assert not complaints, complaints
    return run("systemd-analyze", "security", UNIT, check=False).splitlines()[-1]


def active_only_after_ready() -> str:
    run("systemctl", "start", "--no-block", UNIT)
    texts: dict[str, None] = {}
    answers: list[int] = []
    while not is_active():
        texts[show()["StatusText"]] = None
        answers.append(ask("GET", "/ready")[0])
        assert show()["ActiveState"] in ("activating", "inactive", "active"), show()
    assert ask("GET", "/ready")[0] == 200
    assert 503 in answers, answers
    # A 200 comes a moment before systemd has read the READY that was sent with it, and no earlier.
    assert answers.count(200) <= 3, answers
    # From the bind on everybody is answered: a front end takes over from the lobby without a gap.
    assert 0 not in answers[answers.index(503) :], answers
    assert any("model.gguf" in text or "worker" in text for text in texts), texts
    code, body = complete(5)
    assert code == 200, body
    return f"{len(texts)} status texts on the way; answers {sorted(set(answers))}"


def root_sees_it_and_it_is_not_root() -> str:
    answer = status()
    owner = os.stat(f"/proc/{answer['pid']}").st_uid
    assert owner >= 61184, owner  # a dynamic user
    assert answer["state"] == "ready"
    for name in segments():
        found = os.stat(f"/dev/shm/{name}")
        assert (found.st_uid, found.st_mode & 0o777) == (owner, 0o600), name
    return f"uid {owner}, {len(segments())} segments"


def children_are_replaced_and_the_unit_stays() -> str:
    before = main_pid()
    for role in ("http", "worker"):
        pid = pid_of(role)
        os.kill(pid, signal.SIGKILL)
        until(lambda role=role, pid=pid: pid_of(role) not in (0, pid), f"another {role}")
        until(is_serving, f"service after the death of {role}")
    assert main_pid() == before
    assert show()["NRestarts"] == "0"
    assert complete(3)[0] == 200
    return "front end and worker"


def supervisor_is_restarted() -> str:
    old = main_pid()
    children = [row["pid"] for row in status()["children"]]
    os.kill(old, signal.SIGKILL)
    until(lambda: main_pid() not in (0, old) and is_serving(), "the restart")
    assert show()["NRestarts"] == "1"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    epochs = {name.split(".")[2] for name in segments()}
    assert len(segments()) == len(status()["children"]) + 1 + 2 * len(status()["channels"]), (
        segments()
    )
    return f"pid {old} -> {main_pid()}, epochs {sorted(epochs)}"


def watchdog_ends_what_hangs(role: str) -> str:
    """`role` is stopped; longer than the watchdog allows, shorter than the supervisor would wait itself."""
    restart_with("[Service]\nWatchdogSec=4\n")
    old = main_pid()
    children = [int(row["pid"]) for row in status()["children"]]
    began = time.monotonic()
    os.kill(old if role == "supervisor" else pid_of(role), signal.SIGSTOP)
    until(lambda: show()["Result"] == "watchdog" or main_pid() not in (0, old), "the watchdog")
    took_s = time.monotonic() - began
    until(lambda: main_pid() not in (0, old) and is_serving(), "the restart")
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)
    assert "Watchdog timeout" in journal(), journal()[-2000:]
    assert complete(3)[0] == 200
    return f"ended after {took_s:.1f} s"


def idle_is_healthy() -> str:
    old = main_pid()
    time.sleep(9)
    assert main_pid() == old
    assert is_serving()
    return "9 s at WatchdogSec=4"


LOADS_FROM_CACHE = """
import ctypes, mmap, os, shutil
path = os.environ["XDG_CACHE_HOME"] + "/compiled.so"
shutil.copy("/usr/lib/x86_64-linux-gnu/libgomp.so.1", path)
ctypes.CDLL(path)
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
except PermissionError:
    pass
else:
    raise SystemExit("code may be written into memory")
"""


def compiled_code_is_loaded_from_the_cache_only() -> str:
    """As the CPU kernels are: a file in the cache directory, made at run time, inside everything that hardens the unit."""
    script = Path("/opt/shmserve/loads.py")
    script.write_text(LOADS_FROM_CACHE)
    restart_with(f"[Service]\nExecStartPre=/usr/bin/python3 {script}\n")
    return "a file is mapped, memory that is writable and executable is refused"


def stop_drains_and_leaves_nothing() -> str:
    restart_with("")
    answers: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(complete(150, stream=True)))
    thread.start()
    until(lambda: status()["in_flight"] == 1, "the request")
    run("systemctl", "stop", "--no-block", UNIT)
    until(lambda: ask("GET", "/ready")[0] == 503, "the refusal")
    assert complete(1)[0] == 503
    thread.join()
    code, body = answers[0]
    assert code == 200, body
    assert body.rstrip().endswith(b"[DONE]"), body[-300:]
    until(lambda: show()["ActiveState"] == "inactive", "the end")
    assert show()["Result"] == "success", show()
    assert segments() == []
    assert not os.path.exists("/run/shmserve/shmserve")
    assert "ended; 0 requests were cut" in journal(), journal()[-2000:]
    return "the stream in flight came to its end"


def socket_listens_before_and_beyond_the_service() -> str:
    run("systemctl", "start", "shmserve.socket")
    assert not is_active()
    refused: list[str] = []
    is_over = threading.Event()

    def knock() -> None:
        while not is_over.is_set():
            try:
                socket.create_connection(("127.0.0.1", PORT), 5).close()
            except ConnectionRefusedError as error:
                refused.append(str(error))
            time.sleep(0.01)

    first = ask("GET", "/ready")
    assert first[0] in (200, 503), first
    thread = threading.Thread(target=knock)
    thread.start()
    try:
        codes = {first[0]: None}
        while not is_active():
            codes[ask("GET", "/ready")[0]] = None
        assert complete(3)[0] == 200
        run("systemctl", "restart", UNIT)
        until(is_serving, "service after the restart")
    finally:
        is_over.set()
        thread.join()
    assert 503 in codes, codes
    assert not refused, refused[:3]
    run("systemctl", "stop", "shmserve.socket", UNIT)
    assert segments() == []
    return f"answers while it loads {sorted(codes)}; none refused over a restart"


def user_manager_runs_the_user_unit() -> str:
    """A user's own systemd, without a login: started as a service, spoken to over its private socket."""
    folder, home = Path("/run/user/0"), Path("/root/.config/systemd/user")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.mkdir(parents=True, exist_ok=True)
    (home / UNIT).write_text(run(*PYTHON, "unit", "--user", *START_OPTIONS))
    environ = [f"--setenv=XDG_RUNTIME_DIR={folder}", "--setenv=HOME=/root"]
    properties = ["--unit=manager", "--property=Delegate=yes", "--property=Type=notify"]
    run("systemd-run", *environ, *properties, "/lib/systemd/systemd", "--user")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    try:
        run("systemctl", "--user", "start", UNIT)
        assert ask("GET", "/ready")[0] == 200
        assert complete(3)[0] == 200
        main = run("systemctl", "--user", "show", UNIT, "-p", "MainPID", "--value").strip()
        assert status()["pid"] == int(main)
        run("systemctl", "--user", "stop", UNIT)
        result = run("systemctl", "--user", "show", UNIT, "-p", "ActiveState,Result")
        assert result.split() == ["Result=success", "ActiveState=inactive"], result
        assert segments() == []
        assert not list((folder / "shmserve").iterdir())
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
        run("systemctl", "stop", "manager")
    return f"pid {main}"


def wrong_settings_are_not_tried_for_ever() -> str:
    folder = Path("/etc/systemd/system")
    text = (folder / UNIT).read_text().replace("--step-ms", "--no-such-option")
    (folder / UNIT).write_text(text)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", UNIT, check=False)
    until(lambda: show()["ActiveState"] == "failed", "the failure")
    assert show()["NRestarts"] == "0", show()
    run("systemctl", "reset-failed", UNIT)
    return "exit code 2 is final"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("the printed units are accepted", units_are_accepted),
    ("active only after READY, with progress before", active_only_after_ready),
    ("root's status finds it, and it runs as a user of its own", root_sees_it_and_it_is_not_root),
    (
        "SIGKILL of a child: replaced, the unit stays active",
        children_are_replaced_and_the_unit_stays,
    ),
    ("SIGKILL of the supervisor: restarted, nothing left", supervisor_is_restarted),
    ("watchdog: a stopped worker", lambda: watchdog_ends_what_hangs("worker")),
    ("watchdog: a stopped front end", lambda: watchdog_ends_what_hangs("http")),
    ("watchdog: a stopped supervisor", lambda: watchdog_ends_what_hangs("supervisor")),
    ("watchdog: idle is healthy", idle_is_healthy),
    ("kernels can be loaded, JIT cannot", compiled_code_is_loaded_from_the_cache_only),
    ("stop: drains, ends clean, leaves nothing", stop_drains_and_leaves_nothing),
    ("socket activation", socket_listens_before_and_beyond_the_service),
    ("--user: a user's own manager runs it", user_manager_runs_the_user_unit),
    ("a wrong command line is not tried again", wrong_settings_are_not_tried_for_ever),
)


def inside() -> int:
    """Run every check; the report, a JSON line each, goes to the bound folder."""
    num_failed = 0
    with open(f"{REPORT}/checks.jsonl", "w", buffering=1) as report:
        for name, check in CHECKS:
            began = time.monotonic()
            try:
                row = {"check": name, "ok": True, "detail": check()}
            except (AssertionError, OSError, subprocess.SubprocessError, ValueError) as error:
                num_failed += 1
                row = {"check": name, "ok": False, "detail": f"{type(error).__name__}: {error}"}
                row["journal"] = run(
                    "journalctl", "-u", UNIT, "-n", "40", "--no-pager", check=False
                )
            row["seconds"] = round(time.monotonic() - began, 1)
            report.write(json.dumps(row) + "\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(inside())
