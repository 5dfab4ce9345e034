"""Who guesses in a step, and how much: the room that guesses may take.

Owns: the n-gram indices of the sequences that speculate. Never: preempts anybody, or writes a guess where a token belongs: the
columns hold what is certain, and the prefix cache and the penalties read nothing else.

    a sequence     at most as many as it asked for, and never past its last token: of the guesses and the token behind them
                   all could be kept
    a step         at most as many as the runner verifies, and half of what the decoding rows leave of the token budget: the
                   other half is for prompts. LEARNT_AT_ONCE tokens of one prompt are learnt: all at once would take 2 us each
    blocks         those that the sequence has, and one more while more are free than sequences run: no guess is the reason
                   that somebody is preempted in the next step

Rows with penalties, bad words or a grammar never guess: what may come next depends on the tokens before it in a way that no row can be
told in advance. Nothing here costs anything where nobody speculates. Worker's main thread only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.request import MOST_SPECULATIVE_TOKENS, SamplingParams
from shmserve.worker.block_tables import BlockTables
from shmserve.worker.columns import Columns
from shmserve.worker.ngram import NgramIndex
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sequence import Sequence

LEARNT_AT_ONCE: Final = 1_024
"""Tokens of a prompt whose n-grams are learnt in one step."""


class Speculation:
    """The running sequences that speculate, by row. `max_guesses` of `info` 0: nobody does."""

    def __init__(self, info: RunnerInfo, columns: Columns, tables: BlockTables) -> None:
        self._max_guesses = info.max_guesses
        self._block_size = info.block_size
        self._columns = columns
        self._tables = tables
        self._by_row: dict[int, Sequence] = {}

    def enter(self, sequence: Sequence) -> None:
        """It has got its row. What it has learnt survives a preemption."""
        if not self._max_guesses or not _may_guess(sequence.params):
            return
        if sequence.guesser is None:
            most = min(sequence.params.num_speculative_tokens, MOST_SPECULATIVE_TOKENS)
            sequence.guesser = NgramIndex(sequence.token_ids[:0], most)
        self._by_row[sequence.row] = sequence

    def leave(self, row: int) -> None:
        """It loses its row. Its last guess is judged now: a token that it makes once it was computed again is none of that guess."""
        sequence = self._by_row.pop(row, None)
        if sequence is None or sequence.guesser is None:
            return
        columns, guesser = self._columns, sequence.guesser
        if guesser.num_guessed:
            newest = columns.token_ids[row, guesser.num_tokens : int(columns.num_tokens[row])]
            if len(newest):
                guesser.follow(newest.tolist())

    def guesses(
        self, rows: npt.NDArray[np.int32], budget: int, num_running: int
    ) -> dict[int, list[int]]:
        """Guesses for the decoding `rows`, by index; `budget` is what they leave of the step's tokens."""
        found: dict[int, list[int]] = {}
        if not self._by_row:
            return found
        room = min(self._max_guesses, budget // 2)
        has_learnt = False
        for index, row in enumerate(rows.tolist()):
            sequence = self._by_row.get(row)
            if sequence is None:
                continue
            if self._num_unlearnt(sequence) > LEARNT_AT_ONCE:
                if not has_learnt:
                    self._learn(sequence)
                has_learnt = True
                continue
            guess = self._guess(sequence, room, num_running)
            if guess:
                found[index] = guess
                room -= len(guess)
        return found

    def _num_unlearnt(self, sequence: Sequence) -> int:
        assert sequence.guesser is not None
        return int(self._columns.num_tokens[sequence.row]) - sequence.guesser.num_tokens

    def _learn(self, sequence: Sequence) -> None:
        guesser = sequence.guesser
        assert guesser is not None
        begin = guesser.num_tokens
        tokens = self._columns.token_ids[sequence.row, begin : begin + LEARNT_AT_ONCE]
        guesser.extend(tokens.tolist())

    def _guess(self, sequence: Sequence, room: int, num_running: int) -> list[int]:
        columns, row, guesser = self._columns, sequence.row, sequence.guesser
        assert guesser is not None
        num_tokens = int(columns.num_tokens[row])
        guesser.follow(columns.token_ids[row, guesser.num_tokens : num_tokens].tolist())
        guess = guesser.guess(min(room, int(columns.max_total[row]) - 1 - num_tokens))
        if not guess:
            return guess
        blocks = self._tables.blocks
        have = len(sequence.blocks) * self._block_size - num_tokens
        if len(guess) > have and blocks.num_free > num_running:
            self._tables.grow(sequence, 1)
            have += self._block_size
        guess = guess[:have]
        guesser.num_guessed = len(guess)
        return guess


def _may_guess(params: SamplingParams) -> bool:
    has_penalty = (
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
    )
    has_limits = has_penalty or params.bad_words or params.grammar
    return params.num_speculative_tokens > 0 and not has_limits
