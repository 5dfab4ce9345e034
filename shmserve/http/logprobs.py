"""Logprobs of one completion: collected from records, given out token by token, in the shapes of each API.

Owns: the log (the pump's slow path fills it), OpenAI's two shapes and SGLang's one. Never: computes a logprob, or lets a number
into JSON that JSON does not have: what is not finite is OpenAI's -9999. Front end only.

A token's `bytes` are its own bytes, so that they rebuild characters that are split over tokens; a special token that is not part of
the text has none. Event loop's thread only.
"""

from __future__ import annotations

import codecs
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from shmserve.http.detokenizer import Pieces
from shmserve.token_text import TokenText
from shmserve.wire.logprobs import FLAG_RUN

T = TypeVar("T")
FLOOR: Final = -9999.0
_new_decoder = codecs.getincrementaldecoder("utf-8")
_IDS: Final = struct.Struct("<8i")
_LOGPROBS: Final = struct.Struct("<8f")
_PAIRS: Final = struct.Struct("<12i12f")
_INDEX: Final = struct.Struct("<I")


class TokenLogprob(NamedTuple):
    """One generated (or prompt) token; `top` are the most likely at its place, best first. `logprob` None: it has none."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class LogprobLog:
    """Tokens with their logprobs, in order; those that were not yet taken. At most max_tokens of them."""

    __slots__ = ("_pending", "_prompt", "_tops")

    def __init__(self) -> None:
        self._prompt: dict[int, list[tuple[int, float]]] = {}
        self._pending: list[TokenLogprob] = []
        self._tops: dict[int, list[tuple[int, float]]] = {}

    def add_top(self, slot: bytes) -> None:
        """A TOP_LOGPROBS slot: it stands before the TOKENS slot with the token of its index."""
        count = slot[21]
        (index,) = _INDEX.unpack_from(slot, 16)
        values = _PAIRS.unpack_from(slot, 32)
        pairs = zip(values[:count], map(finite, values[12 : 12 + count]), strict=True)
        self._tops.setdefault(index, []).extend(pairs)

    def add_tokens(self, slot: bytes) -> None:
        """A TOKENS slot."""
        (index,) = _INDEX.unpack_from(slot, 16)
        ids, logprobs = _IDS.unpack_from(slot, 32), _LOGPROBS.unpack_from(slot, 96)
        for i in range(slot[21]):
            top = self._tops.pop(index + i, ())
            self._pending.append(TokenLogprob(ids[i], finite(logprobs[i]), tuple(top)))

    def add_prompt(self, slot: bytes) -> None:
        """A PROMPT_LOGPROBS slot: a run of tokens, or one token's own pair and the most likely in its place."""
        (index,) = _INDEX.unpack_from(slot, 16)
        values = _PAIRS.unpack_from(slot, 32)
        count = slot[21]
        pairs = zip(values[:count], map(finite, values[12 : 12 + count]), strict=True)
        if slot[23] & FLAG_RUN:
            self._prompt.update((index + i, [pair]) for i, pair in enumerate(pairs))
        else:
            self._prompt.setdefault(index, []).extend(pairs)

    def of_prompt(self, token_ids: Sequence[int]) -> list[TokenLogprob]:
        """The prompt's tokens; the first has no logprob, since nothing stands before it."""
        found = []
        for index, token_id in enumerate(token_ids):
            pairs = self._prompt.get(index)
            own = pairs[0][1] if pairs else None
            found.append(TokenLogprob(token_id, own, tuple(pairs[1:]) if pairs else ()))
        return found

    @property
    def width(self) -> int:
        """Logprobs of the newest token that was not taken: its own, and the most likely beside it."""
        return 1 + len(self._pending[-1].top) if self._pending else 1

    def take(self, count: int) -> list[TokenLogprob]:
        """The next `count` tokens."""
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken


def finite(logprob: float) -> float:
    """JSON has no infinities: a token that was masked gets OpenAI's floor."""
    return logprob if math.isfinite(logprob) else FLOOR


class TokenTexts:
    """What a token is called and which bytes it has, under the request's skip_special_tokens."""

    def __init__(self, pieces: Pieces, pieces_with_special: Pieces) -> None:
        self._pieces = pieces
        self._all = pieces_with_special

    def raw(self, token_id: int) -> bytes:
        return self._pieces.raw(token_id)

    def token_text(self) -> TokenText | None:
        """One text's bytes, where `raw` alone does not give them."""
        return self._pieces.token_text()

    def shared(self, kind: Callable[[TokenTexts], T]) -> T:
        """The table of this kind that all texts of these pieces share."""
        key = (kind, self._all)
        table: T | None = self._pieces.tables.get(key)
        if table is None:
            table = self._pieces.tables[key] = kind(self)
        return table

    def name(self, token_id: int) -> str:
        """For people; U+FFFD where it is part of a character."""
        return self._all.raw(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """As `name`, but distinct for parts of characters too: OpenAI's `bytes:\\xf0\\x9f`."""
        raw = self._all.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokens: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content = [
        _named(token.token_id, token.logprob, texts)
        | {"top_logprobs": [_named(*pair, texts) for pair in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _named(token_id: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    return {
        "token": texts.name(token_id),
        "logprob": logprob,
        "bytes": list(texts.raw(token_id)),
    }


def prompt_logprobs(
    tokens: Sequence[TokenLogprob], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the token itself and the most likely; null for the first. `rank` is null beyond those."""
    found: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            found.append(None)
            continue
        entries: dict[str, Any] = {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": texts.name(token_id)}
            for rank, (token_id, value) in enumerate(token.top, 1)
        }
        own = {
            "logprob": token.logprob,
            "rank": None,
            "decoded_token": texts.name(token.token_id),
        }
        entries.setdefault(str(token.token_id), own)
        found.append(entries)
    return found


class CompletionLogprobs:
    """`choices[].logprobs` of completions, event after event: offsets go on where the last event ended.

    `text_offset` counts characters of the returned text: from the prompt's first where it is echoed, else from the first that was
    generated. A token inside a character begins where that character does.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.begin(0)

    def begin(self, offset: int) -> None:
        """What comes now is a text of its own, whose first character is number `offset` of what is returned."""
        self._source = self._texts.token_text()
        self._decoder = _new_decoder("replace")
        self._offset = offset

    def pass_text(self, num_characters: int) -> int:
        """A token of so many whole characters comes, which is not given to `of`: the offset of its text."""
        offset = self._offset
        self._offset += num_characters
        return offset

    def of(self, tokens: Sequence[TokenLogprob], *, has_top: bool) -> dict[str, Any]:
        names, offsets, tops = [], [], []
        for token in tokens:
            names.append(self._texts.key(token.token_id))
            offsets.append(self._offset)
            data = self._texts.raw(token.token_id)
            if self._source is not None:  # not what the token is, but what it adds to the text
                data = self._source.feed(token.token_id)
            self._offset += len(self._decoder.decode(data))
            top = {self._texts.key(token_id): value for token_id, value in token.top}
            if token.logprob is not None:
                top.setdefault(names[-1], token.logprob)
            tops.append(top if token.logprob is not None else None)
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if has_top else None,
            "text_offset": offsets,
        }


def native_logprobs(
    tokens: Sequence[TokenLogprob], texts: TokenTexts | None
) -> tuple[list[Any], list[Any]]:
    """SGLang's `output_token_logprobs` and `output_top_logprobs`: [logprob, id, text or null]."""

    def triple(token_id: int, logprob: float | None) -> list[Any]:
        return [logprob, token_id, None if texts is None else texts.name(token_id)]

    return (
        [triple(token.token_id, token.logprob) for token in tokens],
        [[triple(*pair) for pair in token.top] or None for token in tokens],
    )
