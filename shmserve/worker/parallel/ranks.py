"""The other ranks of a worker as rank 0 has them: started, watched, ended.

Owns: their processes, and one control link to each, whose end of file ends them. Never: computes, or starts one anew. If one of them ends
before it is told to, so does the whole worker: the supervisor starts another, with new channels, as it does for any death.

    rank 0 gone      end of file on each link, and SIGKILL by the kernel (PR_SET_PDEATHSIG): the others end at once
    another gone     a thread of rank 0 hears of it, whatever the main thread waits for; it says so to the supervisor, kills the others and
                     ends this process. A collective operation that one rank never joins would wait for days
    another hangs    so does the step: the supervisor ends rank 0 by its rule for steps (health.py)

`start` and `close` in the main thread of rank 0, the watch in a thread of its own.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmserve.child import name_of_signal, with_source_tree
from shmserve.control import ControlError, ControlLink, Message
from shmserve.devices import environment_of_rank

log = logging.getLogger(__name__)

SETTLE_S: Final = 0.1
"""Of several that end together, the one that was killed is the reason of the others: so long one waits to see them all."""
CLOSE_S: Final = 2.0
DEATH_PATIENCE_S: Final = 1.0

Lost = Callable[[str], None]
"""Told in one line why the worker cannot go on. It does not return."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    link: ControlLink
    error: str = ""  # its own last words

    def hear_out(self) -> None:
        """Take its last words, if there are any."""
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        if not poll.poll(0):
            return
        try:
            received = self.link.receive()
        except (OSError, ControlError) as error:
            self.error = f"its link broke: {error}"
            return
        if received is not None:
            self.error = " ".join(str(received[0].get("error", "")).split())

    def fate(self) -> tuple[int, str]:
        """How it ended, in words, and before it how little that explains of the others' ends."""
        code = self.process.poll()
        if code is not None and code < 0:
            return 0, f"was killed by {name_of_signal(-code)}"
        if self.error:
            return 1, f"failed: {self.error}"
        return (3, "hung up") if code is None else (2, f"exited with code {code}")


class Ranks:
    """All ranks of one worker but this one."""

    def __init__(self, lost: Lost) -> None:
        self._lost = lost
        self._ranks: list[_Rank] = []
        self._is_closing = False
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def start(
        self, welcomes: Sequence[tuple[Message, Sequence[int]]], environ: Mapping[str, str]
    ) -> None:
        """Start one process for each welcome, which is its first message, ranks 1, 2 and so on. Raises OSError."""
        for number, (welcome, fds) in enumerate(welcomes, 1):
            ours, theirs = ControlLink.pair()
            try:
                process = subprocess.Popen(
                    _command(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=with_source_tree(environment_of_rank(number, environ)),
                )
            finally:
                theirs.close()
            self._ranks.append(_Rank(number, process, ours))
            ours.send(welcome, fds)
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def await_death(self, timeout_s: float = DEATH_PATIENCE_S) -> None:
        """Something failed in the main thread: if another rank is why, let the watch say so, which ends this process."""
        if self._is_ending.wait(timeout_s):
            time.sleep(timeout_s)

    def close(self) -> None:
        """End them all, and reap them. Once is enough."""
        if self._is_closing:
            return
        self._is_closing = True
        for rank in self._ranks:
            rank.link.sock.shutdown(socket.SHUT_RDWR)  # end of file there, and here for the watch
        self._await_ends(CLOSE_S)
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()
        if self._thread is not None:
            self._thread.join()
        for rank in self._ranks:
            rank.link.close()

    def _watch(self) -> None:
        """Sleep until the first of them says its last word, or is gone."""
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank.link.fileno(), select.POLLIN)
        poll.poll()
        self._is_ending.set()
        time.sleep(SETTLE_S)
        if self._is_closing:
            return
        for rank in self._ranks:
            rank.hear_out()
        guilty = min(self._ranks, key=_Rank.fate)
        how = guilty.fate()[1]
        for rank in self._ranks:
            rank.process.kill()
        self._await_ends(
            SETTLE_S
        )  # as a rule they are gone then, and their memory is free for those that come
        of_all = f"rank {guilty.number} of {len(self._ranks) + 1} (pid {guilty.process.pid})"
        self._lost(f"{of_all} {how}")

    def _await_ends(self, timeout_s: float) -> None:
        """Reap those that end in time."""
        deadline = time.monotonic() + timeout_s
        while any(rank.process.poll() is None for rank in self._ranks):
            if time.monotonic() >= deadline:
                return
            time.sleep(0.005)


def end_worker(tell: Callable[[Message], Any]) -> Lost:
    """What rank 0 does when another is lost: log it, `tell` the supervisor, and be gone, wherever its main thread is."""

    def lost(reason: str) -> None:
        log.error("%s: the worker ends with it", reason)
        try:
            tell({"type": "failed", "error": reason})
        except OSError as error:
            log.warning("nobody hears of it: %s", error)
        logging.shutdown()
        os._exit(1)

    return lost


def _command(fd: int) -> list[str]:
    return [sys.executable, "-P", "-m", "shmserve.worker.parallel", "--link", f"fd:{fd}"]
