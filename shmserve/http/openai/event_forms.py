"""Events that differ from token to token in their text and a few numbers: their form, made once, for `%`.

Owns: the holes. Never: knows an API, or takes a client's words for a hole. Pure; front end only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

HOLE: Final = "\x1a"
"""Stands in an object where its text or a number is to be."""
TEXT: Final = b'"%b"'
NUMBER: Final = b"%d"
_IN_TEXT: Final = b"\\u001a"  # as JSON has it
_ALONE: Final = b'"\\u001a"'


def around_hole(event: bytes) -> tuple[bytes, bytes]:
    """What stands before and behind the text that is a hole: nothing behind it is a client's."""
    before, _, after = event.rpartition(_IN_TEXT)
    return before, after


def form_of(event: bytes, front: Sequence[bytes], back: Sequence[bytes]) -> bytes:
    """The form, with these in the place of the holes: the first of them, `front`, and the last, `back`.

    What is a client's stands between those two, or outside of all where one is empty.
    """
    begin: list[bytes] = []
    for conversion in front:
        part, _, event = event.partition(_ALONE)
        begin += (_literal(part), conversion)
    end: list[bytes] = []
    for conversion in reversed(back):
        event, _, part = event.rpartition(_ALONE)
        end += (_literal(part), conversion)
    return b"".join((*begin, _literal(event), *reversed(end)))


def _literal(part: bytes) -> bytes:
    return part.replace(b"%", b"%%")
