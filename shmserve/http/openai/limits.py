"""`allowed_token_ids` and `bad_words`, with vLLM's meaning: which tokens may not come.

Owns: the way from words to the token ids that spell them. A bad word is forbidden as it stands at the beginning of a text and, where
that is another token, as it stands behind a blank; the same letters cut into other tokens are not found (as in vLLM: stop strings
are what compares text). Event loop's thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmserve.http import fields
from shmserve.http.errors import bad_field

if TYPE_CHECKING:
    from shmserve.http.openai.schemas import Sampling
    from shmserve.http.tokenizer import Tokenizer

MOST_BAD_WORDS: Final = 128  # vLLM's bound
MOST_WORD_BYTES: Final = 1_024


@dataclass(frozen=True, slots=True)
class Limits:
    """As in SamplingParams."""

    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


NONE: Final = Limits()


async def limits_of(tokenizer: Tokenizer, parsed: Sampling) -> Limits:
    """What a request may not say. Raises ApiError 400 that names the field."""
    allowed, words = parsed.allowed_token_ids, parsed.bad_words
    if allowed is None and not words:
        return NONE
    if allowed is not None:
        if not allowed:
            raise bad_field("allowed_token_ids", "allowed_token_ids must not be empty")
        fields.token_ids("allowed_token_ids", allowed, tokenizer.vocab_size)
    return Limits(tuple(dict.fromkeys(allowed or ())), await _spelled(tokenizer, words or []))


async def _spelled(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    name = "bad_words"
    if len(words) > MOST_BAD_WORDS:
        raise bad_field(name, f"{name} may hold at most {MOST_BAD_WORDS}, got {len(words)}")
    for word in words:
        if not word.strip():
            raise bad_field(name, f"{name} must not hold an empty string")
        if len(word.encode()) > MOST_WORD_BYTES:
            raise bad_field(name, f"a word in {name} may have at most {MOST_WORD_BYTES} bytes")
    bare = [word.lstrip() for word in words]
    spelled = await tokenizer.encode_all([*bare, *(" " + word for word in bare)])
    found: dict[tuple[int, ...], None] = {}
    for at_start, inside in zip(spelled[: len(bare)], spelled[len(bare) :], strict=True):
        found[at_start] = None
        # vLLM's rule: " word" is the same word only where the blank is part of its first token.
        if len(inside) == len(at_start) and inside[0] != at_start[0]:
            found[inside] = None
    return tuple(word for word in found if word)
