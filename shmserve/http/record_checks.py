"""What a worker may say of a request: the bounds of every token record that is looked at one by one.

Owns: those bounds. A record beyond them is a WireError: counted, and its request ends. Never: looks at a plain token, whose only number
(its id) the pump checks by using it. Event loop's thread only.
"""

from __future__ import annotations

import struct
from typing import Final

from shmserve.request import FinishReason
from shmserve.wire.errors import WireError
from shmserve.wire.finish import FinishRecord
from shmserve.wire.logprobs import PAIRS_PER_SLOT
from shmserve.wire.tokens import TOKENS_PER_SLOT

MOST_MESSAGE_CHARACTERS: Final = 4_096
"""Of all MESSAGE records of one request together."""

_LAST_REASON: Final = int(max(FinishReason))
_TOKEN_IDS: Final = struct.Struct("<8i")
_PAIR_IDS: Final = struct.Struct("<12i")


def tokens_of(slot: bytes, vocab_size: int) -> tuple[int, ...]:
    """The ids in a TOKENS slot."""
    count = slot[21]
    if not 1 <= count <= TOKENS_PER_SLOT:
        raise WireError(f"TOKENS of {count} tokens")
    ids = _TOKEN_IDS.unpack_from(slot, 32)[:count]
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise WireError(f"a token id outside 0 to {vocab_size - 1}")
    return ids


def check_pairs(slot: bytes, vocab_size: int) -> None:
    """A TOP_LOGPROBS or PROMPT_LOGPROBS slot."""
    count = slot[21]
    if not 1 <= count <= PAIRS_PER_SLOT:
        raise WireError(f"logprobs of {count} tokens")
    ids = _PAIR_IDS.unpack_from(slot, 32)[:count]
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise WireError(f"a token id outside 0 to {vocab_size - 1}")


def check_finish(record: FinishRecord, now_ns: int) -> None:
    """A STARTED or FINISH slot."""
    reason = record.finish
    if not 0 <= reason <= _LAST_REASON:
        raise WireError(f"finish reason {reason}")
    if record.cached_tokens > record.prompt_tokens:
        raise WireError("more cached tokens than the prompt has")
    if record.matched_stop < (0 if reason == FinishReason.STOP_STRING else -1):
        raise WireError(f"stop string {record.matched_stop}")
    if record.num_verified > record.num_drafts or record.num_accepted > record.num_drafts:
        raise WireError("guesses that do not add up")
    newest_ns = max(
        record.time_ns,
        record.received_ns,
        record.admitted_ns,
        record.scheduled_ns,
        record.prefill_end_ns,
        record.first_token_ns,
    )
    if newest_ns > now_ns:
        raise WireError("a time that has not come")
