"""One child process: how it is started, spoken to, watched and ended.

Owns: the Popen (or, for a process that joined by hand, its pidfd), the supervisor's end of the control link, the board.
Never: decides; `supervisor.py` does. A child lives one life: its successor is another Child with a greater epoch.

    born --welcome--> loading --"ready"--> ready --death--> gone          and beside it: stopped, hung (health.py)

SIGINT, SIGTERM and SIGHUP are blocked in a child from its first instruction: the mask is inherited through exec, so a Ctrl-C
that reaches the whole group cannot kill one between its exec and its own signal set-up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Final

from shmserve.boards import HTTP_BOARD, WORKER_BOARD
from shmserve.child import name_of_signal, with_source_tree
from shmserve.control import ControlError, ControlLink, Message
from shmserve.health import Vitals
from shmserve.rings.board import Board
from shmserve.rings.board_table import BoardSpec

WORKER: Final = "worker"
HTTP: Final = "http"
BOARD_SPECS: Final[Mapping[str, BoardSpec]] = {WORKER: WORKER_BOARD, HTTP: HTTP_BOARD}
TERMINAL_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Command = Callable[[str, str], list[str]]
"""argv for a role and its --control argument."""


def child_command(role: str, control: str) -> list[str]:
    """The argv of the real children. -P: a file in the working directory must not shadow a module of theirs."""
    return [sys.executable, "-P", "-m", f"shmserve.{role}", "--control", control]


def child_environment(role: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What a child of `role` finds in its environment."""
    keys = ("SHMSERVE_API_KEY", "SHMSERVE_ADMIN_KEY")  # they need the digests only
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS")
    env = {key: value for key, value in environ.items() if key not in own + keys}
    if role == WORKER:
        # Idle OpenMP threads sleep instead of spinning; read once, when torch is loaded.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return with_source_tree(env)


def remove(board: Board) -> None:
    """Unlink a board and close it."""
    board.segment.unlink()
    board.close()


def reap_adopted(own: Container[int]) -> None:
    """As process 1 of a container: reap whom others have left to us (the ranks of a worker that was killed), and nobody of `own`."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in own:
            return  # one of ours has a signal of its own on the way, and we are called again
        os.waitpid(found.si_pid, os.WNOHANG)


class Child:
    """A process that serves as `role` number `index`. One thread: the supervisor's."""

    def __init__(
        self,
        role: str,
        index: int,
        epoch: int,
        board: Board,
        link: ControlLink,
        process: subprocess.Popen[bytes] | None,
        pid: int,
        pidfd: int = -1,
    ) -> None:
        self.role = role
        self.index = index
        self.epoch = epoch
        self.board = board
        self.link = link
        self.pid = pid
        self.is_ready = False
        self.has_drained = False
        self.num_cut: int | None = None  # by its own word, at its end
        self.is_link_open = True
        self.stopped_ns = 0
        self.grace_ns = time.monotonic_ns()
        self.silent_since_ns = 0  # when a look found it silent (health_rounds.py); 0: none did
        self.failure = ""  # the child's own last words
        self.kill_reason = ""
        self._kill_cause = ""
        self._process = process
        self._pidfd = pidfd
        link.set_nonblocking()

    @classmethod
    def spawn(
        cls,
        role: str,
        index: int,
        epoch: int,
        board: Board,
        command: Command,
        environ: Mapping[str, str],
    ) -> Child:
        """Start the process with its end of a new control link. Raises OSError if that fails; the board is gone then."""
        try:
            ours, theirs = ControlLink.pair()
        except OSError:
            remove(board)
            raise
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        try:
            process = subprocess.Popen(
                command(role, f"fd:{theirs.fileno()}"),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout is the supervisor's: what a child prints is talk
                env=child_environment(role, environ),
            )
        except BaseException:
            ours.close()
            remove(board)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        return cls(role, index, epoch, board, ours, process, process.pid)

    @classmethod
    def adopt(
        cls, role: str, index: int, epoch: int, board: Board, link: ControlLink, pid: int
    ) -> Child:
        """Take in a process that came over `link`. Raises OSError if it is gone, or not to be seen; the board is gone then, too."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            remove(board)
            raise
        return cls(role, index, epoch, board, link, None, pid, pidfd)

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @property
    def is_external(self) -> bool:
        """True if it was started by hand and joined."""
        return self._process is None

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send; one that is gone, or has not read for hundreds of messages, is killed and found dead in its turn."""
        if not self.is_link_open:
            return
        try:
            self.link.send(message, fds)
        except BlockingIOError:
            self.kill("it does not read its control link", "protocol")
        except OSError:
            return  # gone: its end of file and its exit status are on their way

    def receive(self) -> Iterator[Message]:
        """Messages until none is left. Clears `is_link_open` at end of file. Descriptors sent by a child are not kept."""
        while self.is_link_open:
            try:
                received = self.link.receive()
            except BlockingIOError:
                return
            except (OSError, ControlError) as error:
                self.kill(f"it broke its control link: {error}", "protocol")
                self.is_link_open = False
                return
            if received is None:
                self.is_link_open = False
                return
            message, fds = received
            for fd in fds:
                os.close(fd)
            yield message

    def exit_reason(self) -> str | None:
        """Why it is gone, in words; None while it lives. Reaps it."""
        if self._process is None:
            return None if self.is_link_open else self._explain("it left its control link")
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            return self._explain(f"killed by {name_of_signal(-code)}")
        return self._explain(f"exited with code {code}")

    @property
    def death_cause(self) -> str:
        """Why it is gone, as one of DEATH_CAUSES. Only of one that is."""
        if self._kill_cause:
            return self._kill_cause
        if self.failure:
            return "failed"
        code = self._process.returncode if self._process is not None else 0
        return "signal" if code < 0 else "exit"

    def _explain(self, how: str) -> str:
        why = self.failure or self.kill_reason
        return f"{why} ({how})" if why else how

    def poll_stopped(self) -> bool:
        """Ask the kernel whether it was stopped or continued; True if that changed."""
        if self._process is None or self._process.returncode is not None:
            return False
        was_stopped = bool(self.stopped_ns)
        options = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while True:
            try:
                found = os.waitid(os.P_PID, self.pid, options)
            except ChildProcessError:
                break  # dead and not yet reaped: Linux has no stop to tell of; exit_reason() is to be asked
            if found is None:
                break
            if found.si_code == os.CLD_CONTINUED:
                self.stopped_ns = 0
                self.grace_ns = time.monotonic_ns()  # its heartbeat is old, and that is no fault
            else:
                self.stopped_ns = time.monotonic_ns()
        return was_stopped != bool(self.stopped_ns)

    def vitals(self) -> Vitals:
        board = self.board
        return Vitals(
            heartbeat_ns=board["heartbeat_ns"],
            phase=board["phase"],
            phase_since_ns=board["phase_since_ns"],
            expected_step_ns=board["expected_step_ns"] if self.role == WORKER else 0,
            grace_ns=self.grace_ns,
            stopped_ns=self.stopped_ns,
            is_ready=self.is_ready,
        )

    def kill(self, reason: str = "", cause: str = "") -> None:
        """SIGKILL. The reason is what its death will be explained by, the cause (of DEATH_CAUSES) what it counts as."""
        self.kill_reason = self.kill_reason or reason
        self._kill_cause = self._kill_cause or cause
        if self._process is not None:
            self._process.kill()
            return
        if self._pidfd < 0:
            return  # closed: it is buried
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return  # gone already: its link says so

    def wait(self, timeout_s: float) -> bool:
        """Reap it; False if it is still there after `timeout_s`. For the last tidying up only."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the link and remove the board."""
        self.link.close()
        self.is_link_open = False
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        remove(self.board)
