"""What a choice's format tells of its next token: which way the pump may write it, if it is whole text.

Owns: the kinds of ways that are told (`Unmarked`, `Made`, beside a plain pair of bytes and `LogprobFrames`), and the count of the tokens
that went past a format. Never: writes anything. Event loop's thread only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from shmserve.http.logprob_frames import LogprobFrames

_INDEX: Final = struct.Struct("<I")  # of a TOKENS slot's first token, at 16


@dataclass(frozen=True, slots=True)
class Marks:
    """What a reader of the text looks for. A token is clear of them if none lies in it, or may begin in it and go on behind it; where
    `holds_blanks`, it does not end in a blank either."""

    strings: tuple[bytes, ...] = ()
    holds_blanks: bool = False


NO_MARKS: Final = Marks()


@dataclass(frozen=True, slots=True)
class Passing:
    """A splitter's word: text that is clear of `marks` comes out whole, under this key of a delta, and changes nothing in it."""

    key: str
    marks: Marks = NO_MARKS


@dataclass(frozen=True, slots=True)
class Unmarked:
    """What stands around the text of a token that is clear of `marks`."""

    around: tuple[bytes, bytes] | LogprobFrames
    marks: Marks


@dataclass(frozen=True, slots=True)
class Made:
    """Frames that the format makes: `frame(piece, token_id)` is the event of a token that is clear of `marks`, or b"" if it waits for
    those behind it."""

    frame: Callable[[bytes, int], bytes]
    marks: Marks = NO_MARKS


Way: TypeAlias = "tuple[bytes, bytes] | Unmarked | Made | LogprobFrames"


class PassedTokens:
    """How many tokens of one completion were written past its format, told by the places of those that were not.

    A record's place may be anything: the count never falls.
    """

    __slots__ = ("_num_fed", "count")

    def __init__(self, num_fed: int) -> None:
        """`num_fed` tokens have come already, none of them past it."""
        self._num_fed = num_fed
        self.count = 0

    def came(self, slot: bytes, num_tokens: int) -> None:
        """A TOKENS slot that goes the slow way."""
        (index,) = _INDEX.unpack_from(slot, 16)
        self.count = max(self.count, index - self._num_fed)
        self._num_fed += num_tokens

    def ended(self, num_tokens: int) -> None:
        """The completion has so many."""
        self.count = max(self.count, num_tokens - self._num_fed)
