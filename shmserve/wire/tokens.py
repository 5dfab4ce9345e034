"""Slots of the token ring: their kinds and common head, TOKENS records, and what a full ring makes of them.

Owns: TOKENS_DTYPE, merging and stamping of what waits outside the ring. Both processes; pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np

TOKEN_SLOT_BYTES: Final = 128
TOKENS_PER_SLOT: Final = 8


class TokenKind(IntEnum):
    TOKENS = 1
    TOP_LOGPROBS = 2
    PROMPT_LOGPROBS = 3
    STARTED = 4
    FINISH = 5
    MESSAGE = 6
    READY = 7
    LOADING = 8


ONE_TOKEN: Final = TokenKind.TOKENS | 1 << 8
"""`kind`, `count`, `finish` and `flags` of a slot, read as one word from its `kind` on: a single token, and nothing to say of it."""
FLAG_LAST_IS_STOP: Final = 1
"""TOKENS: the last token ended the request (EOS or a stop id): it counts, and has no text."""


def token_dtype(
    names: Sequence[str], formats: Sequence[str], offsets: Sequence[int]
) -> np.dtype[np.void]:
    common = (
        ("req_id", "<u8", 0),
        ("time_ns", "<u8", 8),
        ("index", "<u4", 16),
        ("kind", "u1", 20),
        ("count", "u1", 21),
        ("finish", "u1", 22),
        ("flags", "u1", 23),
        ("step", "<u8", 24),
    )
    return np.dtype(
        {
            "names": [name for name, _, _ in common] + list(names),
            "formats": [fmt for _, fmt, _ in common] + list(formats),
            "offsets": [offset for _, _, offset in common] + list(offsets),
            "itemsize": TOKEN_SLOT_BYTES,
        }
    )


TOKENS_DTYPE: Final = token_dtype(
    ("token_ids", "dt_us", "logprobs"), ("(8,)<i4", "(8,)<u4", "(8,)<f4"), (32, 64, 96)
)
TOKEN_HEAD = struct.Struct("<QQIBBBBQ")  # the common 32 bytes
_TIME_INDEX = struct.Struct("<QI")  # time_ns and index, at 8


def token_key(slot: memoryview | bytearray | bytes) -> int:
    """The req_id of any token slot."""
    return int.from_bytes(slot[:8], "little")


def weigh_tokens(slot: memoryview | bytearray) -> int:
    """The unit of --coalesce-tokens: tokens in a token slot; 1 for one of a prompt's logprobs, which come before any token; else 0."""
    kind = slot[20]
    return slot[21] if kind == TokenKind.TOKENS else int(kind == TokenKind.PROMPT_LOGPROBS)


def stamp_publish(slots: bytearray, now_ns: int) -> None:
    """Store the publish delay in each TOKENS slot of `slots`, which are about to be written."""
    for at in range(0, len(slots), TOKEN_SLOT_BYTES):
        if slots[at + 20] == TokenKind.TOKENS:
            sampled = int.from_bytes(slots[at + 8 : at + 16], "little")
            delay = min(0xFFFF_FFFF, max(0, now_ns - sampled) // 1000)
            slots[at + 64 : at + 68] = delay.to_bytes(4, "little")


def fold_tokens(pending: bytearray, arriving: memoryview) -> bool:
    """Merge the TOKENS slot `arriving` into `pending`, which stands before it: ids, times (to 1 us) and logprobs are kept.

    False, and nothing is changed, if they are not two runs of one completion that follow each other and fit one slot.
    """
    kind = TokenKind.TOKENS
    if pending[20] != kind or arriving[20] != kind or pending[:8] != arriving[:8]:
        return False
    have, more = pending[21], arriving[21]
    if have + more > TOKENS_PER_SLOT or pending[22] or pending[23]:
        return False
    begin_ns, index = _TIME_INDEX.unpack_from(pending, 8)
    then_ns, then_index = _TIME_INDEX.unpack_from(arriving, 8)
    if index + have != then_index:
        return False
    after_us = (then_ns - begin_ns) // 1000
    # Bytes, not numpy: 3 us instead of 25, and a full ring folds a whole batch every step.
    times = [after_us]
    if more > 1:
        times += [after_us + dt for dt in struct.unpack_from(f"<{more - 1}I", arriving, 68)]
    if after_us < 0 or max(times) > 0xFFFF_FFFF:
        return False
    for column in (32, 96):
        pending[column + 4 * have : column + 4 * (have + more)] = arriving[
            column : column + 4 * more
        ]
    struct.pack_into(f"<{more}I", pending, 64 + 4 * have, *times)
    pending[21] = have + more
    pending[22:24] = arriving[22:24]
    return True
