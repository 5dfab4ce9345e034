"""STARTED, FINISH and MESSAGE slots: what the worker says of a request as a whole.

The worker packs them, the front end unpacks them. Pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from shmserve.wire.tokens import TOKEN_HEAD, TOKEN_SLOT_BYTES, TokenKind, token_dtype

MESSAGE_BYTES: Final = 96
KEEP_ALL: Final = 0xFFFF_FFFF
FINISH_DTYPE: Final = token_dtype(
    (
        "prompt_tokens", "cached_tokens", "num_retractions", "keep_bytes", "matched_token", "matched_stop",
        "received_ns", "admitted_ns", "scheduled_ns", "prefill_end_ns", "first_token_ns",
        "num_verified", "num_drafts", "num_accepted",
    ),
    ("<u4", "<u4", "<u4", "<u4", "<i4", "<i4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4"),
    (32, 36, 40, 44, 48, 52, 56, 64, 72, 80, 88, 96, 100, 104),
)  # fmt: skip
_FINISH = struct.Struct("<QQIBBBBQIIIIiiQQQQQIII")


def pack_finish(
    kind: TokenKind,
    req_id: int,
    *,
    time_ns: int,
    step: int,
    finish: int = 0,
    completion_tokens: int = 0,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    num_retractions: int = 0,
    keep_bytes: int = KEEP_ALL,
    matched_token: int = -1,
    matched_stop: int = -1,
    stamps: Sequence[int] = (0, 0, 0, 0, 0),
    guesses: Sequence[int] = (0, 0, 0),
) -> bytes:
    """A FINISH or STARTED slot. `stamps`: received, admitted, first scheduled, prefill end, first token (ns; 0 if not yet).

    `guesses`: steps that verified some, how many those were, and how many of them were right.
    """
    head = _FINISH.pack(
        req_id, time_ns, completion_tokens, kind, 0, finish, 0, step, prompt_tokens, cached_tokens,
        num_retractions, keep_bytes, matched_token, matched_stop, *stamps, *guesses,
    )  # fmt: skip
    return head.ljust(TOKEN_SLOT_BYTES, b"\0")


class FinishRecord(msgspec.Struct, frozen=True, gc=False):
    """A FINISH or STARTED slot, unpacked. `completion_tokens` counts generated tokens, EOS included.

    This and Submit are Structs, not frozen dataclasses: a fifth of the time to make one, and each request makes three.
    """

    req_id: int
    time_ns: int
    finish: int
    step: int
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int
    keep_bytes: int
    matched_token: int
    matched_stop: int
    received_ns: int
    admitted_ns: int
    scheduled_ns: int
    prefill_end_ns: int
    first_token_ns: int
    num_verified: int
    num_drafts: int
    num_accepted: int


def unpack_finish(slot: bytes | memoryview) -> FinishRecord:
    req_id, time_ns, completion_tokens, _, _, finish, _, step, *rest = _FINISH.unpack_from(slot)
    return FinishRecord(req_id, time_ns, finish, step, completion_tokens, *rest)


def pack_message(req_id: int, text: str, *, time_ns: int, most_slots: int = 4) -> bytes:
    """MESSAGE slots that carry `text`, cut to `most_slots`; a character is never split between slots."""
    slots: list[bytes] = []
    rest = text
    while rest and len(slots) < most_slots:
        piece = rest.encode()[:MESSAGE_BYTES].decode(errors="ignore")
        rest = rest[len(piece) :]
        data = piece.encode()
        head = TOKEN_HEAD.pack(req_id, time_ns, len(slots), TokenKind.MESSAGE, len(data), 0, 0, 0)
        slots.append((head + data).ljust(TOKEN_SLOT_BYTES, b"\0"))
    return b"".join(slots)


def unpack_message(slot: bytes | memoryview) -> str:
    count = slot[21]
    return bytes(slot[32 : 32 + min(count, MESSAGE_BYTES)]).decode(errors="replace")
