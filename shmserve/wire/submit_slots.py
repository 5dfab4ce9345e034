"""Slots of the submit ring: their kinds and heads, and the control records, which are a head and perhaps a digest.

Owns: SUBMIT_DTYPE, and what may be read of a slot without unpacking its request. Both processes, and who looks on; pure functions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from shmserve.wire.errors import WireError

SUBMIT_SLOT_BYTES: Final = 4096
SECTIONS_OFFSET: Final = 256
CONTINUATION_OFFSET: Final = 16


class SubmitKind(IntEnum):
    SUBMIT = 1
    CONTINUATION = 2
    ABORT = 3
    ABORT_BY_ID = 4
    PAUSE = 5
    RESUME = 6
    FLUSH_CACHE = 7
    EVICT = 8


class Section(IntEnum):
    PROMPT_IDS = 1
    STOP_STRING = 2
    STOP_IDS = 3
    STOP_REGEX = 4
    LOGIT_BIAS = 5
    ALLOWED_IDS = 6
    BAD_IDS = 7
    GRAMMAR = 8
    CACHE_SALT = 9
    DIGEST = 10
    SHOWN_IDS = 11


SUBMIT_DTYPE: Final = np.dtype(
    {
        "names": [
            "req_id", "kind", "flags", "num_slots", "length", "time_ns", "arrival_ns", "deadline_ns", "seed",
            "priority", "max_tokens", "min_tokens", "temperature", "top_p", "min_p", "top_k",
            "frequency_penalty", "presence_penalty", "repetition_penalty", "num_logprobs", "prompt_logprobs",
            "num_speculative_tokens",
        ],
        "formats": [
            "<u8", "u1", "u1", "<u2", "<u4", "<u8", "<u8", "<u8", "<u8",
            "<i4", "<u4", "<u4", "<f4", "<f4", "<f4", "<i4",
            "<f4", "<f4", "<f4", "<i4", "<i4", "<u4",
        ],
        "offsets": [0, 8, 9, 10, 12, 16, 24, 32, 40, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96],
        "itemsize": SECTIONS_OFFSET,
    }
)  # fmt: skip
SUBMIT_FIELDS = struct.Struct("<QBBHIQQQQiIIfffifffiiI")
SUBMIT_HEAD = struct.Struct("<QBBHIQ")


def submit_head(slot: memoryview | bytes) -> tuple[int, int, int]:
    """(req_id, kind, num_slots) of a submit slot. Raises WireError for a kind that is none."""
    req_id, kind, _, num_slots, _, _ = SUBMIT_HEAD.unpack_from(slot)
    if not SubmitKind.SUBMIT <= kind <= SubmitKind.EVICT:
        raise WireError(f"submit record of unknown kind {kind}")
    return req_id, kind, num_slots if kind == SubmitKind.SUBMIT else 1


@dataclass(frozen=True, slots=True)
class SubmitHead:
    """What a submit slot says of itself, without what the client sent. The last two are of a SUBMIT; -1 elsewhere."""

    req_id: int
    kind: int
    num_slots: int  # of a CONTINUATION: its number
    time_ns: int
    prompt_tokens: int = -1
    max_tokens: int = -1


def peek_submit(slot: memoryview | bytes) -> SubmitHead:
    """The head of any submit slot, also of one whose kind is none: for those who look on."""
    req_id, kind, _, num_slots, _, time_ns = SUBMIT_HEAD.unpack_from(slot)
    if kind == SubmitKind.CONTINUATION:
        return SubmitHead(req_id, kind, num_slots, 0)
    if kind != SubmitKind.SUBMIT:
        return SubmitHead(req_id, kind, 1, time_ns)
    tag, _, size = struct.unpack_from("<HHI", slot, SECTIONS_OFFSET)
    prompt_tokens = size // 4 if tag == Section.PROMPT_IDS else -1
    return SubmitHead(
        req_id, kind, num_slots, time_ns, prompt_tokens, SUBMIT_FIELDS.unpack_from(slot)[10]
    )


def without_contents(slots: bytes) -> bytes:
    """Submit slots less what the client sent: nothing is left behind their heads, which `peek_submit` reads, but zeros."""
    rows = np.frombuffer(slots, np.uint8).reshape(-1, SUBMIT_SLOT_BYTES).copy()
    is_continuation = rows[:, 8] == SubmitKind.CONTINUATION
    rows[is_continuation, CONTINUATION_OFFSET:] = 0
    rows[:, SECTIONS_OFFSET + 8 :] = 0
    return rows.tobytes()


def pack_control(kind: SubmitKind, req_id: int, *, time_ns: int, digest: bytes = b"") -> bytes:
    """One slot of ABORT, ABORT_BY_ID, PAUSE, RESUME, FLUSH_CACHE or EVICT."""
    head = SUBMIT_HEAD.pack(req_id, kind, 0, 1, 0, time_ns)
    return (head + digest).ljust(SUBMIT_SLOT_BYTES, b"\0")


def control_digest(slot: memoryview | bytes) -> bytes:
    """The digest of an ABORT_BY_ID slot."""
    return bytes(slot[24:40])


def digest_of_req_id(req_id: int) -> bytes:
    """A digest that stands for one sequence, of whichever front end: what ABORT_BY_ID carries for the id of an answer."""
    return bytes(8) + req_id.to_bytes(8, "big")


def req_id_of_digest(digest: bytes) -> int:
    """The sequence that a digest stands for; 0 if it stands for an id that a client gave."""
    return int.from_bytes(digest[8:], "big") if digest[:8] == bytes(8) else 0
