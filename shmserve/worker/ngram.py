"""N-gram speculation: what follows now is guessed to be what followed the same tokens before (prompt lookup).

Owns: for one sequence, where its n-grams last occurred and how much to guess. Never: changes what is generated: the guesses
are verified in the next step by the model itself, and only those that it would have made are kept. Worker's main thread only.

A guess costs a row of the step, so its length follows its success: it doubles while everything is accepted and falls back to
what was accepted otherwise. Method: A. Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

GRAM_SIZES: Final = (4, 3, 2)
"""Longest first: the longer the match, the likelier the guess."""

FIRST_GUESS: Final = 3


class NgramIndex:
    """N-grams of one sequence's tokens, each with the place of the token that followed its last occurrence.

    `most` bounds a guess. `num_guessed` is the length of the last guess, 0 once its success is known. Memory: about 300 bytes a token of a sequence that speculates, none for others.
    """

    def __init__(self, token_ids: npt.NDArray[np.int32], most: int) -> None:
        self.most = most
        self.num_guessed = 0
        self.num_verified = (
            0  # guesses whose success is known, their tokens, and of these the right ones
        )
        self.num_drafts = 0
        self.num_accepted = 0
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._length = min(FIRST_GUESS, most)
        self.extend(token_ids.tolist())

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens that are certain now. One that follows nothing yet indexes nothing: a gram needs a successor."""
        tokens, after = self._tokens, self._after
        for token in token_ids:
            at = len(tokens)
            for size in GRAM_SIZES:
                if at >= size:
                    after[tuple(tokens[at - size : at])] = at
            tokens.append(token)

    def guess(self, room: int) -> list[int]:
        """At most `room` tokens that may follow, none where the end has not occurred before."""
        count = min(self._length, room)
        if count <= 0:
            return []
        tokens = self._tokens
        for size in GRAM_SIZES:
            at = self._after.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if at is not None:
                found = tokens[at : at + count]
                # A loop shorter than the guess goes on with itself.
                while len(found) < count:
                    found += found[: count - len(found)]
                return found
        return []

    def follow(self, token_ids: Sequence[int]) -> None:
        """What came since the last guess: the guesses that were right, and a token behind them."""
        num_right = min(self.num_guessed, len(token_ids) - 1)
        if self.num_guessed:
            self.num_verified += 1
            self.num_drafts += self.num_guessed
            self.num_accepted += max(0, num_right)
        self.learn(self.num_guessed, num_right)
        self.num_guessed = 0
        self.extend(token_ids)

    def learn(self, num_guessed: int, num_accepted: int) -> None:
        """How the last guess did: sets the length of the next."""
        if not num_guessed:
            return
        if num_accepted == num_guessed:
            self._length = min(self.most, max(self._length, 2 * num_guessed))
        else:
            self._length = min(self.most, max(1, num_accepted + 1))
