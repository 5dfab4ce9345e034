"""Looking from outside: depth under moving and lying cursors, the newest slots, and who is there."""

import pytest

from shmserve.rings import layout as L
from shmserve.rings.board import Board
from shmserve.rings.board_table import BoardSpec
from shmserve.rings.channel import Channel, Ring, RingShape
from shmserve.rings.observe import RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError


@pytest.fixture
def ring(instance):
    ring = Ring.create(f"/shmserve.{instance}.7.0-0.tokens", RingShape(8, 8), epoch=7)
    yield ring
    ring.segment.unlink()
    ring.close()


@pytest.fixture
def view(ring):
    view = RingView(ring.segment.name)
    yield view
    view.close()


def slot(number: int) -> bytes:
    return number.to_bytes(8, "little")


def batch(first: int, count: int) -> bytes:
    return b"".join(slot(n) for n in range(first, first + count))


class ScriptedWords:
    """Words of which each load runs the next line of a script: what happens between an observer's loads."""

    def __init__(self, words: memoryview, script: list) -> None:
        self.words = words
        self.script = list(script)
        self.loads: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.loads.append(index)
        value = self.words[index]
        if self.script:
            self.script.pop(0)()
        return value


def test_depth_is_what_is_written_and_not_yet_handled(ring, view):
    producer, consumer = ring.producer(), ring.consumer()
    depths = [view.depth()]
    producer.try_write(batch(0, 5), 5)
    depths.append(view.depth())
    consumer.poll()
    depths.append(view.depth())
    consumer.release(2)
    depths.append(view.depth())
    producer.try_write(batch(5, 5), 5)
    depths.append(view.depth())
    assert depths == [0, 5, 5, 3, 8]


def test_depth_reads_again_until_the_read_cursor_stands_still(ring, view):
    """Between its loads both sides move on: the first pair of cursors would say 6, and at no moment were there 6."""
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_write(batch(0, 2), 2)
    consumer.poll()

    def move() -> None:
        consumer.release(2)
        producer.try_write(batch(2, 4), 4)

    view._words = ScriptedWords(view._words, [move])
    assert view.depth() == 4
    assert view._words.loads == [
        L.W_READ_CURSOR,
        L.W_WRITE_CURSOR,
        L.W_READ_CURSOR,
        L.W_WRITE_CURSOR,
        L.W_READ_CURSOR,
    ]


def test_depth_gives_up_on_a_ring_that_never_stands_still_and_stays_within_bounds(ring, view):
    words = ring.segment.words()

    def both_move() -> None:
        words[L.W_READ_CURSOR] += 3
        words[L.W_WRITE_CURSOR] += 5

    view._words = ScriptedWords(view._words, [both_move] * 1000)
    assert 0 <= view.depth() <= 8
    assert len(view._words.loads) < 50


@pytest.mark.parametrize(
    ("read", "written", "depth"),
    [(0, 9, 8), (0, 2**64 - 1, 8), (1, 0, 0), (2**64 - 1, 0, 0), (2**53 - 3, 2**53 + 1, 4)],
)
def test_depth_of_lying_cursors_is_clamped_to_the_capacity(ring, view, read, written, depth):
    words = ring.segment.words()
    words[L.W_READ_CURSOR], words[L.W_WRITE_CURSOR] = read, written
    assert view.depth() == view.stats().depth == depth


def test_stats_show_both_sides_counters_and_who_is_there(ring, view):
    stats = view.stats()
    assert (stats.has_producer, stats.has_consumer) == (False, False)
    producer = ring.producer()
    assert (view.stats().has_producer, view.stats().has_consumer) == (True, False)
    consumer = ring.consumer()
    producer.try_write(batch(0, 6), 6)
    producer.count(L.W_DROPPED, 3)
    consumer.poll()
    consumer.release(4)
    stats = view.stats()
    assert (stats.has_producer, stats.has_consumer) == (True, True)
    assert (stats.name, stats.epoch) == (ring.segment.name, 7)
    assert (stats.slot_size, stats.capacity, stats.depth, stats.num_torn) == (8, 8, 2, 0)
    assert stats.producer == {
        "claim_cursor": 6,
        "write_cursor": 6,
        "high_water": 6,
        "refused": 0,
        "coalesced": 0,
        "dropped": 3,
        "blocked_ns": 0,
        "publishes": 1,
        "pending": 0,
    }
    assert stats.consumer == {
        "read_cursor": 4,
        "wakeups": 1,
        "empty_wakeups": 0,
        "largest_batch": 6,
    }


def test_looking_takes_no_role_and_stores_nothing(ring, view):
    before = bytes(ring.segment.mapping)
    view.stats()
    view.last(8)
    assert bytes(ring.segment.mapping) == before
    ring.producer()
    ring.consumer()
    view.stats()
    assert view.stats().has_producer


def test_slots_claimed_and_not_written_are_counted_as_torn(ring, view):
    words = ring.segment.words()
    words[L.W_WRITE_CURSOR], words[L.W_CLAIM_CURSOR] = 3, 5
    assert view.stats().num_torn == 2
    words[L.W_CLAIM_CURSOR] = 3
    assert view.stats().num_torn == 0
    words[L.W_CLAIM_CURSOR] = 2  # loads of a live ring may come in that order
    assert view.stats().num_torn == 0


def test_last_gives_the_newest_slots_oldest_first_handled_or_not(ring, view):
    producer, consumer = ring.producer(), ring.consumer()
    assert view.last(3) == []
    producer.try_write(batch(0, 2), 2)
    assert view.last(3) == [slot(0), slot(1)]
    consumer.poll()
    consumer.release(2)
    assert view.last(3) == [slot(0), slot(1)]
    for first in range(2, 12, 2):
        producer.try_write(batch(first, 2), 2)
        consumer.poll()
        consumer.release(consumer.owed)
    assert view.last(3) == [slot(9), slot(10), slot(11)]
    assert view.last(100) == [slot(n) for n in range(4, 12)]
    assert view.last(0) == []


def test_last_leaves_out_slots_that_the_producer_overwrote_meanwhile(ring, view):
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_write(batch(0, 8), 8)
    consumer.poll()
    consumer.release(8)
    view._words = ScriptedWords(
        view._words, [lambda: None, lambda: producer.try_write(batch(8, 3), 3)]
    )
    # loads: write_cursor (8), then, with the slots copied, claim_cursor: it must be loaded after them
    assert view.last(8) == [slot(n) for n in range(8)]
    assert view._words.loads == [L.W_WRITE_CURSOR, L.W_CLAIM_CURSOR]

    view._words = ScriptedWords(view._words.words, [lambda: producer.try_write(batch(11, 2), 2)])
    assert view.last(8) == [slot(n) for n in range(5, 11)]


def test_last_leaves_out_slots_that_are_being_overwritten(ring, view):
    """claim_cursor is ahead: the copy over the oldest slots has begun, whether or not it has ended."""
    producer, consumer = ring.producer(), ring.consumer()
    producer.try_write(batch(0, 8), 8)
    consumer.poll()
    consumer.release(8)
    ring.segment.words()[L.W_CLAIM_CURSOR] = 10
    assert view.last(8) == [slot(n) for n in range(2, 8)]


@pytest.mark.parametrize("word", [L.W_MAGIC, L.W_VERSION, L.W_SLOT_SIZE, L.W_CAPACITY])
def test_segment_that_is_no_whole_ring_cannot_be_viewed(ring, word):
    ring.segment.words()[word] = 0
    with pytest.raises(SegmentError, match=ring.segment.name):
        RingView(ring.segment.name)


def test_vanished_ring_goes_on_being_seen_by_who_has_it(ring, view):
    ring.segment.unlink()
    ring.producer().try_write(batch(0, 2), 2)
    assert view.depth() == 2
    assert view.stats().has_producer
    with pytest.raises(SegmentError, match="No such file"):
        RingView(ring.segment.name)


def test_rings_and_boards_of_an_instance_are_found_by_name_and_no_others(instance):
    channel = Channel.create(instance, 1, 0, 0, RingShape(8, 2), RingShape(8, 2))
    other = Channel.create(f"{instance}x", 1, 0, 0, RingShape(8, 2), RingShape(8, 2))
    board = Board.create(Board.name(instance, 1, "worker", 0), BoardSpec(("steps",), {}), 1)
    stem = f"/shmserve.{instance}.1"
    assert rings_of(instance) == [f"{stem}.0-0.submit", f"{stem}.0-0.tokens"]
    assert boards_of(instance) == [f"{stem}.worker0.board"]
    for made in (channel, other, board.segment):
        made.unlink()
    assert rings_of(instance) == boards_of(instance) == []
    for made in (channel, other, board):
        made.close()


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 11])
def test_copy_holds_all_that_is_left_in_order_wherever_the_ring_stands(ring, view, start, count):
    words = ring.segment.words()
    for word in (L.W_CLAIM_CURSOR, L.W_WRITE_CURSOR, L.W_READ_CURSOR):
        words[word] = start
    producer, consumer = ring.producer(), ring.consumer()
    for number in range(start, start + count):
        assert producer.try_write(slot(number), 1)
        consumer.poll()
        consumer.release(1)
    copy = view.copy()
    held = [int.from_bytes(copy.slot(i), "little") for i in range(copy.num_slots)]
    assert held[len(held) - min(count, 8) :] == list(range(start + count))[-min(count, 8) :][:count]
    assert copy.first + copy.num_slots == start + count
    assert copy.num_slots == min(8, start + count)
    assert (copy.num_torn, copy.has_producer, copy.has_consumer) == (0, True, True)


def test_copy_leaves_out_what_is_claimed_over_and_says_how_much_is(ring, view):
    producer = ring.producer()
    for number in range(8):
        producer.try_write(slot(number), 1)
    ring.segment.words()[L.W_CLAIM_CURSOR] = 11  # as if it died, or is, in the copy of three more
    copy = view.copy()
    assert (copy.first, copy.num_slots, copy.num_torn) == (3, 5, 3)
    assert copy.slot(0) == slot(3)


@pytest.mark.parametrize("claimed", [0, 2**63, 2**64 - 1])
def test_copy_of_lying_cursors_is_bounded(ring, view, claimed):
    ring.producer().try_write(batch(0, 5), 5)
    ring.segment.words()[L.W_CLAIM_CURSOR] = claimed
    copy = view.copy()
    assert copy.num_slots <= 8
    assert copy.num_torn <= 8
