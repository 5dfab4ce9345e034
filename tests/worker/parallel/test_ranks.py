"""The other ranks as processes: whoever of them ends, the worker hears of it, with the reason; and they end with it."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.worker.parallel import ranks as ranks_module
from shmserve.worker.parallel.ranks import Ranks

PATIENCE_S = 30.0
# What a rank does with its link, as far as rank 0 sees it. It tells that it runs by a file.
PREAMBLE = """
import os, signal, sys, time
from shmserve.control import ControlLink
link = ControlLink.connect(sys.argv[1])
welcome, fds = link.receive()
def begun(): open(welcome["file"], "w").close()
"""
WAIT = PREAMBLE + "begun()\nlink.receive()\n"
STUBBORN = PREAMBLE + "begun()\nlink.receive()\nsignal.pause()\n"
FAIL = PREAMBLE + "link.send({'type': 'failed', 'error': 'no  such\\ntensor'})\nlink.receive()\n"
FAIL_WHEN_TOLD = (
    PREAMBLE
    + """begun()
while not os.path.exists(welcome["file"] + ".go"): time.sleep(0.01)
link.send({"type": "failed", "error": "the other one is gone"})
link.receive()
"""
)
EXIT = PREAMBLE + "sys.exit(7)\n"


class Started:
    """Ranks that run these scripts; `said` is what was lost."""

    def __init__(self, monkeypatch, folder, *scripts: str) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        left = list(scripts)
        monkeypatch.setattr(
            ranks_module,
            "_command",
            lambda fd: [sys.executable, "-c", left.pop(0), f"fd:{fd}"],
        )
        self.ranks = Ranks(self.said.put)
        files = [folder / str(number) for number in range(len(scripts))]
        welcomes = [({"type": "welcome", "file": str(file)}, [2]) for file in files]
        self.ranks.start(welcomes, os.environ)
        deadline = time.monotonic() + PATIENCE_S
        waiting = [f for f, script in zip(files, scripts, strict=True) if "begun()\n" in script]
        while not all(file.exists() for file in waiting):
            assert time.monotonic() < deadline, "they do not begin"
            time.sleep(0.01)

    def lost(self) -> str:
        return self.said.get(timeout=PATIENCE_S)


@pytest.fixture
def start(monkeypatch, tmp_path) -> Iterator:
    made: list[Started] = []

    def begin(*scripts: str) -> Started:
        made.append(Started(monkeypatch, tmp_path, *scripts))
        return made[-1]

    yield begin
    for each in made:
        each.ranks.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_rank_that_is_killed_is_named_with_the_signal_and_takes_the_others_along(start):
    started = start(WAIT, WAIT)
    first, second = started.ranks.pids
    os.kill(second, signal.SIGKILL)
    assert started.lost() == f"rank 2 of 3 (pid {second}) was killed by SIGKILL"
    started.ranks.close()
    assert is_gone(first) and is_gone(second)


def test_a_rank_that_fails_is_lost_with_its_last_words(start):
    started = start(FAIL)
    (pid,) = started.ranks.pids
    assert started.lost() == f"rank 1 of 2 (pid {pid}) failed: no such tensor"


def test_a_rank_that_exits_without_a_word_is_lost(start):
    started = start(EXIT)
    (pid,) = started.ranks.pids
    assert started.lost() == f"rank 1 of 2 (pid {pid}) exited with code 7"


def test_of_several_that_end_together_the_killed_one_is_the_reason(start, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "SETTLE_S", 0.5)
    started = start(FAIL_WHEN_TOLD, WAIT)
    (tmp_path / "0.go").touch()
    os.kill(started.ranks.pids[1], signal.SIGKILL)
    assert "rank 2 of 3" in started.lost()


def test_the_end_of_the_link_ends_a_rank_and_a_close_is_no_loss(start, monkeypatch):
    monkeypatch.setattr(ranks_module, "CLOSE_S", 0.3)
    started = start(WAIT, STUBBORN)
    started.ranks.close()
    assert all(map(is_gone, started.ranks.pids))
    assert started.said.empty()


def test_who_fails_waits_for_the_reason_only_as_long_as_it_may_come(start):
    started = start(WAIT)
    begin = time.monotonic()
    started.ranks.await_death(0.05)
    assert time.monotonic() - begin >= 0.05 and started.said.empty()


def test_each_rank_sees_a_gpu_of_its_own(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,5")
    started = start(WAIT, WAIT)
    seen = [
        dict(word.partition(b"=")[::2] for word in environ.split(b"\0"))[b"CUDA_VISIBLE_DEVICES"]
        for environ in (Path(f"/proc/{pid}/environ").read_bytes() for pid in started.ranks.pids)
    ]
    assert seen == [b"7", b"5"]  # 4 is this process's, the first rank's
