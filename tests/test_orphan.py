"""What is removed when the supervisor was killed, and what is not; and that a front end that is stuck ends all the same."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.boards import HTTP_BOARD
from shmserve.instance_socket import InstanceLock, LockRecord, runtime_dir
from shmserve.orphan import remove_leftovers
from shmserve.rings.board import Board
from shmserve.rings.segment import Segment, names, sweep

_numbers = itertools.count()
NewBoard = Callable[[int], Board]


@pytest.fixture
def instance() -> Iterator[str]:
    name = f"test{os.getpid()}-orphan{next(_numbers)}"
    yield name
    left = sweep(f"shmserve.{name}.")
    assert left == [] and names(f"shmserve.{name}.") == []


@pytest.fixture
def new_board(instance: str) -> NewBoard:
    """new_board(index): the board of front end `index`."""
    return lambda index: Board.create(Board.name(instance, 1, "http", index), HTTP_BOARD, 1)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}


def dead_lock(environ: dict[str, str], name: str, pid: int) -> Path:
    """The files of an instance whose supervisor was killed."""
    directory = runtime_dir(environ)
    lock = InstanceLock.claim(directory, name)
    lock.record(LockRecord(pid, "http://127.0.0.1:1", 7))
    lock.listen().close()
    lock.abandon()
    return Path(directory)


def ended_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_the_last_one_removes_its_board_what_nobody_owns_and_the_instances_files(
    instance: str, new_board: NewBoard, environ: dict[str, str]
) -> None:
    directory = dead_lock(environ, instance, ended_pid())
    assert len(list(directory.iterdir())) == 2
    own, dead = new_board(0), new_board(1)
    dead.close()  # its owner is gone, its name is not
    remove_leftovers(own.segment, environ, 0.0)
    assert names(f"shmserve.{instance}.") == []
    assert list(directory.iterdir()) == []
    own.close()


def test_what_a_sibling_owns_stays_and_so_do_the_files(
    instance: str, new_board: NewBoard, environ: dict[str, str]
) -> None:
    directory = dead_lock(environ, instance, ended_pid())
    own, sibling = new_board(0), new_board(1)
    remove_leftovers(own.segment, environ, 0.0)
    assert names(f"shmserve.{instance}.") == [sibling.segment.name]
    assert len(list(directory.iterdir())) == 2
    remove_leftovers(sibling.segment, environ, 0.0)
    assert list(directory.iterdir()) == []
    own.close()
    sibling.close()


def test_a_name_that_a_new_start_holds_is_left_to_it(
    instance: str, new_board: NewBoard, environ: dict[str, str]
) -> None:
    directory = dead_lock(environ, instance, ended_pid())
    successor = InstanceLock.claim(str(directory), instance)
    own = new_board(0)
    remove_leftovers(own.segment, environ, 0.0)
    assert len(list(directory.iterdir())) == 2
    assert successor.former.epoch == 7
    successor.release()
    own.close()


STUCK = """
import os, socket, sys, time
from shmserve import orphan
from shmserve.control import ControlLink
from shmserve.rings.segment import Segment
orphan.GRACE_S = 0.1
link = ControlLink(socket.socket(fileno=int(sys.argv[1])))
orphan.OrphanGuard(link, Segment.from_fd(sys.argv[2], int(sys.argv[3])), os.environ)
print("stuck", flush=True)
while True:
    time.sleep(60)
"""


def test_a_process_that_is_stuck_is_ended_by_its_guard_when_the_supervisor_is_gone(
    instance: str, new_board: NewBoard, environ: dict[str, str]
) -> None:
    board = new_board(0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    board_fd = os.dup(board.segment.fd)
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(theirs.fileno()), board.segment.name, str(board_fd)],
        pass_fds=(theirs.fileno(), board_fd),
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as stuck:
        theirs.close()
        os.close(board_fd)
        assert stuck.stdout is not None and stuck.stderr is not None
        assert stuck.stdout.readline() == "stuck\n"
        ours.send(b"{}")  # unread words are no end
        with pytest.raises(subprocess.TimeoutExpired):
            stuck.wait(0.5)
        ours.close()
        assert stuck.wait(30) == 1
    assert names(f"shmserve.{instance}.") == []
    board.close()


def test_segments_are_named_so_that_the_instance_can_be_told(instance: str) -> None:
    board = Board.create(Board.name(instance, 12, "worker", 3), HTTP_BOARD, 12)
    assert board.segment.name.removeprefix("/").rsplit(".", 3)[0] == f"shmserve.{instance}"
    board.segment.unlink()
    board.close()
    assert isinstance(board.segment, Segment)
