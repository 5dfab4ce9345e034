"""What one step computes, and what it gave: two structs of arrays between the scheduler and a runner.

The scheduler fills a `Batch`, the runner reads it and answers with a `StepOutput`. Neither holds a Python object per
sequence. Worker process only, main thread only.

Nobody writes to a struct that another has made. They are not frozen all the same, as those of verification.py and commit.py that are made in
every step: a frozen dataclass of twelve fields takes 2.4 us to make, 13 us where the step finds its caches cold, and this one a quarter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

I4: TypeAlias = npt.NDArray[np.int32]
F4: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens of one sequence's prompt that are to be scored in this step: what the model thought of them before it saw them.

    seq           index into the S sequences
    first_row     index into the T tokens of the one that stands before the first; their logits are in consecutive rows
    first_index   the first one's position in the prompt
    token_ids     i4[n]  the scored tokens
    num_top       so many of the most likely at each position are wanted, too
    """

    seq: int
    first_row: int
    first_index: int
    token_ids: I4
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of one PromptPart: logprobs f4[n] (NaN where a logit was not finite), and top_ids i4[n, N], top_logprobs f4[n, N]."""

    part: PromptPart
    logprobs: F4
    top_ids: I4
    top_logprobs: F4


@dataclass(slots=True)
class Batch:
    """S sequences with T tokens in all, ragged: sequence s computes tokens [cu_seqlens[s], cu_seqlens[s + 1]).

    step          number of this step, for logs and records
    rows          i4[S]  row slot of each sequence: the key into SamplingState and other column stores
    token_ids     i4[T]  tokens to compute
    positions     i4[T]  their positions in their sequences
    kv_slots      i4[T]  where their keys and values are written: block * block_size + offset
    cu_seqlens    i4[S + 1]
    block_table   i4[S, M]  block ids of each sequence, valid up to ceil(kv_lens / block_size); the rest is 0
    kv_lens       i4[S]  tokens in the KV cache once this step is computed
    sample_seqs   i4[R]  indices into the S sequences that sample a token in this step, ascending
    is_decode     every sequence computes exactly one token and samples
    prompt_parts  of those who asked for logprobs of their prompt
    num_drafts    i4[R]  how many of the last tokens of each that samples are guesses, to be verified (verification.py);
                  None: nobody guesses
    """

    step: int
    rows: I4
    token_ids: I4
    positions: I4
    kv_slots: I4
    cu_seqlens: I4
    block_table: I4
    kv_lens: I4
    sample_seqs: I4
    is_decode: bool
    prompt_parts: tuple[PromptPart, ...] = ()
    num_drafts: I4 | None = None

    @property
    def num_seqs(self) -> int:
        return int(self.rows.shape[0])

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_guessed(self) -> int:
        """Of its tokens, those that are guesses."""
        return 0 if self.num_drafts is None else int(self.num_drafts.sum())


@dataclass(slots=True)
class StepOutput:
    """The tokens of one step, in the order of `Batch.sample_seqs`.

    token_ids   i4[R, K]  K is the most tokens any sequence made in this step (1 without speculation)
    counts      i4[R]     how many of them are valid, at least 1; None means 1 each
    logprobs    f4[R, K]  raw log-softmax of each, or None where no sequence asked
    top         per sampled sequence (index into R): i4[K, N] ids and f4[K, N] logprobs of the N most likely; absent if not asked
    failed      indices into R whose logits were not finite: those sequences end with an error, the others go on
    prompt_scores  one for each of `Batch.prompt_parts`
    time_ns     CLOCK_MONOTONIC when the tokens were known on the host
    """

    token_ids: I4
    time_ns: int
    counts: I4 | None = None
    logprobs: F4 | None = None
    top: dict[int, tuple[I4, F4]] | None = None
    failed: tuple[int, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()

    @classmethod
    def of_nothing(cls) -> StepOutput:
        """Of a batch without tokens."""
        return cls(np.zeros((0, 1), np.int32), time.monotonic_ns())
