"""Sampling parameters of the running sequences as columns, indexed by row slot.

Set when a sequence is admitted, cleared when it leaves; a step reads them by fancy index and touches no Python object per
sequence, but for those in the dicts, which need something of their own. `position` is the number of tokens generated so far:
with the seed it keys the random draw, so preemption and recompute repeat the same draws. Worker process only.
"""

from __future__ import annotations

from concurrent.futures import Future
from copy import copy

import numpy as np
import numpy.typing as npt

from shmserve.request import SamplingParams
from shmserve.worker.history import History

GREEDY_BELOW = 1e-5
I4 = npt.NDArray[np.int32]
F4 = npt.NDArray[np.float32]


class SamplingState:
    """Columns of `num_rows` sequences. The dicts hold entries only for rows that need them.

    bias          ids i4[n], each once, and what is added to their logits f4[n]
    banned_early  ids that min_tokens masks (EOS, stop ids)
    histories     of rows with penalties
    masks         u4 or i4[ceil(vocab_size / 32)]: bit b of word w is set where token 32 w + b may come next
    """

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
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.bias: dict[int, tuple[I4, F4]] = {}
        self.banned_early: dict[int, I4] = {}
        self.histories: dict[int, History] = {}
        self._masks: dict[int, npt.NDArray[np.int32]] = {}
        self._coming_masks: Future[dict[int, npt.NDArray[np.int32]]] | None = None

    def set(
        self,
        row: int,
        params: SamplingParams,
        banned_early: tuple[int, ...],
        position: int,
        tokens: I4 | None = None,
        num_prompt: int = 0,
    ) -> None:
        """Row `row` now samples as `params` says; `position` tokens exist already (more than 0 after a preemption).

        `tokens` is its row of the token column, of which `num_prompt` are the prompt: penalties look at it as it grows.
        """
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
        self.num_prompt[row] = num_prompt
        self.clear(row)
        if params.logit_bias:
            bias = dict(params.logit_bias)
            self.bias[row] = (np.array([*bias], np.int32), np.array([*bias.values()], np.float32))
        if params.min_tokens > position and banned_early:
            self.banned_early[row] = np.array(banned_early, np.int32)
        if (
            params.frequency_penalty != 0
            or params.presence_penalty != 0
            or params.repetition_penalty != 1
        ):
            assert tokens is not None, f"row {row} has penalties, and no tokens to look at"
            self.histories[row] = History(tokens, num_prompt)

    @property
    def masks(self) -> dict[int, npt.NDArray[np.int32]]:
        """Waits for those that are still being filled: ask after the forward pass, not before it."""
        if self._coming_masks is not None:
            self._masks = self._coming_masks.result()
            self._coming_masks = None
        return self._masks

    def expect_masks(self, coming: Future[dict[int, npt.NDArray[np.int32]]] | None) -> None:
        """The masks of the step that begins, filled in another thread; None for none. Those of the last step are over."""
        self._masks = {}
        self._coming_masks = coming

    def seen(self, row: int) -> tuple[I4, I4] | None:
        """Ids of a row with penalties, each once, and how often each was generated; None for one without."""
        history = self.histories.get(row)
        if history is None:
            return None
        return history.upto(int(self.num_prompt[row]) + int(self.position[row]))

    def bans(self, row: int, ahead: int = 0) -> I4 | None:
        """Ids that may not come yet, `ahead` tokens behind the next one, since they would end it before `min_tokens`."""
        banned = self.banned_early.get(row)
        is_early = self.position[row] + ahead < self.min_tokens[row]
        return banned if banned is not None and is_early else None

    def ahead(self, count: int) -> SamplingState:
        """This state as it will be `count` tokens on, for rows that may guess: neither penalties nor masks know those tokens."""
        if not count:
            return self
        state = copy(self)
        state.position = self.position + np.int32(count)
        return state

    @property
    def has_edits(self) -> bool:
        """Whether any row's logits must be changed before the draw."""
        return bool(self.bias or self.banned_early or self.histories or self.masks)

    def is_greedy(self, rows: I4) -> npt.NDArray[np.bool_]:
        """Rows whose token is the first of the largest logits."""
        result: npt.NDArray[np.bool_] = (self.temperature[rows] < GREEDY_BELOW) | (
            self.top_k[rows] == 1
        )
        return result

    def is_edited(self, rows: I4) -> npt.NDArray[np.bool_]:
        """Rows whose logits must be changed before the draw."""
        edited = self.bias.keys() | self.banned_early.keys() | self.histories.keys()
        edited |= self.masks.keys()
        if not edited:
            return np.zeros(rows.shape[0], np.bool_)
        return np.array([row in edited for row in rows.tolist()], np.bool_)

    def clear(self, row: int) -> None:
        """Forget what row `row` held outside the columns."""
        self.bias.pop(row, None)
        self.banned_early.pop(row, None)
        self.histories.pop(row, None)
