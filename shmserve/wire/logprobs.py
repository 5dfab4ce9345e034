"""TOP_LOGPROBS and PROMPT_LOGPROBS slots: pairs of a token and its logprob.

The worker packs them; the front end reads them by TOP_DTYPE, a batch at a time. Pure functions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.wire.tokens import TokenKind, token_dtype

PAIRS_PER_SLOT: Final = 12
FLAG_RUN: Final = 1
"""PROMPT_LOGPROBS: each pair belongs to a token of its own, in the order of the prompt."""
TOP_DTYPE: Final = token_dtype(("token_ids", "logprobs"), ("(12,)<i4", "(12,)<f4"), (32, 80))


def pack_top_logprobs(
    req_id: int,
    index: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    step: int,
) -> bytes:
    """TOP_LOGPROBS slots for one position: the most likely tokens, 12 pairs a slot."""
    num_slots = -(-len(ids) // PAIRS_PER_SLOT)
    out = np.zeros(num_slots, TOP_DTYPE)
    out["req_id"], out["index"], out["kind"], out["step"] = (
        req_id,
        index,
        TokenKind.TOP_LOGPROBS,
        step,
    )
    for i in range(num_slots):
        part = slice(i * PAIRS_PER_SLOT, (i + 1) * PAIRS_PER_SLOT)
        n = len(ids[part])
        out["count"][i] = n
        out["token_ids"][i, :n] = ids[part]
        out["logprobs"][i, :n] = logprobs[part]
    return out.tobytes()


def pack_prompt_logprobs(
    req_id: int,
    first_index: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    step: int,
) -> bytes:
    """PROMPT_LOGPROBS slots of n tokens of a prompt from `first_index` on: [n, 1 + N], the token itself before the N most likely."""
    num_tokens, width = ids.shape
    is_run = width == 1
    if is_run:
        num_slots, counts = -(-num_tokens // PAIRS_PER_SLOT), np.array([num_tokens])
    else:
        each = -(-width // PAIRS_PER_SLOT)
        num_slots, counts = num_tokens * each, np.full(num_tokens, width)
    out = np.zeros(num_slots, TOP_DTYPE)
    out["req_id"], out["kind"], out["step"] = req_id, TokenKind.PROMPT_LOGPROBS, step
    out["flags"] = FLAG_RUN if is_run else 0
    slots = np.arange(num_slots)
    rows = len(counts)
    if not num_slots:
        return b""
    each = num_slots // rows
    at = slots % each * PAIRS_PER_SLOT
    out["index"] = first_index + (at if is_run else slots // each)
    out["count"] = np.minimum(PAIRS_PER_SLOT, counts[slots // each] - at)
    for name, values in (("token_ids", ids), ("logprobs", logprobs)):
        padded = np.zeros((rows, each * PAIRS_PER_SLOT), values.dtype)
        padded[:, : counts[0]] = values.reshape(rows, counts[0])
        out[name] = padded.reshape(num_slots, PAIRS_PER_SLOT)
    return out.tobytes()
