"""The hand-over of slots, one side at a time: orders, wraps, refusals, and what a broken peer can do."""

import pytest

from shmserve.rings import layout as L
from shmserve.rings.spsc import Consumer, Producer, RingProtocolError

NAMES = {index: name for name, index in (L.PRODUCER_WORDS | L.CONSUMER_WORDS).items()}
FAR = 2**53 - 3  # where a float would begin to lose cursors


def slot(number: int) -> bytes:
    return number.to_bytes(8, "little")


def batch(first: int, count: int) -> bytes:
    return b"".join(slot(n) for n in range(first, first + count))


class RecordedWords:
    """Words that note each store."""

    def __init__(self, words: memoryview, log: list) -> None:
        self._words = words
        self._log = log

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._log.append((NAMES[index], value))
        self._words[index] = value


class RecordedSlots:
    """Slots that note each copy as (copy, first byte, last byte + 1)."""

    def __init__(self, slots: memoryview, log: list) -> None:
        self._slots = slots
        self._log = log

    def __len__(self) -> int:
        return len(self._slots)

    def __setitem__(self, where: slice, data: bytes) -> None:
        start, stop, _ = where.indices(len(self._slots))
        self._log.append(("copy", start, stop))
        self._slots[where] = data


def recorded_producer(ring, log):
    def signal(count: int) -> None:
        log.append(("signal", count))
        ring.data.add(count)

    return Producer(
        RecordedWords(ring.words, log),
        RecordedSlots(ring.slots, log),
        ring.slot_size,
        signal,
        ring.credits.take,
    )


def test_claim_comes_before_slots_before_write_cursor_before_signal(bare_ring):
    ring, log = bare_ring(8), []
    producer = recorded_producer(ring, log)
    assert producer.try_write(batch(0, 3), 3)
    assert log == [
        ("claim_cursor", 3),
        ("copy", 0, 24),
        ("write_cursor", 3),
        ("publishes", 1),
        ("high_water", 3),
        ("signal", 3),
    ]


def test_order_holds_for_both_parts_of_a_wrapped_batch(bare_ring):
    ring, log = bare_ring(8, start=6), []
    producer = recorded_producer(ring, log)
    assert producer.try_write(batch(0, 5), 5)
    order = [entry[0] for entry in log]
    assert [entry for entry in log if entry[0] == "copy"] == [("copy", 48, 64), ("copy", 0, 24)]
    assert order.index("claim_cursor") < order.index("copy")
    assert max(i for i, name in enumerate(order) if name == "copy") < order.index("write_cursor")
    assert order[-1] == "signal" and order.count("signal") == 1


def test_one_batch_is_one_signal_whatever_its_size(bare_ring):
    ring, log = bare_ring(64), []
    producer = recorded_producer(ring, log)
    assert producer.try_write(batch(0, 64), 64)
    assert [entry for entry in log if entry[0] == "signal"] == [("signal", 64)]
    assert ring.words[L.W_PUBLISHES] == 1


def test_release_stores_read_cursor_before_it_gives_credits(bare_ring):
    ring, log = bare_ring(8), []

    def give(count: int) -> None:
        log.append(("credits", count))

    consumer = Consumer(
        RecordedWords(ring.words, log), ring.slots, ring.slot_size, ring.data.take, give
    )
    assert ring.producer.try_write(batch(0, 4), 4)
    assert consumer.poll() == 4
    log.clear()
    consumer.view(2)
    assert log == []  # looking is not handling: the producer learns of nothing
    consumer.release(2)
    assert log == [("read_cursor", 2), ("credits", 2)]
    consumer.release(0)
    assert len(log) == 2


@pytest.mark.parametrize("start", [0, FAR])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_batches_wrap_at_every_slot_offset(bare_ring, size, start):
    for offset in range(8):
        ring = bare_ring(8, start=start + offset)
        for first in range(0, 4 * size, size):
            assert ring.producer.try_write(batch(first, size), size)
            assert ring.read() == [slot(n) for n in range(first, first + size)]
        assert ring.words[L.W_WRITE_CURSOR] == start + offset + 4 * size
        assert ring.words[L.W_READ_CURSOR] == start + offset + 4 * size
        assert ring.consumer.read_cursor == ring.producer.write_cursor


def test_every_mix_of_batch_and_read_sizes_keeps_all_slots_in_order(bare_ring):
    for write in range(1, 9):
        for read in range(1, 9):
            ring = bare_ring(8, start=FAR)
            sent, got = 0, []
            while len(got) < 60:
                if ring.producer.try_write(batch(sent, write), write):
                    sent += write
                got += ring.read(read)
            assert got == [slot(n) for n in range(len(got))], (write, read)


def test_cursors_pass_two_to_the_53_without_losing_a_slot(bare_ring):
    ring = bare_ring(4, start=FAR)
    for number in range(10):
        assert ring.producer.try_write(slot(number), 1)
        assert ring.read() == [slot(number)]
    assert ring.words[L.W_READ_CURSOR] == ring.words[L.W_CLAIM_CURSOR] == FAR + 10


def test_full_ring_refuses_and_keeps_the_cursor(bare_ring):
    ring = bare_ring(4)
    assert ring.producer.try_write(batch(0, 3), 3)
    before = bytes(ring.memory)
    assert not ring.producer.try_write(batch(9, 2), 2)
    assert bytes(ring.memory) == before
    assert ring.producer.write_cursor == 3
    assert ring.data.value == 3
    assert ring.producer.try_write(batch(3, 1), 1)
    assert ring.read() == [slot(n) for n in range(4)]


def test_batch_larger_than_the_ring_is_refused_even_when_the_ring_is_empty(bare_ring):
    ring = bare_ring(4)
    assert not ring.producer.try_write(batch(0, 5), 5)
    assert ring.words[L.W_CLAIM_CURSOR] == 0


def test_batch_of_the_wrong_length_changes_nothing(bare_ring):
    ring = bare_ring(4)
    before = bytes(ring.memory)
    for records, num_slots in ((b"", 1), (bytes(7), 1), (bytes(16), 1), (bytes(8), 2)):
        with pytest.raises(AssertionError):
            ring.producer.try_write(records, num_slots)
    assert bytes(ring.memory) == before
    assert ring.data.value == 0


def test_writing_nothing_is_no_publish(bare_ring):
    ring = bare_ring(4)
    before = bytes(ring.memory)
    assert ring.producer.try_write(b"", 0)
    assert bytes(ring.memory) == before


def test_credits_are_read_only_when_the_known_free_slots_do_not_suffice(bare_ring):
    ring = bare_ring(4)
    for number in range(4):
        assert ring.producer.try_write(slot(number), 1)
    assert ring.credits.num_takes == 0
    assert len(ring.read()) == 4
    assert ring.producer.num_free == 0  # not known yet
    assert ring.producer.try_write(slot(4), 1)
    assert ring.credits.num_takes == 1
    assert ring.producer.num_free == 3
    assert ring.producer.free(3) == 3
    assert ring.credits.num_takes == 1
    assert ring.producer.free(4) == 3
    assert ring.credits.num_takes == 2


def test_credits_come_when_slots_are_handled_not_when_they_are_polled(bare_ring):
    ring = bare_ring(4)
    assert ring.producer.try_write(batch(0, 4), 4)
    assert ring.consumer.poll() == 4
    assert bytes(ring.consumer.view(4)) == batch(0, 4)
    assert not ring.producer.try_write(slot(4), 1)
    ring.consumer.release(1)
    assert ring.producer.try_write(slot(4), 1)
    assert not ring.producer.try_write(slot(5), 1)
    assert bytes(ring.consumer.view(4)) == batch(1, 3)  # untouched by what reused slot 0


def test_owed_is_kept_across_partial_handling(bare_ring):
    ring = bare_ring(8)
    assert ring.producer.try_write(batch(0, 5), 5)
    assert ring.consumer.poll() == 5
    ring.consumer.release(2)
    assert ring.consumer.owed == 3
    assert ring.consumer.poll() == 3  # the counter was zeroed by the first poll; nothing is lost
    assert ring.producer.try_write(batch(5, 2), 2)
    assert ring.consumer.poll() == 5
    assert bytes(ring.consumer.view(8)) == batch(2, 5)
    assert ring.words[L.W_LARGEST_BATCH] == 5
    assert ring.words[L.W_WAKEUPS] == 2
    assert ring.words[L.W_EMPTY_WAKEUPS] == 1


def test_view_ends_at_the_wrap_and_goes_on_after_release(bare_ring):
    ring = bare_ring(8, start=6)
    assert ring.producer.try_write(batch(0, 5), 5)
    assert ring.consumer.poll() == 5
    assert bytes(ring.consumer.view(8)) == batch(0, 2)
    assert bytes(ring.consumer.view(1)) == batch(0, 1)
    ring.consumer.release(2)
    assert bytes(ring.consumer.view(8)) == batch(2, 3)
    ring.consumer.release(3)
    assert bytes(ring.consumer.view(8)) == b""


def test_peek_crosses_the_wrap(bare_ring):
    ring = bare_ring(8, start=6)
    assert ring.producer.try_write(batch(0, 5), 5)
    ring.consumer.poll()
    assert [bytes(ring.consumer.peek(i)) for i in range(5)] == [slot(n) for n in range(5)]
    with pytest.raises(AssertionError):
        ring.consumer.peek(5)


def test_slots_that_were_not_announced_cannot_be_seen_or_released(bare_ring):
    ring = bare_ring(8)
    assert ring.producer.try_write(batch(0, 2), 2)
    assert bytes(ring.consumer.view(8)) == b""  # written, but not polled
    with pytest.raises(AssertionError):
        ring.consumer.release(1)
    ring.consumer.poll()
    with pytest.raises(AssertionError):
        ring.consumer.release(3)
    with pytest.raises(AssertionError):
        ring.consumer.release(-1)


def test_more_announced_than_the_ring_holds_is_a_protocol_error(bare_ring):
    ring = bare_ring(8)
    ring.data.add(9)
    with pytest.raises(RingProtocolError, match="announced 9 slots, the ring holds 8"):
        ring.consumer.poll()


def test_announcements_that_only_together_pass_the_capacity_are_a_protocol_error(bare_ring):
    ring = bare_ring(8)
    ring.data.add(8)
    assert ring.consumer.poll() == 8
    ring.data.add(1)
    with pytest.raises(RingProtocolError):
        ring.consumer.poll()


def test_more_credits_than_slots_sent_is_a_protocol_error(bare_ring):
    ring = bare_ring(8)
    assert ring.producer.try_write(batch(0, 8), 8)
    ring.credits.add(9)
    with pytest.raises(RingProtocolError, match="gave back 1 slots more"):
        ring.producer.try_write(slot(8), 1)
    assert ring.words[L.W_CLAIM_CURSOR] == 8


def test_what_a_lie_announced_is_neither_owed_nor_free_at_the_next_look(bare_ring):
    ring = bare_ring(8)
    assert ring.producer.try_write(batch(0, 6), 6)
    assert ring.consumer.poll() == 6
    ring.data.add(1 << 40)
    with pytest.raises(RingProtocolError):
        ring.consumer.poll()
    assert ring.consumer.poll() == 6
    ring.credits.add(1 << 40)
    with pytest.raises(RingProtocolError):
        ring.producer.try_write(batch(6, 4), 4)
    assert not ring.producer.try_write(batch(6, 4), 4)


def test_lying_cursors_change_neither_sides_decisions(bare_ring):
    ring = bare_ring(4)
    assert ring.producer.try_write(batch(0, 2), 2)
    ring.words[L.W_READ_CURSOR] = 2**64 - 1
    ring.words[L.W_WRITE_CURSOR] = 2**64 - 1
    assert ring.producer.free(4) == 2
    assert ring.producer.try_write(batch(2, 2), 2)
    assert not ring.producer.try_write(slot(4), 1)
    assert ring.read() == [slot(n) for n in range(4)]
    assert ring.words[L.W_HIGH_WATER] <= 4


def test_high_water_is_the_greatest_depth_at_a_publish_and_never_falls(bare_ring):
    ring = bare_ring(8)
    seen = []
    for write, read in ((2, 0), (3, 5), (1, 1), (6, 0), (2, 8), (1, 1)):
        assert ring.producer.try_write(batch(0, write), write)
        seen.append(ring.words[L.W_HIGH_WATER])
        if read:
            ring.read(read)
    assert seen == [2, 5, 5, 6, 8, 8]


def test_records_may_be_any_byte_buffer(bare_ring):
    ring = bare_ring(8)
    assert ring.producer.try_write(bytearray(slot(0)), 1)
    assert ring.producer.try_write(memoryview(batch(1, 7)), 7)
    assert len(ring.read(4)) == 4
    assert ring.producer.try_write(memoryview(bytearray(batch(8, 4))), 4)
    assert ring.read() == [slot(n) for n in range(4, 12)]
