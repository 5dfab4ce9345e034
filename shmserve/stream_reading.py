"""One streamed completion as its client sees it: the events of the response, and when each was read.

Owns: the way from bytes of an OpenAI-compatible stream to text, counts and times. Never: opens a connection, prints, or judges.
Clients only: `shmserve chat`, `bench`, `demo`, and tools.

    lag of a token = (read - sent) - (made - arrived)         each side by its own clock, so the two may be different hosts

It holds the request's way in besides the token's way out: on loopback some tenths of a millisecond. A server that does not say
when it made its tokens has none.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import aiohttp


class Piece(NamedTuple):
    """What one event adds to the answer."""

    text: str = ""
    reasoning: str = ""


NOTHING = Piece()


async def events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, int]]:
    """Payloads of `data:` lines, each with the time of the read that completed it (CLOCK_MONOTONIC ns)."""
    rest = b""
    async for data in content.iter_any():
        at_ns = time.monotonic_ns()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), at_ns


class Reading:
    """What has been read of one response so far. `sent_ns` is when it was made: right before the request is sent."""

    def __init__(self) -> None:
        self.sent_ns = time.monotonic_ns()
        self.status: int | None = None
        self.arrivals_ns: list[int] = []  # of events with text
        self.lags: list[tuple[int, float]] = []  # (read at, ms), a token each
        self.usage: Mapping[str, int] = {}
        self.finish_reason: str | None = None
        self.message = ""  # the server's word on what went wrong
        self.is_done = False
        self.has_failed = False

    def take(self, event: bytes, at_ns: int) -> Piece:
        """One `data:` payload. Raises ValueError, AttributeError or TypeError if it is no chunk of a completion."""
        if event == b"[DONE]":
            self.is_done = True
            return NOTHING
        chunk = json.loads(event)
        if not isinstance(chunk, dict):
            raise ValueError("an event is not a JSON object")
        if chunk.get("error") is not None:
            self.has_failed = True
            self.message = message_of(chunk)
            return NOTHING
        self.usage = _counts_of(chunk.get("usage")) or self.usage
        text = reasoning = ""
        has_content = False
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            has_content = has_content or bool(text or reasoning or delta.get("tool_calls"))
            if choice.get("timing"):
                self._take_timing(choice["timing"], at_ns)
        if has_content:
            self.arrivals_ns.append(at_ns)
        return Piece(text, reasoning) if has_content else NOTHING

    def _take_timing(self, timing: Mapping[str, Any], at_ns: int) -> None:
        """When the tokens of a frame were made, in us since the request had arrived at the server."""
        read_us = (at_ns - self.sent_ns) / 1e3
        for made_us in timing.get("token_us") or ():
            self.lags.append((at_ns, (read_us - made_us) / 1e3))

    def refused(self, body: bytes) -> None:
        """The body of a response that is no stream."""
        try:
            self.message = message_of(json.loads(body))
        except ValueError:
            self.message = one_line(body.decode(errors="replace"))

    def error(self) -> str | None:
        """What is wrong with the response, now that it has ended; None if it was whole."""
        if self.status != 200:
            return str(self.status)
        if self.has_failed:
            return "error in stream"
        return None if self.is_done else "broken stream"


def _counts_of(usage: Any) -> dict[str, int]:
    """What a usage object counts. Some servers leave a number null until they know it."""
    if not isinstance(usage, dict):
        return {}
    return {name: count for name, count in usage.items() if type(count) is int}


def message_of(answer: Any) -> str:
    """The message of an error object, in OpenAI's form or near it, as one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("code") or ""
    return one_line(str(error))


def one_line(text: str, most_characters: int = 300) -> str:
    """The text without line ends and control characters, cut where it is long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (
        line
        if len(line) <= most_characters
        else line[: most_characters - 1] + "\N{HORIZONTAL ELLIPSIS}"
    )
