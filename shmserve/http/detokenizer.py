"""Token ids to text, by bytes: O(1) per token, at most 3 bytes held back, whatever the tokens are.

Owns: the text of one completion (`TextStream`) and the table of JSON-escaped pieces that all completions share (`Pieces`).
Laws: the deltas of a completion add up to the decode of all its ids; no delta is ever taken back; a delta holds whole
characters, and U+FFFD only where the bytes can no longer become one. Text that could begin a stop string is held, and only
then. Front end only.
"""

from __future__ import annotations

import codecs
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final

import msgspec

from shmserve.http.ways import NO_MARKS, Marks
from shmserve.stop import ClearTexts, StopMatcher
from shmserve.stop_regex import stop_scan
from shmserve.token_text import Decoding, TokenText
from shmserve.wire.finish import KEEP_ALL

_new_decoder = codecs.getincrementaldecoder("utf-8")
_encode = msgspec.json.encode

MOST_STOP_SETS: Final = 32
MOST_CLEAR_PIECES: Final = 4_096
"""Of one set: a quarter of a MiB of places and numbers; the texts are `Pieces.direct`'s."""


def escape_separators(data: bytes) -> bytes:
    """JSON without raw U+2028, U+2029 and U+0085, at which some clients cut lines."""
    if not data.isascii():
        data = (
            data.replace(b"\xe2\x80\xa8", b"\\u2028")
            .replace(b"\xe2\x80\xa9", b"\\u2029")
            .replace(b"\xc2\x85", b"\\u0085")
        )
    return data


def escape(text: str) -> bytes:
    """`text` as the inside of a JSON string."""
    return escape_separators(_encode(text)[1:-1])


def _piece(data: bytes) -> bytes:
    try:
        return escape(data.decode())
    except UnicodeDecodeError:
        return b""


class ClearPieces(dict[int, bytes]):
    """Token id -> its piece, empty where it touches a mark; filled as tokens are seen, so that a new set of marks costs nothing at
    once. At most MOST_CLEAR_PIECES, then it begins anew. An id outside the vocabulary is an IndexError, as in a list."""

    __slots__ = ("_direct", "_holds_blanks", "_raw", "_texts")

    def __init__(self, direct: list[bytes], raw: Callable[[int], bytes], marks: Marks) -> None:
        self._direct = direct
        self._raw = raw
        self._texts = ClearTexts(marks.strings) if marks.strings else None
        self._holds_blanks = marks.holds_blanks

    def __missing__(self, token_id: int) -> bytes:
        piece = self._direct[token_id]
        if piece and not self._is_clear(self._raw(token_id)):
            piece = b""
        if len(self) >= MOST_CLEAR_PIECES:
            self.clear()
        self[token_id] = piece
        return piece

    def _is_clear(self, data: bytes) -> bool:
        if self._texts is not None and not self._texts.has(data):
            return False
        return not (self._holds_blanks and data.decode()[-1:].isspace())


class Pieces:
    """Token id -> its text, JSON-escaped, for tokens that are whole characters by themselves (`direct`).

    An empty piece means: not by itself (part of a character, or no text at all). Filled at start, 2 us a token: filled as
    tokens are first seen, a large vocabulary would keep a busy front end on the slow path for minutes.
    """

    __slots__ = (
        "_bytes",
        "_clear",
        "_decoding",
        "_silent",
        "common",
        "direct",
        "longest",
        "tables",
    )

    def __init__(
        self,
        token_bytes: list[bytes],
        silent_ids: frozenset[int],
        decoding: Decoding = Decoding(),  # noqa: B008 (frozen)
        others: Pieces | None = None,
    ) -> None:
        """`others`: pieces of the same tokens of which more are silent."""
        self._bytes = token_bytes
        self._decoding = decoding
        self._silent = silent_ids
        self.tables: dict[Hashable, Any] = {}  # made of these pieces by others, and shared by all
        self._clear: OrderedDict[Marks, ClearPieces] = OrderedDict()
        self.direct = [_piece(data) for data in token_bytes]
        self.longest = max(map(len, self.direct), default=0)
        for token_id in silent_ids:
            self.direct[token_id] = b""
        self.common: list[bytes] = self.direct if others is None else others.common
        """Pieces of a table that several share: where one is not empty, it is this one's, too."""

    def raw(self, token_id: int) -> bytes:
        """The token's bytes as they count in the text; nothing for a special token that is skipped."""
        return b"" if token_id in self._silent else self._bytes[token_id]

    def clear_of(self, marks: Marks) -> ClearPieces:
        """Those of `direct` that a stream may write while nobody who looks for these holds anything. The newest sets are kept."""
        pieces = self._clear.get(marks)
        if pieces is None:
            pieces = self._clear[marks] = ClearPieces(self.direct, self.raw, marks)
            if len(self._clear) > MOST_STOP_SETS:
                self._clear.popitem(last=False)
        else:
            self._clear.move_to_end(marks)
        return pieces

    def token_text(self) -> TokenText | None:
        """One completion's bytes, where `raw` alone does not give them."""
        return self._decoding.open(self.raw)


class TextStream:
    """The text of one completion, token by token. `stop`, `min_tokens` and `keeps_stop` (the match is text) are those that the worker
    decides with.

    Tokens that change nothing here may be written past it while `is_plain`, if `pass_by` was called first."""

    __slots__ = (
        "_decoder",
        "_held",
        "_is_counted",
        "_keep",
        "_keeps_stop",
        "_matcher",
        "_min_tokens",
        "_num_bytes",
        "_num_tokens",
        "_pieces",
        "_source",
        "matched_text",
    )

    def __init__(
        self,
        pieces: Pieces,
        stop: tuple[bytes, ...] = (),
        min_tokens: int = 0,
        stop_regex: tuple[str, ...] = (),
        keeps_stop: bool = False,
    ) -> None:
        self._pieces = pieces
        self._keeps_stop = keeps_stop
        self._keep = 0  # of the held text, if it ends in a match
        self._is_counted = True  # no token was written past us
        self._source = pieces.token_text()
        self._decoder = _new_decoder("replace")
        self._matcher = stop_scan(stop, stop_regex)
        self.matched_text = ""
        self._min_tokens = min_tokens
        self._held = b""  # bytes that may begin, or have become, a stop string
        self._num_bytes = 0  # given to the decoder
        self._num_tokens = 0

    @property
    def is_plain(self) -> bool:
        """True when the next token's piece may go out as it is, if it is one of `plain_pieces`: nothing is held."""
        if self._source is not None and not self._source.is_settled:
            return False
        if self._matcher is not None and (
            self._held
            or self._num_tokens < self._min_tokens
            or not isinstance(self._matcher, StopMatcher)  # a regex may begin anywhere
        ):
            return False
        return not self._decoder.getstate()[0]

    def plain_pieces(self, marks: Marks = NO_MARKS) -> list[bytes] | dict[int, bytes]:
        """The pieces of those tokens that may be written past it while it `is_plain`, and are clear of `marks`."""
        if isinstance(self._matcher, StopMatcher):
            marks = Marks(self._matcher.stops + marks.strings, marks.holds_blanks)
        return self._pieces.clear_of(marks) if marks != NO_MARKS else self._pieces.direct

    def pass_by(self) -> None:
        """From here on tokens come that it is not fed. What it is fed then stands behind bytes that nobody counted."""
        self._is_counted = False

    def feed(self, token_id: int) -> str:
        """The text that `token_id` releases; often its own, sometimes none, sometimes what was held before it."""
        self._num_tokens += 1
        source = self._source
        data = self._pieces.raw(token_id) if source is None else source.feed(token_id)
        matcher = self._matcher
        if matcher is None:
            self._num_bytes += len(data)
            return self._decoder.decode(data)
        match = matcher.feed(data, is_matching=self._num_tokens >= self._min_tokens)
        text = self._held + data
        if match is not None:  # it ends in `data`, and what could become it was held
            end = len(text) - (matcher.num_bytes - match.end)
            start = max(0, end - (match.end - match.start))
            self.matched_text = text[start:end].decode("utf-8", "replace")
            self._keep = match.end - match.start if self._keeps_stop else 0
        # From the beginning of a match on, it is the FINISH record that says what is kept.
        hold = matcher.num_bytes - match.start if match is not None else matcher.held()
        cut = len(text) - hold
        self._held = text[cut:]
        self._num_bytes += cut
        return self._decoder.decode(text[:cut])

    def finish(self, keep_bytes: int = KEEP_ALL) -> str:
        """What is left: the held text, cut to `keep_bytes` of the whole, and U+FFFD for a character that never ended."""
        text = self._held
        if self._source is not None:
            text += self._source.finish()
        if keep_bytes != KEEP_ALL:
            # Both sides have found the same match, and the held text begins with it.
            keep = keep_bytes - self._num_bytes if self._is_counted else self._keep
            text = text[: max(0, keep)]
        self._held = b""
        return self._decoder.decode(text, final=True)
