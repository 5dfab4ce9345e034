"""The server under soak, and what is looked at from outside: processes, descriptors, memory, segments, boards, rings, log.

Owns: the start and the end of the server, and the laws that must hold whenever nothing is asked of it. Never: believes what the server says
over its API; boards are read from shared memory, the rest from /proc.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mortal
from bench_common import ROOT, stop_process
from overload_run import rss_bytes

from shmserve.crash_dump import MOST_KEPT, SUFFIX
from shmserve.instance_socket import InstanceError, ask, runtime_dir
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import RingStats, RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError, names

TCP_STATES: Final = {
    "01": "established",
    "04": "closing",
    "05": "closing",
    "08": "left by its client",  # CLOSE_WAIT
    "0A": "listening",
}
READY_S: Final = 120.0
GONE_S: Final = 40.0  # the drain of an idle server takes a moment; a machine may be busy

IDLE_WORDS: Final = {
    "worker": ("running", "waiting", "paused", "kv_blocks_used", "num_bad_records"),
    "http": (
        *("in_flight", "waiting", "waiting_tokens", "body_bytes", "connections", "mailbox_bytes"),
        *("clients_congested", "client_backlog_bytes", "num_bad_records"),
    ),
    "supervisor": ("crash_dumps_waiting", "num_crash_dumps_lost", "draining"),
}
"""Words of the boards that are zero whenever nothing is asked."""
ALARMS: Final = re.compile(
    r"Traceback \(most recent call last\)|never retrieved|was never awaited|Task was destroyed|ResourceWarning|unclosed"
)


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    pid: int
    life: (
        int  # the clock tick at which it began: with the pid, a process is told from its successor
    )
    rss: int
    num_threads: int
    descriptors: tuple[tuple[str, int], ...]  # of each kind, how many


@dataclass(frozen=True, slots=True)
class Look:
    """All of the server at one moment; `words` by role."""

    at_s: float
    processes: dict[str, Process]
    strangers: tuple[str, ...]  # processes of this server that are none of the three
    segments: tuple[str, ...]  # without instance and epoch
    words: dict[str, dict[str, int]] = field(default_factory=dict)
    rings: dict[str, RingStats] = field(default_factory=dict)

    def has_same_descriptors(self, other: Look) -> bool:
        mine = {role: process.descriptors for role, process in self.processes.items()}
        return mine == {role: process.descriptors for role, process in other.processes.items()}

    def busy_words(self) -> list[str]:
        """What is not zero, and should be; what a ring still holds."""
        busy = [
            f"{role}: {word} {self.words.get(role, {}).get(word, 'unknown')}"
            for role, idle in IDLE_WORDS.items()
            for word in idle
            if self.words.get(role, {}).get(word) != 0
        ]
        for name, ring in self.rings.items():
            written = ring.producer["write_cursor"]
            if not ring.consumer["read_cursor"] == written == ring.producer["claim_cursor"]:
                busy.append(f"{name} ring: {ring.depth} slots, {ring.num_torn} torn")
            if ring.producer["pending"] or ring.producer["dropped"]:
                lost = ring.producer["dropped"]
                busy.append(f"{name} ring: {ring.producer['pending']} pending, {lost} dropped")
        return busy


class SoakServer:
    """One `shmserve start` in a runtime directory of its own. `with` starts it; `end` drains it and says what it left behind."""

    def __init__(self, folder: Path, flags: tuple[str, ...]) -> None:
        self.name = f"soak-{os.getpid()}"
        self.log = folder / "log"
        self._folder = folder
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        self._environ |= {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        self._environ["PYTHONPATH"] = str(ROOT)
        self._environ |= {"XDG_STATE_HOME": str(folder / "state")}  # crash dumps
        argv = [sys.executable, "-m", "shmserve", "start", "--port=0"]
        argv += [f"--instance={self.name}", *flags]
        with open(self.log, "wb") as log:
            self.process = mortal.start(
                argv, env=self._environ, stdout=log, stderr=log, start_new_session=True
            )
        self.port = 0

    def __enter__(self) -> SoakServer:
        deadline = time.monotonic() + READY_S
        while "shmserve: ready:" not in self.output():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise SystemExit(f"the server did not become ready:\n{self.output()}")
            time.sleep(0.1)
        self.port = int(self.status()["url"].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        """For a soak that failed: whatever is left is ended, by its number, stopped ones too."""
        for pid in self._ours():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        stop_process(self.process, GONE_S)
        for pid in self._ours():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """Raises InstanceError if nobody answers."""
        return ask(runtime_dir(self._environ), self.name, {"type": "status"}, 10.0)

    def is_whole(self) -> bool:
        """Every process is there and ready, says the supervisor."""
        try:
            rows = self.status()["children"]
        except InstanceError:
            return False
        return all(row["state"] == "ready" and row["pid"] for row in rows)

    def pids(self) -> dict[str, int]:
        """By role. Raises InstanceError."""
        found = {str(row["role"]): int(row["pid"]) for row in self.status()["children"]}
        return {"supervisor": self.process.pid} | found

    def processes_by_board(self) -> dict[str, int]:
        """As `pids`, of those that live, by what they write themselves: the supervisor need not answer."""
        found = {role: words["pid"] for role, words in self._words().items() if words["pid"]}
        return {"supervisor": self.process.pid} | found

    def look(self) -> Look:
        """Everything, once. Of a server in repair some of it is missing. Nobody is asked: an answer takes a socket."""
        processes = {}
        for role, pid in self.processes_by_board().items():
            try:
                processes[role] = process_of(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just died
        known = {process.pid for process in processes.values()}
        strangers = tuple(f"pid {p}: {c}" for p, c in self._ours().items() if p not in known)
        return Look(
            time.monotonic(),
            processes,
            strangers,
            tuple(sorted(name.split(".", 3)[3] for name in names(f"shmserve.{self.name}."))),
            self._words(),
            self._rings(),
        )

    def _ours(self) -> dict[int, str]:
        """Every process that has our runtime directory in its environment: the children, and whatever they started."""
        mark = f"XDG_RUNTIME_DIR={self._folder}\0".encode()
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes() + b"\0":
                    found[int(entry)] = (
                        Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")
                    )
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended, or is another user's
        return found

    def _words(self) -> dict[str, dict[str, int]]:
        found = {}
        for name in boards_of(self.name):
            role = re.sub(r"\d+$", "", name.split(".")[-2])
            try:
                reader = BoardReader.attach(name)
            except SegmentError:
                continue
            found[role] = reader.words()
            reader.close()
        return found

    def _rings(self) -> dict[str, RingStats]:
        found = {}
        for name in rings_of(self.name):
            try:
                view = RingView(name)
            except SegmentError:
                continue
            found[name.rpartition(".")[2]] = view.stats()
            view.close()
        return found

    def end(self) -> list[str]:
        """SIGTERM, and what is wrong with how it ended."""
        wrong = []
        if self.process.poll() is not None:
            return [f"the server had ended by itself, with code {self.process.returncode}"]
        self.process.terminate()
        try:
            code = self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            wrong.append(f"it has not ended {GONE_S:g} s after SIGTERM")
            code = 0
        if code:
            wrong.append(f"exit code {code} after SIGTERM")
        if "0 requests were cut" not in self.output():
            wrong.append("its last words are not that 0 requests were cut")
        wrong += [f"left behind: {command}" for command in self._ours().values()]
        wrong += [f"left behind: segment {name}" for name in names(f"shmserve.{self.name}.")]
        left = (self._folder / "shmserve").glob("*")
        dumps = [path.name for path in (self._folder / "state").rglob("*") if path.is_file()]
        if len(dumps) > MOST_KEPT or not all(name.endswith(SUFFIX) for name in dumps):
            wrong.append(f"crash dumps: {dumps}, at most {MOST_KEPT} whole ones are kept")
        return wrong + [f"left behind: file {path.name}" for path in left]

    def alarms(self) -> list[str]:
        """Lines of the log that no fault excuses, each with the one behind it."""
        lines = self.output().splitlines()
        return [
            " | ".join(lines[max(0, i - 1) : i + 2])
            for i, line in enumerate(lines)
            if ALARMS.search(line)
        ]


def process_of(pid: int) -> Process:
    """Raises FileNotFoundError or ProcessLookupError if it is gone."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    kinds: Counter[str] = Counter()
    sockets = _socket_kinds(pid)
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # closed since the listing
        kinds[_kind_of(target, sockets)] += 1
    return Process(pid, int(stat[19]), rss_bytes(pid), int(stat[17]), tuple(sorted(kinds.items())))


def _socket_kinds(pid: int) -> dict[str, str]:
    """What each socket is, by its inode, as the process' network namespace shows it."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                state = TCP_STATES.get(fields[3], fields[3])
                found[fields[9]] = f"tcp {state}"
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        found[fields[6]] = f"unix {' '.join(fields[7:])}".rstrip()
    return found


def _kind_of(target: str, sockets: Mapping[str, str]) -> str:
    """A descriptor by what it is: names with an inode or an epoch in them would differ from life to life."""
    kind, is_anonymous, inode = target.partition(":[")
    if kind == "socket":
        return sockets.get(inode.rstrip("]"), "socket that is closed")
    if is_anonymous:
        return kind
    return "segment" if target.startswith("/dev/shm/") else target
