"""Stop strings over bytes: match, hold, trim. One module for both processes.

The worker decides with it where a completion ends; the front end holds text with it that may yet become a stop string. Both
feed it the same bytes of the same tokens, so they agree without a word between them.

Law: a match is found in the very feed that completes it; of several the one that ends first in the text wins, and of those
the longest. So neither the order of the list nor the way in which the text was cut into tokens decides anything (without
min_tokens). `held` is never more than the longest stop minus one byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Byte offsets in the whole text, and which stop string it is."""

    start: int
    end: int
    stop: int


class StopMatcher:
    """The scan of one completion. Feed it token by token; after a match it must not be fed again."""

    __slots__ = ("_first", "_last", "_longest", "_stops", "_tail", "num_bytes")

    def __init__(self, stops: Sequence[bytes]) -> None:
        assert stops and all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        # Text seldom holds the first byte of a stop, or its last one: a look at each length of each stop took 12 us a token.
        self._first = _any_of({stop[0] for stop in stops})
        self._last = _any_of({stop[-1] for stop in stops})
        self._tail = b""  # the last longest - 1 bytes fed
        self.num_bytes = 0

    @property
    def stops(self) -> tuple[bytes, ...]:
        return self._stops

    def feed(self, data: bytes, *, is_matching: bool = True) -> StopMatch | None:
        """The match that `data` completes, if any. `is_matching` False (min_tokens) lets it pass, for good."""
        window = self._tail + data
        before = len(self._tail)
        base = self.num_bytes - before
        self.num_bytes += len(data)
        keep = self._longest - 1
        self._tail = window[-keep:] if keep else b""
        if not is_matching or self._last.search(data) is None:
            return None
        best: StopMatch | None = None
        for i, stop in enumerate(self._stops):
            # It must end in `data`: one that lies in the tail alone was let pass earlier.
            at = window.find(stop, max(0, before - len(stop) + 1))
            if at < 0:
                continue
            found = StopMatch(base + at, base + at + len(stop), i)
            if best is None or (found.end, found.start) < (best.end, best.start):
                best = found
        return best

    def held(self) -> int:
        """How many of the last bytes may be the beginning of a stop string: they must wait."""
        tail = self._tail
        for begin in self._first.finditer(tail):
            end = tail[begin.start() :]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                return len(end)
        return 0


class ClearTexts:
    """Says which texts do not matter to a scan of these strings that holds nothing, and leave it holding nothing."""

    __slots__ = ("_first", "_stops")

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = tuple(stops)
        self._first = _any_of({stop[0] for stop in stops})

    def has(self, data: bytes) -> bool:
        """False where a stop string lies in `data`, or may begin in it and go on behind it."""
        for begin in self._first.finditer(data):
            end = data[begin.start() :]
            if any(end.startswith(stop) or stop.startswith(end) for stop in self._stops):
                return False
        return True


def _any_of(values: set[int]) -> re.Pattern[bytes]:
    """Finds a byte that is one of these."""
    return re.compile(b"[%b]" % re.escape(bytes(sorted(values))))
