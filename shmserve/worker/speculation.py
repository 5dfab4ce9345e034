"""Who guesses in a step, and how much: the room that guesses may take.

Owns: the n-gram indices of the sequences that speculate. Never: preempts anybody, or writes a guess where a token belongs: the
columns hold what is certain, and the prefix cache and the penalties read nothing else.

    a sequence     at most as many as it asked for, and never past its last token: of the guesses and the token behind them
                   all could be kept
    a step         at most as many as the runner verifies, and half of what the decoding rows leave of the token budget: the
                   other half is for prompts
    blocks         those that the sequence has, and one more while more are free than sequences run: no guess is the reason
                   that somebody is preempted in the next step

Rows with penalties, bad words or a grammar never guess: what may come next depends on the tokens before it in a way that no row can be
told in advance. Nothing here costs anything where nobody speculates. Worker's main thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmserve.request import MOST_SPECULATIVE_TOKENS, SamplingParams
from shmserve.worker.block_tables import BlockTables
from shmserve.worker.columns import Columns
from shmserve.worker.ngram import NgramIndex
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sequence import Sequence


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
            sequence.guesser = NgramIndex(sequence.token_ids, most)
        self._by_row[sequence.row] = sequence

    def leave(self, row: int) -> None:
        self._by_row.pop(row, None)

    def guesses(
        self, rows: npt.NDArray[np.int32], budget: int, num_running: int
    ) -> dict[int, list[int]]:
        """Guesses for the decoding `rows`, by index; `budget` is what they leave of the step's tokens."""
        found: dict[int, list[int]] = {}
        if not self._by_row:
            return found
        room = min(self._max_guesses, budget // 2)
        for index, row in enumerate(rows.tolist()):
            sequence = self._by_row.get(row)
            if sequence is not None:
                guess = self._guess(sequence, room, num_running)
                if guess:
                    found[index] = guess
                    room -= len(guess)
        return found

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
