"""The words that both processes share about a request: how to sample, why it ended.

Owns: `SamplingParams`, `FinishReason`. Never: validates a client's input (the front end does, before it builds one) or knows
a byte layout (`wire/` does). Both processes may import it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

MOST_SPECULATIVE_TOKENS: Final = 15
"""So many tokens may be guessed for one sequence in a step, at most."""


MOST_LOGPROBS: Final = 20
"""So many of the most likely tokens may be asked for at a place."""


class FinishReason(IntEnum):
    """Why a request ended. The number travels in the FINISH record; 0 means that it has not ended."""

    NONE = 0
    STOP_STRING = 1
    STOP_TOKEN = 2  # EOS or one of the request's own stop ids
    LENGTH = 3
    GRAMMAR = 4
    ABORT = 5  # the client left, or somebody aborted it by id
    ERROR = 6  # it could not go on; the MESSAGE records before the FINISH say why
    TIMEOUT = 7
    EVICTED = 8  # it waited, and had to go for one with a better priority

    @property
    def is_stop(self) -> bool:
        """True where OpenAI's word for it is "stop"."""
        return self in (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN, FinishReason.GRAMMAR)


class SamplingParams(msgspec.Struct, frozen=True, gc=False):
    """How one sequence is sampled and when it ends. Every field is already validated and resolved.

    `seed` is this sequence's own 64-bit stream (n > 1 gives each choice another); `top_k` 0 and `top_p` 1.0 and `min_p` 0.0
    mean off; `temperature` 0 is greedy. `max_tokens` counts generated tokens, EOS and stop tokens included.

    A Struct, not a frozen dataclass: that one takes 8 us to make, or to change with `replace`, and every request does both.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[bytes, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_ids: tuple[
        int, ...
    ] = ()  # special tokens that are text all the same, where the others are skipped
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none; 0: the chosen token's; k: and the k most likely
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    priority: int = 0  # lower runs earlier
    num_speculative_tokens: int = 0  # guessed in a step and verified, at most; 0: none
    allowed_token_ids: tuple[int, ...] = ()  # no other token may come; (): any
    bad_words: tuple[
        tuple[int, ...], ...
    ] = ()  # token ids of each; their last one never comes behind the others
    grammar: str = ""  # llguidance's text (`grammar.py`); the completion is a sentence of it
