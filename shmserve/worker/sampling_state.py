"""Sampling parameters of the running sequences as columns, indexed by row slot.

Set when a sequence is admitted, cleared when it leaves; a step reads them by fancy index and touches no Python object per
sequence. `position` is the number of tokens generated so far: with the seed it keys the random draw, so preemption and
recompute repeat the same draws. Worker process only.
"""

from __future__ import annotations

import numpy as np

from shmserve.request import SamplingParams


class SamplingState:
    """Columns of `num_rows` sequences. `bias` and `history` hold entries only for rows that need them."""

    def __init__(self, num_rows: int) -> None:
        self.seed = np.zeros(num_rows, np.uint64)
        self.position = np.zeros(num_rows, np.int32)
        self.temperature = np.ones(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.repetition_penalty = np.ones(num_rows, np.float32)
        self.num_logprobs = np.full(num_rows, -1, np.int32)
        self.min_tokens = np.zeros(num_rows, np.int32)
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> (ids i4[n], values f4[n])
        self.banned_early: dict[
            int, np.ndarray
        ] = {}  # row -> ids that min_tokens masks (EOS, stop ids)

    def set(
        self, row: int, params: SamplingParams, banned_early: tuple[int, ...], position: int
    ) -> None:
        """Row `row` now samples as `params` says; `position` tokens exist already (more than 0 after a preemption)."""
        self.seed[row] = params.seed
        self.position[row] = position
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.frequency_penalty[row] = params.frequency_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.repetition_penalty[row] = params.repetition_penalty
        self.num_logprobs[row] = params.num_logprobs
        self.min_tokens[row] = params.min_tokens
        self.clear(row)
        if params.logit_bias:
            ids = np.array([token for token, _ in params.logit_bias], np.int32)
            self.bias[row] = (ids, np.array([v for _, v in params.logit_bias], np.float32))
        if params.min_tokens > position and banned_early:
            self.banned_early[row] = np.array(banned_early, np.int32)

    def clear(self, row: int) -> None:
        """Forget what row `row` held outside the columns."""
        self.bias.pop(row, None)
        self.banned_early.pop(row, None)
