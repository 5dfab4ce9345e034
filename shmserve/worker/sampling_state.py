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
from shmserve.worker.bad_words import BadWords
from shmserve.worker.history import History

GREEDY_BELOW = 1e-5
I4 = npt.NDArray[np.int32]
F4 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.int32]


class SamplingState:
    """Columns of `num_rows` sequences. The dicts hold entries only for rows that need them.

    bias          ids i4[n], each once, and what is added to their logits f4[n]
    banned_early  ids that min_tokens masks (EOS, stop ids)
    histories     of rows with penalties
    bad_words     of rows that have some
    allowed       masks of rows that may only use some ids
    masks         u4 or i4[ceil(vocab_size / 32)]: bit b of word w is set where token 32 w + b may come next in its grammar

    `vocab_size` is needed where ids are allowed.
    """

    def __init__(self, num_rows: int, vocab_size: int = 0) -> None:
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
        self.bad_words: dict[int, BadWords] = {}
        self.allowed: dict[int, Mask] = {}
        self._vocab_size = vocab_size
        self._masks: dict[int, Mask] = {}
        self._coming_masks: Future[dict[int, Mask]] | None = None

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

        `tokens` is its row of the token column, of which `num_prompt` are the prompt: penalties and bad words look at it as it grows.
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
        if params.bad_words:
            assert tokens is not None, f"row {row} has bad words, and no tokens to look at"
            self.bad_words[row] = BadWords(params.bad_words, tokens, num_prompt)
        if params.allowed_token_ids:
            self.allowed[row] = _mask_of(params.allowed_token_ids, self._vocab_size)

    def mask(self, row: int) -> Mask | None:
        """Which ids may come next in row `row`, by its grammar and its allowed ids; None for any. May wait, as `masks` does."""
        by_grammar, allowed = self.masks.get(row), self.allowed.get(row)
        if by_grammar is None or allowed is None:
            return allowed if by_grammar is None else by_grammar
        # A grammar knows the ids that only pad the vocabulary, too; the allowed ones end before them.
        return by_grammar.view(np.int32)[: len(allowed)] & allowed

    @property
    def has_limits(self) -> bool:
        """Whether any row has ids that may not come, by a mask or by a word."""
        return bool(self.bad_words or self.allowed or self.masks)

    def may_guess(self, row: int) -> bool:
        """Whether its draws can be made before the tokens in front of them are certain."""
        return row not in self.histories and row not in self.bad_words and row not in self.masks

    @property
    def masks(self) -> dict[int, Mask]:
        """Waits for those that are still being filled: ask after the forward pass, not before it."""
        if self._coming_masks is not None:
            self._masks = self._coming_masks.result()
            self._coming_masks = None
        return self._masks

    def expect_masks(self, coming: Future[dict[int, Mask]] | None) -> None:
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
        """Ids that may not come `ahead` tokens behind the next one: they would end it before `min_tokens`, or complete a bad word."""
        early, bad = self.banned_early.get(row), self.bad_ids(row)
        if early is not None and self.position[row] + ahead >= self.min_tokens[row]:
            early = None
        if early is None or bad is None:
            return bad if early is None else early
        return np.concatenate([early, bad])

    def bad_ids(self, row: int) -> I4 | None:
        """Ids that would complete a bad word."""
        words = self.bad_words.get(row)
        return words.banned(int(self.position[row])) if words is not None else None

    def ahead(self, count: int) -> SamplingState:
        """This state as it will be `count` tokens on, for rows that may guess: penalties, words and grammars know no such tokens."""
        if not count:
            return self
        state = copy(self)
        state.position = self.position + np.int32(count)
        return state

    @property
    def has_edits(self) -> bool:
        """Whether any row's logits must be changed before the draw."""
        return bool(self.bias or self.banned_early or self.histories or self.has_limits)

    def is_greedy(self, rows: I4) -> npt.NDArray[np.bool_]:
        """Rows whose token is the first of the largest logits."""
        result: npt.NDArray[np.bool_] = (self.temperature[rows] < GREEDY_BELOW) | (
            self.top_k[rows] == 1
        )
        return result

    def is_edited(self, rows: I4) -> npt.NDArray[np.bool_]:
        """Rows whose logits must be changed before the draw."""
        edited = self.bias.keys() | self.banned_early.keys() | self.histories.keys()
        edited |= self.bad_words.keys() | self.allowed.keys() | self.masks.keys()
        if not edited:
            return np.zeros(rows.shape[0], np.bool_)
        return np.array([row in edited for row in rows.tolist()], np.bool_)

    def clear(self, row: int) -> None:
        """Forget what row `row` held outside the columns."""
        self.bias.pop(row, None)
        self.banned_early.pop(row, None)
        self.histories.pop(row, None)
        self.bad_words.pop(row, None)
        self.allowed.pop(row, None)


def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> Mask:
    """The mask in which only these ids are set."""
    assert vocab_size, "allowed ids need a vocabulary"
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
