"""Where completions end: the stop conditions of one step, in their fixed order.

    1 stop string   2 stop token or EOS   3 length (tokens, context)   4 the grammar's end     inside a step of several tokens, position by position

Owns: the decision. Never: frees anything. A sequence without stop strings is judged in columns; one with them token by token,
over bytes, by its `StopMatcher`. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmserve.request import FinishReason, SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.token_text import Decoding
from shmserve.wire.finish import KEEP_ALL
from shmserve.worker.columns import Columns
from shmserve.worker.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended. `keep_bytes` of its text are the completion's; KEEP_ALL if there is nothing to cut."""

    reason: FinishReason
    matched_token: int = -1
    matched_stop: int = -1
    keep_bytes: int = KEEP_ALL
    fault: str = ""
    """Of an ERROR, for the client."""


class StopConditions:
    """`token_bytes` and `special_ids` are the tokenizer's; they are needed for stop strings only."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        special_ids: tuple[int, ...],
        decoding: Decoding = Decoding(),  # noqa: B008 (frozen)
    ) -> None:
        self._decoding = decoding
        self._token_bytes = token_bytes
        self._special_ids = frozenset(special_ids)

    def judge_columns(
        self, columns: Columns, rows: npt.NDArray[np.integer], token_ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(ended by a stop id, ended by length) for rows that have just been given one token each."""
        num_tokens = columns.num_tokens[rows]
        stops = (columns.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        stops &= num_tokens >= columns.min_total[rows]
        return stops, (num_tokens >= columns.max_total[rows]) & ~stops

    def judge_one(
        self, sequence: Sequence, token_id: int, num_output: int, num_left: int
    ) -> Ending | None:
        """How `token_id` ends `sequence`, if it does: it is output token number `num_output` (from 1), with `num_left` to go."""
        params = sequence.params
        counts = num_output >= params.min_tokens
        is_stop_id = counts and token_id in sequence.stop_ids
        if sequence.matcher is not None and not is_stop_id:
            match = sequence.matcher.feed(self._text_of(sequence, token_id), is_matching=counts)
            if match is not None:
                keep = match.end if params.include_stop else match.start
                return Ending(FinishReason.STOP_STRING, matched_stop=match.stop, keep_bytes=keep)
        if is_stop_id:
            if sequence.grammar is not None and sequence.grammar.is_error():
                return failed(sequence.grammar)  # its mask left nothing but the end: that is none
            return Ending(FinishReason.STOP_TOKEN, matched_token=token_id)
        if num_left <= 0:
            return Ending(FinishReason.LENGTH)
        if sequence.grammar is not None:
            return advance_grammar(sequence.grammar, token_id)
        return None

    def _text_of(self, sequence: Sequence, token_id: int) -> bytes:
        raw = self._raw_of(sequence.params)
        if sequence.text is None:
            sequence.text = self._decoding.open(raw)
        return raw(token_id) if sequence.text is None else sequence.text.feed(token_id)

    def _raw_of(self, params: SamplingParams) -> Callable[[int], bytes]:
        """A token's bytes as they count in this sequence's text, in the front end as here."""
        if not params.skip_special_tokens:
            return self._raw
        return (
            partial(self._raw_showing, params.shown_ids) if params.shown_ids else self._raw_skipping
        )

    def _raw(self, token_id: int) -> bytes:
        return self._token_bytes[token_id]

    def _raw_showing(self, shown: tuple[int, ...], token_id: int) -> bytes:
        return self._token_bytes[token_id] if token_id in shown else self._raw_skipping(token_id)

    def _raw_skipping(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._token_bytes[token_id]


def advance_grammar(grammar: LLMatcher, token_id: int) -> Ending | None:
    """The matcher has this token behind it; the ending if nothing may follow."""
    if not grammar.consume_token(token_id):
        return failed(grammar)
    return Ending(FinishReason.GRAMMAR) if grammar.is_stopped() else None


def failed(grammar: LLMatcher) -> Ending:
    """The ending of one whose grammar could not be followed any further, for want of room or by its own fault."""
    reason = " ".join(grammar.get_error().removesuffix("<non-verbose/>").split())
    return Ending(FinishReason.ERROR, fault=f"the grammar failed: {reason}")
