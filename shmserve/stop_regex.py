"""Stop regexes over bytes, in linear time (RE2), beside the stop strings of `stop.py`. One module for both processes.

Owns: which patterns are taken, their greatest width, and the scan. A pattern of unbounded width would hold a whole completion
back, so each has at most MOST_WIDTH_BYTES; while one is set the last W - 1 bytes wait, since any of them may become a match.
Laws: those of `stop.py`: a match is found in the feed that completes it, the first end wins and of those the longest, however
the text was cut into tokens. Hence no anchors or word boundaries: what follows is not known yet.
"""

from __future__ import annotations

import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import re2  # type: ignore[import-untyped]

from shmserve.stop import StopMatch, StopMatcher

MOST_PATTERNS: Final = 32
MOST_CHARS: Final = 256
MOST_WIDTH_BYTES: Final = 1_024


class StopRegexError(ValueError):
    """Why a pattern is not taken, for the client."""


@dataclass(frozen=True, slots=True)
class StopPattern:
    anywhere: Any
    at_end: Any
    width: int
    """Bytes of its longest match."""


@lru_cache(256)
def compile_stop(pattern: str) -> StopPattern:
    """Raises StopRegexError."""
    if len(pattern) > MOST_CHARS:
        raise StopRegexError(f"may have at most {MOST_CHARS} characters, got {len(pattern)}")
    if "{," in pattern:
        raise StopRegexError("a repetition needs its lower bound: {0,n}, not {,n}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = parser.parse(pattern)
        least, most = tree.getwidth()
        data, options = pattern.encode(), re2.Options()
        options.log_errors = False
        anywhere = re2.compile(data, options)
        at_end = re2.compile(b"(?:" + data + rb")\z", options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise StopRegexError(f"is not taken: {text}") from None
    except (parser.error, OverflowError, RecursionError, UnicodeEncodeError, Warning) as error:
        raise StopRegexError(f"is not a regex: {error}") from None
    if any(op is ops.AT for op, _ in _nodes(tree)):
        raise StopRegexError("may have no anchor or word boundary: text goes on behind it")
    if least == 0:
        raise StopRegexError("matches the empty text")
    width = int(most) * (1 if _is_ascii(tree) else 4)
    if width > MOST_WIDTH_BYTES:
        said = "without bound" if most >= parser.MAXREPEAT else f"up to {width} bytes"
        raise StopRegexError(f"matches {said}; at most {MOST_WIDTH_BYTES} bytes are possible")
    return StopPattern(anywhere, at_end, width)


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """All (operation, argument) pairs of a parsed pattern."""
    if isinstance(tree, parser.SubPattern):
        for op, argument in tree.data:
            yield op, argument
            if op is not ops.IN:
                yield from _nodes(argument)
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from _nodes(part)


def _is_ascii(tree: Any) -> bool:
    """True if every character that it can match is one byte. RE2's \\d, \\s and \\w are."""
    if tree.state.flags & ops.SRE_FLAG_IGNORECASE:
        return False  # k and s have partners of two and three bytes
    for op, argument in _nodes(tree):
        if op is ops.SUBPATTERN and argument[1] & ops.SRE_FLAG_IGNORECASE:
            return False
        if op in (ops.ANY, ops.NOT_LITERAL):
            return False
        if op is ops.LITERAL and argument > 127:
            return False
        if op is ops.IN:
            for kind, value in argument:
                if kind is ops.NEGATE or (kind is ops.LITERAL and value > 127):
                    return False
                if kind is ops.RANGE and value[1] > 127:
                    return False
                if kind is ops.CATEGORY and "NOT" in str(value):
                    return False
    return True


class StopScan:
    """The scan of one completion for strings and regexes, fed like a StopMatcher. Regexes are numbered behind the strings."""

    __slots__ = ("_first", "_hold", "_patterns", "_strings", "_tail", "num_bytes")

    def __init__(self, stops: Sequence[bytes], regexes: Sequence[str]) -> None:
        self._strings = StopMatcher(stops) if stops else None
        self._first = len(stops)
        self._patterns = [compile_stop(pattern) for pattern in regexes]
        self._hold = max(pattern.width for pattern in self._patterns) - 1
        self._tail = b""
        self.num_bytes = 0

    def feed(self, data: bytes, *, is_matching: bool = True) -> StopMatch | None:
        """The match that `data` completes, if any."""
        best = self._strings.feed(data, is_matching=is_matching) if self._strings else None
        window, before = self._tail + data, len(self._tail)
        base = self.num_bytes - before
        self.num_bytes += len(data)
        self._tail = window[-self._hold :] if self._hold else b""
        if not is_matching or not data:
            return best
        for i, pattern in enumerate(self._patterns):
            if pattern.anywhere.search(window) is None:
                continue
            last = len(window) if best is None else best.end - base
            for end in range(before + 1, last + 1):
                match = pattern.at_end.search(window[:end])
                if match is None:
                    continue
                found = StopMatch(base + match.start(), base + end, self._first + i)
                if best is None or (found.end, found.start) < (best.end, best.start):
                    best = found
                break
        return best

    def held(self) -> int:
        """How many of the last bytes may be the beginning of a match: they must wait."""
        return max(len(self._tail), self._strings.held() if self._strings else 0)


def stop_scan(stops: Sequence[bytes], regexes: Sequence[str]) -> StopMatcher | StopScan | None:
    """The cheapest scan that does; None where there is nothing to look for."""
    if regexes:
        return StopScan(stops, regexes)
    return StopMatcher(stops) if stops else None
