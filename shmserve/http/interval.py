"""Fewer, larger frames: a stream whose events come every N tokens (`stream_interval`, vLLM's and SGLang's name).

Owns: what was not yet sent. Never: holds the first token, or anything past the end. Where only the text changes from event to event, the
pump brings the tokens here by itself. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.http.choice import ChoiceFormat
from shmserve.http.detokenizer import escape
from shmserve.http.in_flight import InFlight
from shmserve.http.ways import Made


class EveryFewTokens:
    """ChoiceFormat around another: its deltas, joined until they hold `interval` tokens."""

    def __init__(self, inner: ChoiceFormat, interval: int) -> None:
        self._inner = inner
        self._interval = interval
        self._around = inner.way if isinstance(inner.way, tuple) else None
        self._pieces: list[bytes] = []  # with `_around`: escaped
        self._texts: list[str] = []  # without
        self._ids: list[int] = []
        self._has_sent = False

    @property
    def way(self) -> Made | None:
        return Made(self._piece) if self._around is not None else None

    def opening(self) -> bytes:
        return self._inner.opening()

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        self._hold(text)
        self._ids += token_ids
        return self._due()

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        return self._flush() + self._inner.closing(text, token_ids, entry)

    def _piece(self, piece: bytes, token_id: int) -> bytes:
        """`delta` of one token that is whole text."""
        self._pieces.append(piece)
        self._ids.append(token_id)
        return self._due()

    def _hold(self, text: str) -> None:
        if self._around is None:
            self._texts.append(text)
        elif text:
            self._pieces.append(escape(text))

    def _due(self) -> bytes:
        if self._has_sent and len(self._ids) < self._interval:
            return b""
        self._has_sent = True
        return self._flush()

    def _flush(self) -> bytes:
        ids, self._ids = self._ids, []
        if self._around is not None:
            pieces, self._pieces = self._pieces, []
            before, after = self._around
            return b"".join((before, *pieces, after)) if pieces else b""
        text, self._texts = "".join(self._texts), []
        return self._inner.delta(text, ids) if ids or text else b""


def spaced(fmt: ChoiceFormat, asked: int | None, least: int) -> ChoiceFormat:
    """`fmt` at the request's interval, which the server's may raise, never lower."""
    interval = max(asked or 1, least)
    return EveryFewTokens(fmt, interval) if interval > 1 else fmt
