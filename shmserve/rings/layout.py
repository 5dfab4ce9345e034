"""Where every byte of a ring segment stands.

Owns: the header words, their offsets, their writers. Never: writes memory.

    offset  word                 writer            meaning
    ------  -------------------  ----------------  ---------------------------------------------------------------
         0  MAGIC                creator, last     b"SHMRING1" as u64 (little endian): the segment is whole
         8  VERSION              creator           layout version of header and slots
        16  EPOCH                creator           life of the channel; a new life gets new segments, never a reset
        24  SLOT_SIZE            creator           bytes
        32  CAPACITY             creator           slots, a power of two
        40  CREATED_NS           creator           CLOCK_MONOTONIC
       128  CLAIM_CURSOR         producer          slots whose copy has begun
       136  WRITE_CURSOR         producer          slots that are whole
       144  HIGH_WATER           producer          greatest write_cursor - read_cursor seen at a publish
       152  REFUSED              producer          units that did not fit and were given back to the caller
       160  COALESCED            producer          slots merged into another slot before they were written
       168  DROPPED              producer          slots thrown away by the drop policy
       176  BLOCKED_NS           producer          time spent waiting for credits
       184  PUBLISHES            producer          batches written (one signal each)
       192  PENDING              producer          slots that wait outside the ring (gauge)
       256  READ_CURSOR          consumer          slots handled
       264  WAKEUPS              consumer          reads of the data counter that found something
       272  EMPTY_WAKEUPS        consumer          reads that found nothing
       280  LARGEST_BATCH        consumer          most slots found by one read
      4096  slot 0
      4096 + i * SLOT_SIZE       slot i            the slot of cursor c is c & (CAPACITY - 1)

    read_cursor <= write_cursor <= claim_cursor <= read_cursor + capacity      (u64, free-running; they outlive the machine)

Each zone of 128 bytes has one writer (two cache lines: adjacent-line prefetch does not make the sides share). Words are
aligned u64 stored one at a time through a memoryview of format "Q", which CPython compiles to one 8-byte move.
Slots between write_cursor and claim_cursor are torn after a death; all others are whole.
"""

from __future__ import annotations

from typing import Final

MAGIC: Final = int.from_bytes(b"SHMRING1", "little")
BOARD_MAGIC: Final = int.from_bytes(b"SHMBORD1", "little")
VERSION: Final = 1
HEADER_BYTES: Final = 4096
ZONE_BYTES: Final = 128

# Indices of u64 words (offset / 8).
W_MAGIC: Final = 0
W_VERSION: Final = 1
W_EPOCH: Final = 2
W_SLOT_SIZE: Final = 3
W_CAPACITY: Final = 4
W_CREATED_NS: Final = 5

W_CLAIM_CURSOR: Final = 16
W_WRITE_CURSOR: Final = 17
W_HIGH_WATER: Final = 18
W_REFUSED: Final = 19
W_COALESCED: Final = 20
W_DROPPED: Final = 21
W_BLOCKED_NS: Final = 22
W_PUBLISHES: Final = 23
W_PENDING: Final = 24

W_READ_CURSOR: Final = 32
W_WAKEUPS: Final = 33
W_EMPTY_WAKEUPS: Final = 34
W_LARGEST_BATCH: Final = 35

# Byte ranges of the OFD locks on a segment's file (they guard roles, not bytes).
LOCK_OWNER: Final = 0
LOCK_PRODUCER: Final = 1
LOCK_CONSUMER: Final = 2

PRODUCER_WORDS: Final = {
    "claim_cursor": W_CLAIM_CURSOR,
    "write_cursor": W_WRITE_CURSOR,
    "high_water": W_HIGH_WATER,
    "refused": W_REFUSED,
    "coalesced": W_COALESCED,
    "dropped": W_DROPPED,
    "blocked_ns": W_BLOCKED_NS,
    "publishes": W_PUBLISHES,
    "pending": W_PENDING,
}
CONSUMER_WORDS: Final = {
    "read_cursor": W_READ_CURSOR,
    "wakeups": W_WAKEUPS,
    "empty_wakeups": W_EMPTY_WAKEUPS,
    "largest_batch": W_LARGEST_BATCH,
}


def ring_bytes(slot_size: int, capacity: int) -> int:
    """Size of a segment that holds `capacity` slots of `slot_size` bytes."""
    if capacity < 1 or capacity & (capacity - 1):
        raise ValueError(f"capacity must be a power of two, got {capacity}")
    if slot_size < 8 or slot_size % 8:
        raise ValueError(f"slot_size must be a positive multiple of 8, got {slot_size}")
    return HEADER_BYTES + slot_size * capacity


def header_fault(words: memoryview, num_bytes: int) -> str | None:
    """What is wrong with the header of a segment of `num_bytes` that should be a ring; None if it is one."""
    if num_bytes < HEADER_BYTES:
        return f"has {num_bytes} bytes, less than a ring's header"
    if words[W_MAGIC] != MAGIC:
        return "is not a whole ring (no magic)"
    if words[W_VERSION] != VERSION:
        return f"has layout version {words[W_VERSION]}, this is version {VERSION}"
    try:
        wanted = ring_bytes(words[W_SLOT_SIZE], words[W_CAPACITY])
    except ValueError as error:
        return f"has a damaged header: {error}"
    if num_bytes != wanted:
        return f"has {num_bytes} bytes, its header says {wanted}"
    return None
