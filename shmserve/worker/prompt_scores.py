"""Logprobs of prompts: which tokens of a chunk are scored, and the records of their scores.

Owns: the way from a chunk of a prompt to its `PromptPart`, and from its scores to PROMPT_LOGPROBS slots. Never: computes a logit.
A token is scored by the row before it, so each chunk scores the first token of the next; the prompt's first has no score.
Worker's main thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmserve.wire.logprobs import pack_prompt_logprobs
from shmserve.worker.batch import PromptPart, PromptScores
from shmserve.worker.columns import Columns
from shmserve.worker.sequence import Sequence


def prompt_parts(
    columns: Columns,
    chunks: list[tuple[Sequence, int]],
    num_decode: int,
    cu_seqlens: npt.NDArray[np.int32],
) -> tuple[PromptPart, ...]:
    """What is to be scored in a batch whose sequences behind the first `num_decode` are `chunks`."""
    parts = []
    for seq, (sequence, count) in enumerate(chunks, num_decode):
        if sequence.params.prompt_logprobs < 0:
            continue
        computed = int(columns.num_computed[sequence.row])
        first = max(computed + 1, sequence.num_scored)
        end = min(computed + count + 1, sequence.num_prompt_tokens)
        if first < end:
            parts.append(
                PromptPart(
                    seq=seq,
                    first_row=int(cu_seqlens[seq]) + first - 1 - computed,
                    first_index=first,
                    token_ids=sequence.prompt_ids[first:end],
                    num_top=sequence.params.prompt_logprobs,
                )
            )
    return tuple(parts)


def pack_scores(sequence: Sequence, scores: PromptScores, step: int) -> bytes:
    """The slots of one part; the sequence remembers that it had them."""
    part = scores.part
    sequence.num_scored = part.first_index + len(part.token_ids)
    return pack_prompt_logprobs(
        sequence.req_id,
        part.first_index,
        np.concatenate([part.token_ids[:, None], scores.top_ids], axis=1),
        np.concatenate([scores.logprobs[:, None], scores.top_logprobs], axis=1),
        step,
    )
