"""A crew that has no room for one more: the others serve on."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.children import WORKER
from shmserve.crew import Crew, SupervisorError
from shmserve.health import RestartPolicy
from shmserve.instance_socket import InstanceError
from shmserve.posts import Post
from shmserve.rings.segment import SegmentError

FAULTS = [
    SegmentError(errno.ENOSPC, "no room in /dev/shm"),
    OSError(errno.EMFILE, "Too many open files"),
    InstanceError("cannot write the lock"),
]


@pytest.fixture
def crew() -> Any:
    """One of a single worker's post, whose wiring raises `fault`; `said` and `due` are what it says and plans."""
    made: Any = Crew.__new__(Crew)
    made.fault = None

    def fail(*_: object) -> None:
        raise made.fault

    made.said, made.due, made.counted = [], [], []
    made.is_leaving = False
    made._wiring = SimpleNamespace(
        next_epoch=lambda: 7, new_board=fail, board=SimpleNamespace(add=made.counted.append)
    )
    made._report = SimpleNamespace(say=lambda text, is_warning=False: made.said.append(text))
    made._loop = SimpleNamespace(after=lambda seconds, _: made.due.append(seconds))
    made.posts = [Post(WORKER, 0, True, RestartPolicy(1.0))]
    return made


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_who_wants_to_join_where_there_is_no_room_is_told_why(crew: Any, fault: Exception) -> None:
    crew.fault = fault
    said = crew.join(WORKER, 0, None, 77)
    assert str(fault).endswith(said) and "Errno" not in said
    assert crew.posts[0].child is None


@pytest.mark.parametrize(
    "fault", [*FAULTS, SupervisorError("cannot start worker 0")], ids=lambda f: type(f).__name__
)
def test_a_successor_for_whom_there_is_no_room_is_tried_again(crew: Any, fault: Exception) -> None:
    crew.fault = fault
    (post,) = crew.posts
    for _ in range(3):
        crew._refill(post)
    assert crew.due == [1.0, 2.0, 4.0]
    said, times = crew.said[0].split("; ")
    assert str(fault).endswith(said) and "Errno" not in said and times == "again in 1 s"
    assert crew.counted[:2] == ["worker_restarts", "worker_restarts_failed"]
    assert post.num_deaths["failed"] == 3
