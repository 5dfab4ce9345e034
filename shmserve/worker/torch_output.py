"""From a step's logits, in torch tensors, to its `StepOutput`: what all runners over torch's own operators share.

Owns: which rows of logits a step needs, and the order of scoring, sampling and verifying. Never: computes logits; the runner
gives them for the rows that are asked of it. Under `torch.inference_mode` of its caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from shmserve.worker.batch import F4, I4, Batch, PromptPart, PromptScores, StepOutput
from shmserve.worker.sampler import sample, score
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.verification import Places, Top, kept_of, places_of

LogitsOf = Callable[[I4], Tensor]
"""The logits f32[R, V] after each of i4[R] tokens of the batch, in memory that may be written to."""

SCORED_TOGETHER = 64
"""Rows of logits of a prompt that are in memory at once."""


def rows_needed(batch: Batch) -> I4:
    """The tokens of the batch whose logits `output_of` will ask for, ascending, each once."""
    parts = [part.first_row + np.arange(len(part.token_ids)) for part in batch.prompt_parts]
    return np.unique(np.concatenate([places_of(batch).token_rows, *parts])).astype(np.int32)


def output_of(batch: Batch, sampling: SamplingState, logits_of: LogitsOf) -> StepOutput:
    """Score the parts of prompts that ask for it, then sample a token for each sequence that does."""
    scores = tuple(_score(logits_of, part) for part in batch.prompt_parts)
    if not batch.sample_seqs.size:
        none = np.zeros((0, 1), np.int32)
        return StepOutput(none, time.monotonic_ns(), prompt_scores=scores)
    places = places_of(batch)
    logits = logits_of(places.token_rows)
    kept = kept_of(batch, places, *_sample_all(logits, places, sampling))
    return StepOutput(
        token_ids=kept.token_ids,
        time_ns=time.monotonic_ns(),
        counts=kept.counts,
        logprobs=kept.logprobs,
        top=kept.top,
        failed=kept.failed,
        prompt_scores=scores,
    )


def _score(logits_of: LogitsOf, part: PromptPart) -> PromptScores:
    """What the model thought of a part of a prompt before it saw it."""
    found = []
    for start in range(0, len(part.token_ids), SCORED_TOGETHER):
        targets = part.token_ids[start : start + SCORED_TOGETHER]
        rows = part.first_row + start + np.arange(len(targets), dtype=np.int32)
        found.append(score(logits_of(rows), targets, part.num_top))
    logprobs, ids, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return PromptScores(part, logprobs, ids, values)


def _sample_all(logits: Tensor, places: Places, state: SamplingState) -> tuple[I4, F4 | None, Top]:
    """Tokens i4[Q], -1 where there is none, logprobs f4[Q], and the most likely by place: for all places with as many guesses before
    them at once."""
    ahead = np.zeros(len(places.rows), np.int32) if places.ahead is None else places.ahead
    token_ids, top = np.zeros(len(ahead), np.int32), Top()
    logprobs: F4 | None = None
    for num_ahead in range(int(ahead.max(initial=0)) + 1):
        at = np.flatnonzero(ahead == num_ahead)
        result = sample(logits[torch.from_numpy(at)], places.rows[at], state.ahead(num_ahead))
        token_ids[at] = result.token_ids
        token_ids[at[list(result.failed)]] = -1
        if result.logprobs is not None:
            if logprobs is None:
                logprobs = np.full(len(ahead), np.nan, np.float32)
            logprobs[at] = result.logprobs
        top |= {int(at[index]): likely for index, likely in (result.top or {}).items()}
    return token_ids, logprobs, top
