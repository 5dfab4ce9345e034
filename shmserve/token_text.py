"""The bytes of one completion, token by token, for tokenizers whose byte table alone does not give them.

Owns: the one space that SentencePiece puts before a text, taken off once (`LeadingSpace`), and the stream decoder for tokenizers
whose decoder looks at neighbours (`StreamDecoder`: WordPiece, and whatever the check of `token_bytes.py` did not prove). The
worker matches stop conditions on these bytes and the front end shows them, so both agree where the text is cut. Never: cuts it.

Laws: what `feed` and `finish` give adds up to the library's decode of all ids; nothing given is taken back. What counts as the
beginning is that of the generated ids, as in a decode of them alone. Both processes; no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tokenizers import Tokenizer

MOST_HELD_TOKENS: Final = 64
"""So many tokens may wait for the end of a character. Past it they go out as they stand: else a run of broken bytes would be
decoded again at every token."""


class TokenText(Protocol):
    """One completion's. `is_settled`: from here on its bytes are the table's, token by token."""

    is_settled: bool

    def feed(self, token_id: int) -> bytes: ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a model's tokens become text. `tokenizer` where its byte table is not exact."""

    strips_leading_space: bool = False
    tokenizer: Tokenizer | None = None

    def open(self, raw: Callable[[int], bytes]) -> TokenText | None:
        """For one completion; None where `raw`, a token's bytes as they count in the text, is all there is to it."""
        if self.tokenizer is not None:
            return StreamDecoder(self.tokenizer, raw)
        return LeadingSpace(raw) if self.strips_leading_space else None


class LeadingSpace:
    """The table's bytes, without one space at the very beginning."""

    __slots__ = ("_raw", "is_settled")

    def __init__(self, raw: Callable[[int], bytes]) -> None:
        self._raw = raw
        self.is_settled = False

    def feed(self, token_id: int) -> bytes:
        data = self._raw(token_id)
        if self.is_settled or not data:
            return data
        self.is_settled = True
        return data.removeprefix(b" ")

    def finish(self) -> bytes:
        return b""


class StreamDecoder:
    """The library's decode of a window: the tokens last given, for what their decoder makes of their neighbours, and those held."""

    __slots__ = ("_given", "_given_text", "_held", "_raw", "_tokenizer", "is_settled")

    def __init__(self, tokenizer: Tokenizer, raw: Callable[[int], bytes]) -> None:
        self._tokenizer = tokenizer
        self._raw = raw  # empty: the token is skipped, and no neighbour of anything
        self._given: list[int] = []
        self._given_text = ""
        self._held: list[int] = []
        self.is_settled = False

    def feed(self, token_id: int) -> bytes:
        if not self._raw(token_id):
            return b""
        self._held.append(token_id)
        if len(self._held) > MOST_HELD_TOKENS:
            return self.finish()
        text = self._decode(self._given + self._held)
        if text.endswith("\ufffd") or not text.startswith(self._given_text):
            return b""  # the end of a character may follow, or what changes the text before
        return self._give(text)

    def finish(self) -> bytes:
        """What is held, as it stands."""
        return self._give(self._decode(self._given + self._held)) if self._held else b""

    def _give(self, text: str) -> bytes:
        new = text[len(self._given_text) :]
        self._given, self._held = self._held, []
        self._given_text = self._decode(self._given)
        return new.encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
