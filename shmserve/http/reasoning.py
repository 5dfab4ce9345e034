"""Reasoning in a model's text: what stands in <think> goes out as `reasoning_content`, the rest through the next splitter.

Owns: the marks, held back while they may still become one. Never: invents reasoning for a model that has no marks. Blanks next to a
mark are none of either text. Pure; front end only. One object per choice.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from shmserve.http.tool_formats import held_length
from shmserve.http.ways import Marks, Passing

Delta = dict[str, Any]
OPENER: Final = "<think>"
CLOSER: Final = "</think>"
_CONTENT: Final = Passing("content")
_REASONING: Final = Passing("reasoning_content", Marks((CLOSER.encode(),), holds_blanks=True))


class Inner(Protocol):
    @property
    def has_tool_calls(self) -> bool: ...
    @property
    def passing(self) -> Passing | None: ...
    def feed(self, text: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


class ContentOnly:
    """The splitter of a request without tools."""

    has_tool_calls = False
    is_reasoning = False
    passing: Passing | None = _CONTENT

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self) -> list[Delta]:
        return []


class ReasoningSplitter:
    """`is_inside` says whether the prompt already opened the reasoning, `is_begun` whether it ends in the middle of its text;
    `is_streaming` False keeps it until it ends, `is_shown` False drops it."""

    def __init__(
        self,
        inner: Inner,
        *,
        is_inside: bool,
        is_begun: bool = False,
        is_streaming: bool = True,
        is_shown: bool = True,
    ) -> None:
        self.is_reasoning = is_inside
        self._inner = inner
        self._is_streaming = is_streaming
        self._is_shown = is_shown
        self._buffer = ""
        self._kept: list[str] = []
        self._is_fresh = not is_begun  # nothing came yet, or a mark just did: blanks are dropped
        self._is_over = False

    @property
    def has_tool_calls(self) -> bool:
        return self._inner.has_tool_calls

    @property
    def passing(self) -> Passing | None:
        if self._is_fresh or self._buffer:
            return None
        if self._is_over:
            return self._inner.passing
        return _REASONING if self.is_reasoning and self._is_streaming and self._is_shown else None

    def feed(self, text: str) -> list[Delta]:
        if self._is_over:
            return self._pass_on(text)
        self._buffer += text
        out: list[Delta] = []
        if not self.is_reasoning:
            head = self._buffer.lstrip()
            if len(head) < len(OPENER) and OPENER.startswith(head):
                return []
            if not head.startswith(OPENER):  # this answer has none
                self._is_over, rest, self._buffer = True, self._buffer, ""
                self._is_fresh = False
                return self._pass_on(rest)
            self.is_reasoning, self._buffer = True, head[len(OPENER) :]
        before, found, behind = self._buffer.partition(CLOSER)
        if found:
            self._buffer = ""
            out += self._reason(before.rstrip()) + self._release()
            self.is_reasoning, self._is_over, self._is_fresh = False, True, True
            return out + self._pass_on(behind)
        # Blanks before the closer are dropped, so they are held like its beginning.
        keep = before[: len(before) - held_length(before, CLOSER)].rstrip()
        self._buffer = before[len(keep) :]
        return self._reason(keep)

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._buffer, ""
        if self.is_reasoning:
            return self._reason(rest.rstrip()) + self._release() + self._inner.finish()
        return self._inner.feed(rest) + self._inner.finish()

    def _reason(self, text: str) -> list[Delta]:
        if self._is_fresh:
            text = text.lstrip()
        if not text:
            return []
        self._is_fresh = False
        if not self._is_shown:
            return []
        if not self._is_streaming:
            self._kept.append(text)
            return []
        return [{"reasoning_content": text}]

    def _release(self) -> list[Delta]:
        kept, self._kept = "".join(self._kept), []
        return [{"reasoning_content": kept}] if kept else []

    def _pass_on(self, text: str) -> list[Delta]:
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return self._inner.feed(text) if text else []
