"""Fewer, larger frames: a stream whose events come every N tokens (`stream_interval`, vLLM's and SGLang's name).

Owns: what was not yet sent. Never: holds the first token, or anything past the end. Such a stream does not take the pump's direct way.
Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.http.choice import ChoiceFormat
from shmserve.http.in_flight import InFlight


class EveryFewTokens:
    """ChoiceFormat around another: its deltas, joined until they hold `interval` tokens."""

    around_text: tuple[bytes, bytes] | None = None

    def __init__(self, inner: ChoiceFormat, interval: int) -> None:
        self._inner = inner
        self._interval = interval
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._has_sent = False

    def opening(self) -> bytes:
        return self._inner.opening()

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        self._texts.append(text)
        self._ids += token_ids
        if self._has_sent and len(self._ids) < self._interval:
            return b""
        self._has_sent = True
        return self._flush()

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        return self._flush() + self._inner.closing(text, token_ids, entry)

    def _flush(self) -> bytes:
        text, ids = "".join(self._texts), self._ids
        self._texts, self._ids = [], []
        return self._inner.delta(text, ids) if ids or text else b""


def spaced(fmt: ChoiceFormat, asked: int | None, least: int) -> ChoiceFormat:
    """`fmt` at the request's interval, which the server's may raise, never lower."""
    interval = max(asked or 1, least)
    return EveryFewTokens(fmt, interval) if interval > 1 else fmt
