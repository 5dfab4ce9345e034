"""The conservation law, between two real processes over a ring that is full most of the time, for each policy on each ring.

    offered = read + merged away + dropped + refused        each token once, in order, with its own time

The reader checks every token by itself (`sides.py`); here the counts of both sides and of the ring's own words are added up.
`make test` sends a twentieth of the records, `make test-all` also the whole million.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmserve
from shmserve.rings.channel import Ring, RingShape
from shmserve.rings.observe import RingView
from shmserve.rings.segment import names
from shmserve.wire.tokens import TOKEN_SLOT_BYTES

SIDES = Path(__file__).with_name("sides.py")
ROOT = Path(shmserve.__file__).parents[1]
CAPACITY = 64

pytestmark = [pytest.mark.stress, pytest.mark.timeout(300)]


@pytest.fixture(params=[50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def num_records(request) -> int:
    return request.param


@pytest.fixture
def run_sides():
    """Run a writer and a reader over a new ring; what both say, and the ring's last words."""
    instance = f"stress{os.getpid()}"
    children = []

    def start(ring, *args):
        child = subprocess.Popen(
            [sys.executable, SIDES, args[0], ring.segment.name, ",".join(map(str, ring.fds()))]
            + [str(arg) for arg in args[1:]],
            pass_fds=ring.fds(),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        children.append(child)
        return child

    def run(kind, slot_size, policy, seed, amount, patience=8):
        ring = Ring.create(f"/shmserve.{instance}.1.0-0.{kind}", RingShape(slot_size, CAPACITY), 1)
        try:
            view = RingView(ring.segment.name)
            reader = start(ring, f"consume_{kind}", seed + 1, patience)
            writer = start(ring, f"produce_{kind}", policy, seed, amount)
            said, _ = writer.communicate()
            assert writer.returncode == 0
            seen, _ = reader.communicate()
            assert reader.returncode == 0
            stats = view.stats()
            view.close()
        finally:
            ring.segment.unlink()
            ring.close()
        assert (stats.has_producer, stats.has_consumer) == (False, False)
        assert (stats.depth, stats.num_torn, stats.producer["pending"]) == (0, 0, 0)
        assert stats.producer["high_water"] == CAPACITY
        return json.loads(said), json.loads(seen), stats.producer

    yield run
    for child in children:
        with child:
            child.kill()
    assert names(f"shmserve.{instance}") == []


def check_tokens(said, seen, words, num_records):
    offered = said["offered_records"] + said["kept_slots"]
    assert offered >= num_records
    assert seen["num_slots"] == words["write_cursor"]
    assert offered == seen["num_slots"] + words["coalesced"] + words["dropped"]
    assert said["offered_tokens"] == seen["num_tokens"] + said["dropped_tokens"]
    assert said["num_keys"] == seen["num_finished"]  # each request was ended once
    assert said["num_dropped_keys"] == seen["num_dropped"]


def test_coalescing_loses_nothing(run_sides, num_records):
    said, seen, words = run_sides("tokens", TOKEN_SLOT_BYTES, "coalesce", 11, num_records)
    check_tokens(said, seen, words, num_records)
    assert words["dropped"] == words["blocked_ns"] == said["dropped_tokens"] == 0
    assert words["coalesced"] > said["offered_records"] // 20
    assert seen["num_full"] > seen["num_rounds"] // 2
    assert seen["largest"] == 8


def test_blocking_loses_nothing(run_sides, num_records):
    said, seen, words = run_sides("tokens", TOKEN_SLOT_BYTES, "block", 22, num_records, patience=0)
    check_tokens(said, seen, words, num_records)
    assert words["dropped"] == said["dropped_tokens"] == 0
    assert (
        words["blocked_ns"] > 0
    )  # a batch needs more room than one slot, so the ring itself is seldom quite full
    assert words["coalesced"] > 0  # the reader's naps are longer than the deadline


def test_dropping_ends_a_request_and_never_leaves_a_hole(run_sides, num_records):
    said, seen, words = run_sides("tokens", TOKEN_SLOT_BYTES, "drop", 33, num_records)
    check_tokens(said, seen, words, num_records)
    assert words["coalesced"] == words["blocked_ns"] == 0
    assert words["dropped"] == said["num_dropped_keys"] > said["offered_records"] // 100
    assert said["num_keys"] > said["num_dropped_keys"]  # others came to their end meanwhile
    assert seen["num_full"] > seen["num_rounds"] // 2


def check_units(said, seen, words):
    assert said["offered"] == said["accepted"] + said["refused"]
    assert words["refused"] == said["refused"]
    assert seen["num_units"] == said["accepted"]
    assert seen["num_slots"] == said["accepted_slots"] + 1 == words["write_cursor"]
    assert words["coalesced"] == words["dropped"] == 0
    assert seen["num_full"] > seen["num_rounds"] // 2


def test_units_that_were_refused_at_once_were_not_written_and_all_others_were(
    run_sides, num_records
):
    said, seen, words = run_sides("units", 64, "refuse", 44, num_records // 4)
    check_units(said, seen, words)
    assert said["refused"] > said["accepted"] // 20
    assert said["kept"] > num_records // 1000


def test_units_that_waited_for_room_were_written_or_refused_and_never_both(run_sides, num_records):
    said, seen, words = run_sides("units", 64, "wait", 55, num_records // 4)
    check_units(said, seen, words)
    assert said["refused"] > 0
    assert said["accepted"] > num_records // 20


def test_kept_units_are_never_lost_or_split(run_sides, num_records):
    said, seen, words = run_sides("units", 64, "keep", 66, num_records // 4)
    check_units(said, seen, words)
    assert said["refused"] == 0
    assert said["kept"] == said["accepted"]
