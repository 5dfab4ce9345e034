"""A token's logprobs as JSON, put together from parts that are ready: what the pump writes for streams that want them.

Owns: the parts of each token, escaped once, and OpenAI's two shapes made of them. Never: knows a record or a socket
(`logprob_send.py`), or says anything else than `logprobs.py` and msgspec do: byte for byte the event that `OpenAIChoice.delta` gives for
one token with text. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from shmserve.http.detokenizer import escape_separators
from shmserve.http.logprobs import CompletionLogprobs, TokenTexts

MOST_PARTS: Final = 65_536
"""Tokens whose parts are kept, some 200 bytes each; then it begins anew."""

_encode = msgspec.json.encode


class ChatParts(dict[int, bytes]):
    """Token id -> its place in a list of the most likely, with a `%b` for its logprob. An id outside the vocabulary is an IndexError.

    One object a token: of those that are seldom drawn, each object more is a cache miss more."""

    __slots__ = ("_texts",)

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def __missing__(self, token_id: int) -> bytes:
        name = escape_separators(_encode(self._texts.name(token_id))).replace(b"%", b"%%")
        data = _encode(list(self._texts.raw(token_id)))
        if len(self) >= MOST_PARTS:
            self.clear()
        self[token_id] = part = b'{"token":%b,"logprob":%%b,"bytes":%b},' % (name, data)
        return part


class CompletionParts(dict[int, tuple[bytes, int]]):
    """Token id -> its name, and how many characters of text it is, for one that is whole characters. Bounded as the other."""

    __slots__ = ("_texts",)

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def __missing__(self, token_id: int) -> tuple[bytes, int]:
        name = escape_separators(_encode(self._texts.key(token_id)))
        num_characters = len(self._texts.raw(token_id).decode("utf-8", "replace"))
        if len(self) >= MOST_PARTS:
            self.clear()
        self[token_id] = parts = (name, num_characters)
        return parts


class LogprobFrames(Protocol):
    """What stands around a token's text, and between it and the logprobs: `front` text `middle` logprobs `back`."""

    front: bytes
    middle: bytes
    back: bytes
    num_top: int
    """So many of the most likely stand beside each token."""

    def logprobs(self, token_id: int, numbers: Sequence[bytes], top_ids: Sequence[int]) -> bytes:
        """Of one token. `numbers`: its own logprob and those of `top_ids`, in JSON. Raises IndexError for what is no token, with nothing
        changed."""


class ChatFrames:
    """`choices[].logprobs` of chat completions. `around`: an event's bytes before its text, between, and behind its logprobs."""

    def __init__(self, around: tuple[bytes, bytes, bytes], num_top: int, texts: TokenTexts) -> None:
        front, middle, back = around
        self.front, self.middle = front, middle + b'{"content":['
        self.back = b'],"refusal":null}' + back
        self.num_top = num_top
        self._parts = texts.shared(ChatParts)

    def logprobs(self, token_id: int, numbers: Sequence[bytes], top_ids: Sequence[int]) -> bytes:
        parts = self._parts
        own = parts[token_id] % numbers[0]
        tops = b"".join(
            [parts[top] % number for top, number in zip(top_ids, numbers[1:], strict=True)]
        )
        # Without the brace that ends the one, and the comma that ends the other.
        return b"".join((own[:-2], b',"top_logprobs":[', tops[:-1], b"]}"))


class CompletionFrames:
    """`choices[].logprobs` of completions; `offsets` counts where each token's text begins."""

    def __init__(
        self,
        around: tuple[bytes, bytes, bytes],
        num_top: int,
        texts: TokenTexts,
        offsets: CompletionLogprobs,
    ) -> None:
        self.front, self.middle, self.back = around
        self.num_top = num_top
        self._parts = texts.shared(CompletionParts)
        self._pass_text: Callable[[int], int] = offsets.pass_text

    def logprobs(self, token_id: int, numbers: Sequence[bytes], top_ids: Sequence[int]) -> bytes:
        parts = self._parts
        name, num_characters = parts[token_id]
        tops = b"null"
        if self.num_top:
            # Tokens of one name are one key, as in the dict that the slow way makes.
            found = {
                parts[top_id][0]: number
                for top_id, number in zip(top_ids, numbers[1:], strict=True)
            }
            found.setdefault(name, numbers[0])
            tops = b"[{%b}]" % b",".join([b"%b:%b" % pair for pair in found.items()])
        return b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":%b,"text_offset":[%d]}' % (
            name,
            numbers[0],
            tops,
            self._pass_text(num_characters),
        )
