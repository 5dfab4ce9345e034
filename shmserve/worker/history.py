"""Which tokens a sequence has, and how often it has made each: what penalties need to know.

Owns: the unique ids of one sequence with penalties, and the counts of those it generated. Never: is told of a token; it
reads the sequence's row of token ids as far as it has grown, so it is right after a preemption, a hit in the prefix cache and a step of
several tokens. Worker's main thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I4 = npt.NDArray[np.int32]


class History:
    """`tokens` is the sequence's row of the token column, of which the first `num_prompt` are the prompt."""

    def __init__(self, tokens: I4, num_prompt: int) -> None:
        self._tokens = tokens
        self._num_seen = num_prompt
        prompt: I4 = np.unique(tokens[:num_prompt])
        self._count = len(prompt)
        self._ids = np.concatenate([prompt, np.zeros(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.int32)
        self._places = {token: place for place, token in enumerate(prompt.tolist())}

    def upto(self, num_tokens: int) -> tuple[I4, I4]:
        """All ids among the first `num_tokens` tokens, each once, and how often each was generated. Views until the next call."""
        if num_tokens > self._num_seen:
            new: list[int] = self._tokens[self._num_seen : num_tokens].tolist()
            self._num_seen = num_tokens
            for token in new:
                self._counts[self._place_of(token)] += 1
        return self._ids[: self._count], self._counts[: self._count]

    def _place_of(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._count
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._count += 1
        return place
