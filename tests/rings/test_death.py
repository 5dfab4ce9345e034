"""SIGKILL of either side of a ring, or of a whole instance: what the others see, and what they do next."""

import json

import pytest

from shmserve.rings import layout as L
from shmserve.rings.channel import Channel, Ring, RingShape
from shmserve.rings.observe import RingView, rings_of
from shmserve.rings.policy import Blocking, Coalescing, Dropping
from shmserve.rings.segment import SegmentError, names, sweep


@pytest.fixture
def ring(instance):
    ring = Ring.create(f"/shmserve.{instance}.1.0-0.tokens", RingShape(8, 16), 1)
    yield ring
    ring.segment.unlink()
    ring.close()


@pytest.fixture
def view(ring):
    view = RingView(ring.segment.name)
    yield view
    view.close()


@pytest.fixture
def act_on(ring, act):
    """Start an actor on the ring; its descriptors are inherited, as a child's are."""

    def start(name, *args):
        fds = ring.fds()
        return act(name, ring.segment.name, ",".join(map(str, fds)), *args, pass_fds=fds)

    return start


def slot(number: int) -> bytes:
    return number.to_bytes(8, "little")


def numbers(slots) -> list[int]:
    raw = bytes(slots)
    return [int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)]


def read(consumer, count: int) -> list[int]:
    got = []
    while len(got) < count:
        view = consumer.view(count - len(got))
        got += numbers(view)
        consumer.release(len(view) // 8)
    return got


def kill(actor) -> None:
    actor.kill()
    actor.wait()


def test_producer_killed_mid_run_leaves_exactly_what_it_announced(ring, view, act_on):
    consumer = ring.consumer()
    producer = act_on("produce_forever")
    assert producer.hear() == '"producing"'
    got = []
    while len(got) < 3000:
        got += read(consumer, consumer.poll())
        if not consumer.owed:
            assert view.stats().has_producer
    kill(producer)
    assert not view.stats().has_producer
    assert view.stats().has_consumer
    got += read(consumer, consumer.poll())
    assert consumer.poll() == 0
    assert got == list(range(len(got)))
    # Killed between write_cursor and the signal, it may have written one batch that it did not announce.
    assert view.stats().producer["write_cursor"] - len(got) in (0, 3)


def test_producer_killed_between_claim_and_write_leaves_torn_slots_that_nobody_reads(
    ring, view, act_on
):
    consumer = ring.consumer()
    producer = act_on("produce_and_stop_between", 5, 4)
    assert producer.hear() == '"torn"'
    kill(producer)
    stats = view.stats()
    assert not stats.has_producer
    assert (stats.num_torn, stats.depth) == (4, 5)
    assert consumer.poll() == 5
    assert read(consumer, 5) == [0, 1, 2, 3, 4]
    assert consumer.poll() == 0
    assert view.depth() == 0
    assert view.stats().num_torn == 4
    assert view.last(16) == [slot(n) for n in range(5)]
    half = ring.segment.mapping[L.HEADER_BYTES + 40 : L.HEADER_BYTES + 72]
    assert numbers(half) == [5, 6, 0, 0]  # torn indeed: the test killed it where it meant to


def test_torn_slots_over_old_ones_are_left_out_of_the_log(ring, view, act_on):
    """The torn batch lies over slots that were whole and handled: `last` must not show the mixture."""
    words = ring.segment.words()
    for word in (L.W_CLAIM_CURSOR, L.W_WRITE_CURSOR, L.W_READ_CURSOR):
        words[word] = 12
    producer = act_on("produce_and_stop_between", 4, 6)
    assert producer.hear() == '"torn"'
    kill(producer)
    assert view.stats().num_torn == 6
    kept = view.last(16)
    assert len(kept) == 10
    assert numbers(b"".join(kept[-4:])) == [0, 1, 2, 3]


def test_dead_producers_ring_is_not_given_to_another(ring, act_on):
    producer = act_on("produce_and_stop_between", 5, 4)
    producer.hear()
    kill(producer)
    with pytest.raises(SegmentError, match="new channel"):
        ring.producer()


@pytest.fixture
def after_consumers_death(ring, view, act_on):
    """A producer whose consumer handled 10 of 14 slots, took the other 4, and was killed with them: 12 are free."""
    consumer = act_on("consume", 10)
    producer = ring.producer()
    assert producer.try_write(b"".join(slot(n) for n in range(14)), 14)
    assert json.loads(consumer.hear()) == list(range(10))
    consumer.tell("take the rest")
    assert json.loads(consumer.hear()) == 4
    kill(consumer)
    stats = view.stats()
    assert (stats.has_producer, stats.has_consumer) == (True, False)
    assert stats.depth == 4  # taken and not handled: it still counts
    return producer


def test_consumer_killed_lets_the_ring_fill_and_then_records_wait(view, after_consumers_death):
    writer = Coalescing(after_consumers_death)
    for key in range(12 + 5):
        assert writer.write(memoryview(slot(key)), [key]) == []
    assert writer.pending_keys == [12, 13, 14, 15, 16]
    stats = view.stats()
    assert stats.depth == stats.producer["high_water"] == 16
    assert stats.producer["pending"] == 5


def test_consumer_killed_lets_the_ring_fill_and_then_keys_are_dropped(view, after_consumers_death):
    writer = Dropping(after_consumers_death)
    dropped = []
    for key in range(12 + 5):
        dropped += writer.write(memoryview(slot(key)), [key])
    assert dropped == [12, 13, 14, 15, 16]
    stats = view.stats()
    assert (stats.depth, stats.producer["dropped"], stats.producer["pending"]) == (16, 5, 0)


def test_consumer_killed_makes_a_blocking_producer_wait_its_deadline_and_no_more(
    ring, view, after_consumers_death
):
    writer = Blocking(after_consumers_death, wait_credits=ring.wait_credits, deadline_s=0.01)
    for key in range(12):
        writer.write(memoryview(slot(key)), [key])
    assert view.stats().producer["blocked_ns"] == 0
    for key in range(12, 15):
        writer.write(memoryview(slot(key)), [key])
    assert writer.pending_keys == [12, 13, 14]
    assert view.stats().producer["blocked_ns"] >= 3 * 10_000_000


def test_new_channel_works_beside_a_dead_one(ring, view, act_on, instance):
    consumer = act_on("consume", 0)
    assert json.loads(consumer.hear()) == []
    assert ring.producer().try_write(bytes(8 * 16), 16)
    kill(consumer)
    again = Ring.create(f"/shmserve.{instance}.2.0-0.tokens", RingShape(8, 16), 2)
    try:
        assert again.producer().try_write(bytes(8), 1)
        assert again.consumer().poll() == 1
        other = RingView(again.segment.name)
        assert (other.stats().epoch, other.depth()) == (2, 1)
        other.close()
        assert (view.stats().epoch, view.depth()) == (1, 16)  # untouched
        assert rings_of(instance) == [ring.segment.name, again.segment.name]
    finally:
        again.segment.unlink()
        again.close()


def test_new_start_removes_the_segments_of_the_dead_instance_only(instance, act):
    dead = act("own_channel", f"{instance}-a", 3)
    living = act("own_channel", f"{instance}-b", 3)
    left = json.loads(dead.hear())
    kept = json.loads(living.hear())
    assert sweep(f"shmserve.{instance}") == []
    kill(dead)
    assert sweep(f"shmserve.{instance}") == left
    assert names(f"shmserve.{instance}") == kept

    again = Channel.create(f"{instance}-a", 3, 0, 0, RingShape(64, 4), RingShape(8, 8))
    assert sweep(f"shmserve.{instance}") == []  # its owner lives: the names are in use again
    again.unlink()
    again.close()
    kill(living)
    assert sweep(f"shmserve.{instance}") == kept


def test_instance_whose_supervisor_died_is_not_swept_while_a_child_lives(instance, act):
    """The owner byte belongs to the description that all share: the worker keeps the rings from being swept."""
    ring = Ring.create(f"/shmserve.{instance}.1.0-0.tokens", RingShape(8, 16), 1)
    name, fds = ring.segment.name, ring.fds()
    worker = act("produce_forever", name, ",".join(map(str, fds)), pass_fds=fds)
    assert worker.hear() == '"producing"'
    ring.close()
    assert sweep(f"shmserve.{instance}") == []
    kill(worker)
    assert sweep(f"shmserve.{instance}") == [name]
