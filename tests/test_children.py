import errno
import os
import signal
import subprocess
import sys

import pytest

from shmserve.boards import WORKER_BOARD
from shmserve.children import WORKER, Child
from shmserve.control import ControlLink
from shmserve.rings.board import Board
from shmserve.rings.segment import names


@pytest.fixture
def child():
    """A child that only waits for a signal."""
    name = Board.name(f"test-children-{os.getpid()}", 1, WORKER, 0)
    board = Board.create(name, WORKER_BOARD, 1)
    sleeping = Child.spawn(
        WORKER,
        0,
        1,
        board,
        lambda role, control: [sys.executable, "-c", "import signal; signal.pause()"],
        os.environ,
    )
    yield sleeping
    sleeping.kill()
    assert sleeping.wait(10)
    sleeping.close()


def until_it_is(child: Child, how: int) -> None:
    """Wait for a change of state, and leave it for the child's own question."""
    os.waitid(os.P_PID, child.pid, how | os.WNOWAIT)


def test_a_child_that_died_and_is_not_yet_reaped_did_not_stop(child):
    os.kill(child.pid, signal.SIGKILL)
    until_it_is(child, os.WEXITED)
    assert not child.poll_stopped()
    assert child.exit_reason() == "killed by SIGKILL"


def test_a_child_that_was_stopped_and_continued_is_known_to_be(child):
    os.kill(child.pid, signal.SIGSTOP)
    until_it_is(child, os.WSTOPPED)
    assert child.poll_stopped() and child.stopped_ns
    os.kill(child.pid, signal.SIGCONT)
    until_it_is(child, os.WCONTINUED)
    assert child.poll_stopped() and not child.stopped_ns
    assert not child.poll_stopped()


def test_a_real_time_signal_is_a_cause_of_death_like_any_other(child):
    os.kill(child.pid, signal.SIGRTMIN + 3)  # which has no name
    until_it_is(child, os.WEXITED)
    assert child.exit_reason() == f"killed by signal {signal.SIGRTMIN + 3}"
    assert child.death_cause == "signal"


def test_a_joiner_that_cannot_be_watched_is_refused_and_leaves_no_board():
    """Of another pid namespace, the kernel says 0."""
    name = Board.name(f"test-children-{os.getpid()}", 2, WORKER, 0)
    board = Board.create(name, WORKER_BOARD, 2)
    link, other = ControlLink.pair()
    with pytest.raises(OSError):
        Child.adopt(WORKER, 0, 2, board, link, 0)
    assert names(name.removeprefix("/")) == []
    link.close()
    other.close()


def test_a_child_for_whose_link_there_is_no_descriptor_leaves_no_board(monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ControlLink, "pair", none_left)
    name = Board.name(f"test-children-{os.getpid()}", 3, WORKER, 0)
    board = Board.create(name, WORKER_BOARD, 3)
    with pytest.raises(OSError, match="Too many open files"):
        Child.spawn(WORKER, 0, 3, board, lambda role, control: ["true"], os.environ)
    assert names(name.removeprefix("/")) == []


ADOPTING = """
import ctypes, os, subprocess
from shmserve.children import reap_adopted
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans are left to us, as to process 1
own = subprocess.Popen(["sleep", "60"])
reader, writer = os.pipe()
shell = ["sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!"]  # which ends before its child, however slow all is
left = int(subprocess.run(shell, stdin=reader, stdout=subprocess.PIPE, check=True).stdout)
os.close(writer)
os.waitid(os.P_PID, left, os.WEXITED | os.WNOWAIT)
reap_adopted({own.pid})
assert not os.path.exists(f"/proc/{left}")
assert own.poll() is None
own.kill()
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
reap_adopted({own.pid})
assert own.wait() == -9  # still ours to hear of
reap_adopted(())
"""


def test_who_is_left_to_us_as_process_1_is_reaped_and_our_own_are_not():
    done = subprocess.run([sys.executable, "-c", ADOPTING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
