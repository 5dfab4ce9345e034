import os
import signal
import sys

import pytest

from shmserve.boards import WORKER_BOARD
from shmserve.children import WORKER, Child
from shmserve.rings.board import Board


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
