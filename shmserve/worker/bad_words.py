"""Words that one sequence must not say, as sequences of token ids: which id may not come next.

Owns: the comparison of a sequence's newest tokens with the beginnings of its words. Never: is told of a token; it reads the
sequence's row of token ids, so it is right after a preemption and in any batch. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

I4 = npt.NDArray[np.int32]


class BadWords:
    """`tokens` is the sequence's row of the token column. A word counts where its tokens were all generated (vLLM's rule)."""

    def __init__(self, words: Iterable[tuple[int, ...]], tokens: I4, num_prompt: int) -> None:
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._always: I4 = np.array(sorted({w[0] for w in words if len(w) == 1}), np.int32)
        # By the token that stands before a word's last one: most steps look at none of them.
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            if len(word) > 1:
                ending = (list(word[:-1]), word[-1])
                self._endings.setdefault(word[-2], []).append(ending)

    def banned(self, num_output: int) -> I4 | None:
        """The ids that would complete a word behind the first `num_output` generated tokens; None if there are none."""
        end = self._num_prompt + num_output
        found: list[int] = []
        if num_output and self._endings:
            for before, last in self._endings.get(int(self._tokens[end - 1]), ()):
                start = end - len(before)
                if start >= self._num_prompt and self._tokens[start:end].tolist() == before:
                    found.append(last)
        if not found:
            return self._always if len(self._always) else None
        return np.union1d(self._always, np.array(found, np.int32)).astype(np.int32)
