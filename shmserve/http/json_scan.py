"""A JSON object read as it comes, for tool calls: its name is known before its arguments end, and those are passed on raw.

Owns: the state machine over characters, strings and depth included. Never: keeps more than the member it is in, or repairs what is
not JSON (`is_broken`). Pure; front end only. Grammar: RFC 8259.
"""

from __future__ import annotations

import json
from typing import Final

MOST_NAME_CHARS: Final = 1_024


class ObjectScanner:
    """Feed it the characters of one object, "{" first. `name` is set once its member ended; `take` gives new raw text of the arguments.

    `argument_keys` are the names that the arguments go by. Arguments that are a JSON string are decoded: some models write
    their object as a string.
    """

    def __init__(self, argument_keys: tuple[str, ...]) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self.has_arguments = False
        self._argument_keys = argument_keys
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._key: str | None = None  # of the member at depth 1 whose value is being read
        self._member: list[str] = []  # characters of the key, or of a value that must be whole
        self._arguments: list[str] = []  # new raw text, not yet taken
        self._is_streaming = False

    def take(self) -> str:
        """What the arguments have gained since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def feed(self, char: str) -> None:
        """One character. Nothing may follow `is_done`."""
        if self._in_string:
            self._put(char)
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
            self._begin_value(char)
            self._put(char)
        elif char in "{[":
            self._depth += 1
            if self._depth > 1:
                self._begin_value(char)
                self._put(char)
            elif char == "[":
                self.is_broken = True
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_member()
                self.is_done = True
            else:
                self._put(char)
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key = self._decoded()
            self._member.clear()
        elif self._depth == 1 and char == ",":
            self._end_member()
        elif not char.isspace():
            self._begin_value(char)
            self._put(char)
        elif self._depth > 1:
            self._put(char)

    def _begin_value(self, char: str) -> None:
        """The first character of an argument value decides whether it goes on raw as it comes."""
        if self._depth <= 2 and self._key in self._argument_keys and not self.has_arguments:
            self.has_arguments = True
            self._is_streaming = char != '"'

    def _put(self, char: str) -> None:
        if self._is_streaming:
            self._arguments.append(char)
        elif self._key is None or self._key == "name" or self._key in self._argument_keys:
            self._member.append(char)
            if self._key is None and len(self._member) > MOST_NAME_CHARS:
                self.is_broken = True

    def _end_member(self) -> None:
        if self._key == "name":
            self.name = self._decoded()
            self.is_broken |= self.name is None
        elif self._key in self._argument_keys and not self._is_streaming:
            # Half of a surrogate pair can be said in JSON, and is no text.
            self._arguments.append((self._decoded() or "").encode("utf-8", "replace").decode())
        elif self._key is None and self._member:
            self.is_broken = True
        self._key = None
        self._member.clear()
        self._is_streaming = False

    def _decoded(self) -> str | None:
        try:
            value = json.loads("".join(self._member))
        except ValueError:
            self.is_broken = True
            return None
        return value if isinstance(value, str) else None
