"""The bytes of a segment, as an observer in another language would read them."""

import struct
import time

import pytest

from shmserve.rings import layout as L
from shmserve.rings.channel import Ring, RingShape
from shmserve.rings.segment import Segment

# Offsets are spelled out here, not taken from the module: this is the contract with readers of other versions.
OFFSETS = {
    "claim_cursor": 128,
    "write_cursor": 136,
    "high_water": 144,
    "refused": 152,
    "coalesced": 160,
    "dropped": 168,
    "blocked_ns": 176,
    "publishes": 184,
    "pending": 192,
    "read_cursor": 256,
    "wakeups": 264,
    "empty_wakeups": 272,
    "largest_batch": 280,
}


@pytest.fixture
def ring(instance):
    ring = Ring.create(f"/shmserve.{instance}.3.0-0.tokens", RingShape(32, 16), epoch=3)
    yield ring
    ring.segment.unlink()
    ring.close()


def test_new_ring_has_the_golden_header_bytes(ring):
    before = time.monotonic_ns()
    header = bytes(ring.segment.mapping[: L.HEADER_BYTES])
    assert header[:8] == b"SHMRING1"
    assert header[8:40] == struct.pack("<QQQQ", 1, 3, 32, 16)  # version, epoch, slot size, capacity
    (created,) = struct.unpack_from("<Q", header, 40)
    assert 0 < created <= before
    assert header[48:] == bytes(L.HEADER_BYTES - 48)
    assert ring.segment.num_bytes == 4096 + 32 * 16


def test_every_counter_stands_at_its_golden_offset(ring):
    producer, consumer = ring.producer(), ring.consumer()
    assert producer.try_write(bytes(range(32)) * 3, 3)
    for amount, word in enumerate((L.W_REFUSED, L.W_COALESCED, L.W_DROPPED, L.W_BLOCKED_NS), 11):
        producer.count(word, amount)
    producer.set_gauge(L.W_PENDING, 99)
    assert consumer.poll() == 3
    consumer.release(2)
    assert consumer.poll() == 1
    header = bytes(ring.segment.mapping[: L.HEADER_BYTES])
    at = {name: struct.unpack_from("<Q", header, offset)[0] for name, offset in OFFSETS.items()}
    assert at == {
        "claim_cursor": 3,
        "write_cursor": 3,
        "high_water": 3,
        "refused": 11,
        "coalesced": 12,
        "dropped": 13,
        "blocked_ns": 14,
        "publishes": 1,
        "pending": 99,
        "read_cursor": 2,
        "wakeups": 1,
        "empty_wakeups": 1,
        "largest_batch": 3,
    }
    assert bytes(ring.segment.mapping[4096 : 4096 + 96]) == bytes(range(32)) * 3


def test_names_of_the_words_cover_both_zones_and_agree_with_the_offsets():
    named = L.PRODUCER_WORDS | L.CONSUMER_WORDS
    assert {name: index * 8 for name, index in named.items()} == OFFSETS


def test_every_word_lies_in_the_zone_of_its_one_writer():
    creator = (
        L.W_MAGIC,
        L.W_VERSION,
        L.W_EPOCH,
        L.W_SLOT_SIZE,
        L.W_CAPACITY,
        L.W_CREATED_NS,
    )
    zones = [
        {index * 8 // L.ZONE_BYTES for index in words}
        for words in (creator, L.PRODUCER_WORDS.values(), L.CONSUMER_WORDS.values())
    ]
    assert all(len(zone) == 1 for zone in zones), zones
    assert len(set.union(*zones)) == 3
    every = [*creator, *L.PRODUCER_WORDS.values(), *L.CONSUMER_WORDS.values()]
    assert len(every) == len(set(every))
    assert max(every) * 8 + 8 <= L.HEADER_BYTES


def test_each_side_stores_only_in_its_own_zone(bare_ring):
    ring = bare_ring(8)

    def changed(before: bytes) -> set[int]:
        now = bytes(ring.memory[: L.HEADER_BYTES])
        return {i // L.ZONE_BYTES for i in range(len(now)) if now[i] != before[i]}

    before = bytes(ring.memory[: L.HEADER_BYTES])
    assert ring.producer.try_write(bytes(64), 8)
    assert not ring.producer.try_write(bytes(8), 1)
    ring.producer.count(L.W_REFUSED, 1)
    ring.producer.set_gauge(L.W_PENDING, 1)
    assert changed(before) == {1}
    before = bytes(ring.memory[: L.HEADER_BYTES])
    assert len(ring.read()) == 8
    assert ring.read() == []
    assert changed(before) == {2}


@pytest.mark.parametrize("capacity", [1, 2, 64, 16_384])
def test_ring_bytes_is_the_header_and_the_slots(capacity):
    assert L.ring_bytes(8, capacity) == 4096 + 8 * capacity
    assert L.ring_bytes(4096, capacity) == 4096 + 4096 * capacity


@pytest.mark.parametrize("capacity", [0, -1, -8, 3, 6, 100, 16_383])
def test_ring_bytes_refuses_a_capacity_that_is_no_power_of_two(capacity):
    with pytest.raises(ValueError, match=f"power of two, got {capacity}"):
        L.ring_bytes(128, capacity)


@pytest.mark.parametrize("slot_size", [0, -8, 4, 7, 12, 129])
def test_ring_bytes_refuses_a_slot_size_that_is_no_multiple_of_eight(slot_size):
    with pytest.raises(ValueError, match=f"multiple of 8, got {slot_size}"):
        L.ring_bytes(slot_size, 8)


def test_zones_start_on_their_own_cache_line_pair_and_slots_on_a_page(ring):
    assert L.W_CLAIM_CURSOR * 8 % L.ZONE_BYTES == 0
    assert L.W_READ_CURSOR * 8 % L.ZONE_BYTES == 0
    assert L.HEADER_BYTES % 4096 == 0


@pytest.mark.parametrize(
    ("word", "value", "complaint"),
    [
        (L.W_MAGIC, 0, "no magic"),
        (L.W_MAGIC, L.BOARD_MAGIC, "no magic"),
        (L.W_VERSION, 2, "layout version 2"),
        (L.W_CAPACITY, 0, "power of two"),
        (L.W_CAPACITY, 15, "power of two"),
        (L.W_CAPACITY, 32, "its header says"),
        (L.W_SLOT_SIZE, 0, "multiple of 8"),
        (L.W_SLOT_SIZE, 2**63, "its header says"),
    ],
)
def test_damaged_header_is_named(ring, word, value, complaint):
    words = ring.segment.words()
    assert L.header_fault(words, ring.segment.num_bytes) is None
    words[word] = value
    assert complaint in L.header_fault(words, ring.segment.num_bytes)


def test_segment_smaller_than_a_header_is_named(instance):
    segment = Segment.create(f"/shmserve.{instance}.1.0-0.tokens", 128)
    assert "128 bytes" in L.header_fault(segment.words(), segment.num_bytes)
    segment.unlink()
    segment.close()
