"""An HTTP answer as the strictest client reads it: chunks, events, and the order of both.

Owns: the reading, byte by byte as they come. Never: touches a socket.
"""

from __future__ import annotations

import json
from typing import Any


class BadAnswerError(Exception):
    """An answer that no client could read: the text says what is wrong with it."""


class Answer:
    """An HTTP answer as it comes in: `feed` it until `is_over`. Raises BadAnswerError."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.body = bytearray()
        self.is_over = False
        self.is_done = False  # [DONE] came
        self._data = bytearray()
        self._chunk_left = 0  # bytes of the chunk that comes, its line end included
        self._is_chunked = False

    def feed(self, data: bytes) -> None:
        """More bytes of the connection."""
        if self.is_over:
            raise BadAnswerError(f"{len(data)} bytes behind the end of the answer")
        self._data += data
        if not self.status and not self._take_head():
            return
        if self._is_chunked:
            self._take_chunks()
        else:
            self.body += self._data
            self._data.clear()
            length = int(self.headers.get("content-length", "0"))
            if len(self.body) > length:
                raise BadAnswerError(f"a body of {len(self.body)} bytes, announced were {length}")
            self.is_over = len(self.body) == length

    def _take_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._data[:end]).decode("latin-1").split("\r\n")
        del self._data[: end + 4]
        self.headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        if not first.startswith(("HTTP/1.1 ", "HTTP/1.0 ")):
            raise BadAnswerError(f"an answer that begins with {first[:40]!r}")
        self.status = int(first[9:12])
        self._is_chunked = self.headers.get("transfer-encoding", "") == "chunked"
        return True

    def _take_chunks(self) -> None:
        while not self.is_over:
            if not self._chunk_left:
                end = self._data.find(b"\r\n")
                if end < 0:
                    return
                try:
                    size = int(bytes(self._data[:end]), 16)
                except ValueError:
                    raise BadAnswerError(f"a chunk of {bytes(self._data[:end])!r} bytes") from None
                del self._data[: end + 2]
                self._chunk_left = size + 2
            if len(self._data) < self._chunk_left:
                return
            chunk, end_mark = (
                self._data[: self._chunk_left - 2],
                self._data[: self._chunk_left][-2:],
            )
            if end_mark != b"\r\n":
                raise BadAnswerError(f"a chunk that ends in {bytes(end_mark)!r}")
            del self._data[: self._chunk_left]
            self._chunk_left = 0
            self.is_over = not chunk
            self.body += chunk
            self._take_events()
        if self._data:
            raise BadAnswerError(f"{len(self._data)} bytes behind the last chunk")
        if self.body:
            raise BadAnswerError(f"an event without an end: {bytes(self.body[:80])!r}")
        if not self.is_done:
            raise BadAnswerError("a stream that ends without [DONE]")

    def _take_events(self) -> None:
        *events, rest = bytes(self.body).split(b"\n\n")
        self.body[:] = rest
        for event in events:
            if self.is_done:
                raise BadAnswerError(f"an event behind [DONE]: {event[:80]!r}")
            if event.startswith(b":"):
                continue
            if event == b"data: [DONE]":
                self.is_done = True
                continue
            try:
                if not event.startswith(b"data: "):
                    raise ValueError
                self.events.append(json.loads(event[6:]))
            except ValueError:
                raise BadAnswerError(f"an event that is none: {event[:80]!r}") from None

    def error(self) -> dict[str, Any]:
        """The error that it tells of, with or without a 200; {} for none."""
        if self.status != 200:
            try:
                found = json.loads(self.body)["error"]
                if not (found["message"] and found["type"]):
                    raise ValueError
            except (ValueError, KeyError, TypeError):
                what = bytes(self.body[:80])
                raise BadAnswerError(f"a {self.status} that is no error object: {what!r}") from None
            return dict(found)
        last = self.events[-1] if self.events else {}
        return dict(last.get("error") or {})

    def result(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Text, last choice and usage, as far as they have come."""
        objects = self.events
        if not self._is_chunked and self.is_over and self.status == 200:
            objects = [json.loads(self.body)]
        text = ""
        end: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        for each in objects:
            for choice in each.get("choices", ()):
                part = choice.get("delta") or choice.get("message") or choice
                text += part.get("text") or part.get("content") or ""
                end = choice
            usage = each.get("usage") or usage
        return text, end, usage
