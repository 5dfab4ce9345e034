"""Sums over processes only grow, whoever dies."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmserve.boards import HTTP_BOARD, SUPERVISOR_BOARD, WORKER_BOARD, counters_of
from shmserve.http import instance_snapshot
from shmserve.http.instance_snapshot import take_snapshot
from shmserve.ledger import Ledger
from shmserve.rings.board import Board
from shmserve.rings.observe import boards_of


class Instance:
    """A supervisor's board, and workers' that come and go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.board = self.new("supervisor", SUPERVISOR_BOARD)
        self.ledger = Ledger(self.board)

    def new(self, role: str, spec=WORKER_BOARD) -> Board:
        self.epoch += 1
        return Board.create(Board.name(self.name, self.epoch, role, 0), spec, self.epoch)

    def bury(self, board: Board, role: str = "worker") -> None:
        with self.ledger.taking_over(role, board):
            board.segment.unlink()
            board.close()


@pytest.fixture
def instance() -> Iterator[Instance]:
    found = Instance(f"test-ledger-{os.getpid()}")
    yield found
    found.board.segment.unlink()
    found.board.close()


def test_what_the_dead_had_counted_stays_in_the_sums(instance) -> None:
    for _ in range(2):
        worker = instance.new("worker")
        worker["generation_tokens"] = 100
        worker["running"] = 7
        worker.histograms["step_us"].observe(np.array([60, 4_000, 4_000]))
        instance.bury(worker)
    living = instance.new("worker")
    living["generation_tokens"] = 5
    living["running"] = 2
    living.histograms["step_us"].observe_one(60)
    look = take_snapshot(instance.name)
    assert look.sum("worker", "generation_tokens") == 205
    assert look.sum("worker", "running") == 2, "a gauge of the dead is nothing"
    reading = look.histogram("worker", "step_us")
    assert reading is not None
    assert (reading.count, reading.sum) == (7, 2 * 8_060 + 60)
    assert sum(reading.counts) == 7
    instance.bury(living)
    assert take_snapshot(instance.name).sum("worker", "generation_tokens") == 205


def test_each_role_has_its_own_books(instance) -> None:
    http = instance.new("http", HTTP_BOARD)
    http["num_aborted"] = 3
    instance.bury(http, "http")
    look = take_snapshot(instance.name)
    assert look.sum("http", "num_aborted") == 3
    assert look.sum("worker", "num_aborted") == 0


def test_counts_that_cannot_be_are_not_taken_over(instance) -> None:
    """Who had lost its way may have written anything, and the supervisor must live."""
    worker = instance.new("worker")
    worker["prompt_tokens"] = 2**64 - 1
    worker["generation_tokens"] = 9
    instance.bury(worker)
    look = take_snapshot(instance.name)
    assert look.sum("worker", "prompt_tokens") == 0
    assert look.sum("worker", "generation_tokens") == 9


def test_every_counter_has_its_place_in_the_books() -> None:
    for role in ("worker", "http"):
        for word in counters_of(role):
            assert f"past_{role}_{word}" in SUPERVISOR_BOARD.words


def test_a_look_in_the_middle_of_a_burial_is_repeated(instance, monkeypatch) -> None:
    """The board is gone and its counts are not yet in the books: the look that begins then ends behind it."""
    worker = instance.new("worker")
    worker["generation_tokens"] = 10
    burial = instance.ledger.taking_over("worker", worker)
    burial.__enter__()
    worker.segment.unlink()
    worker.close()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            burial.__exit__(None, None, None)

    monkeypatch.setattr(instance_snapshot.time, "sleep", nap)
    assert take_snapshot(instance.name).sum("worker", "generation_tokens") == 10
    assert len(naps) == 1


def test_a_burial_in_the_middle_of_a_look_repeats_it(instance, monkeypatch) -> None:
    """The worker's board is read, then it dies, then the supervisor's is read: both have its tokens."""
    worker = instance.new("worker")
    worker["generation_tokens"] = 10
    listed: list[int] = []
    real = instance_snapshot.BoardReader.attach

    def attach(name: str):
        if ".supervisor0." in name and listed.append(1) is None and len(listed) == 2:
            instance.bury(worker)  # the first time is for the version
        return real(name)

    monkeypatch.setattr(
        instance_snapshot, "boards_of", lambda name: sorted(boards_of(name), reverse=True)
    )
    monkeypatch.setattr(instance_snapshot.BoardReader, "attach", attach)
    assert take_snapshot(instance.name).sum("worker", "generation_tokens") == 10


def test_a_scrape_while_processes_die_counts_nobody_twice_and_nobody_not_at_all(instance) -> None:
    """Workers of 10 tokens each come and die while another thread looks: what it sees never falls, nor is above what was."""
    seen: list[int] = []
    is_over = threading.Event()
    num_born = 0
    faults: list[str] = []

    def look() -> None:
        while not is_over.is_set():
            found = take_snapshot(instance.name).sum("worker", "generation_tokens")
            most = num_born * 10
            if found > most or (seen and found < seen[-1]):
                faults.append(f"{found} after {seen[-1:]}, at most {most}")
            seen.append(found)

    watcher = threading.Thread(target=look)
    watcher.start()
    while num_born < 40 or (
        len(seen) < 3 and num_born < 4_000
    ):  # a busy machine may not let it look so soon
        worker = instance.new("worker")
        num_born += 1
        worker["generation_tokens"] = 10
        instance.bury(worker)
    is_over.set()
    watcher.join()
    assert not faults
    assert take_snapshot(instance.name).sum("worker", "generation_tokens") == 10 * num_born
    assert len(seen) > 2
