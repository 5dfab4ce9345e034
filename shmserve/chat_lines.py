"""What a person types into `shmserve chat`: lines that belong together, the history of them, and the commands among them.

Owns: readline, its history file, and the multi-line forms. Never: talks to a server. `shmserve chat` only.

    one line            a message                  a line that ends with a backslash goes on in the next
    \"\"\"                 begins a message of many lines, and ends it
    /word rest          a command; //word is a message that begins with /
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Final

MOST_HISTORY: Final = 1000
FENCE: Final = '"""'


def read_message(read_line: Callable[[str], str], prompt: str, more_prompt: str) -> str:
    """One message, of one line or many. Raises EOFError and KeyboardInterrupt as `read_line` does.

    The end of input inside a message of many lines ends that message.
    """
    line = read_line(prompt)
    if line.strip().startswith(FENCE):
        return _fenced(line.strip().removeprefix(FENCE), read_line, more_prompt)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(more_prompt))
        except EOFError:
            break
    return "\n".join(lines).strip()


def _fenced(first: str, read_line: Callable[[str], str], more_prompt: str) -> str:
    lines: list[str] = []
    line = first
    while not line.rstrip().endswith(FENCE):
        lines.append(line)
        try:
            line = read_line(more_prompt)
        except EOFError:
            return "\n".join(lines).strip()
    lines.append(line.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip()


def command_of(message: str) -> tuple[str, str] | None:
    """(word, rest) of a command; None of a message."""
    if not message.startswith("/") or message.startswith("//"):
        return None
    word, _, rest = message[1:].partition(" ")
    return word.strip(), rest.strip()


def text_of(message: str) -> str:
    """The message without the mark that it is no command."""
    return message[1:] if message.startswith("//") else message


class LineEditor:
    """Lines from a terminal, with readline where Python has it: history, editing, completion of commands.

    Where stdout is no terminal the prompt goes to stderr, so that stdout holds answers only.
    """

    def __init__(self, history_path: str, words: Iterable[str]) -> None:
        self._history_path = history_path
        self._words = sorted(f"/{word}" for word in words)
        self._is_plain = not sys.stdout.isatty()
        if not self._is_plain:
            self._set_up()

    def _set_up(self) -> None:
        try:
            import readline
        except ImportError:
            self._history_path = ""  # a Python without it: plain lines
            return
        readline.set_completer_delims(" ")
        readline.set_completer(self._complete)
        readline.parse_and_bind("tab: complete")
        # A paste of many lines is one message, and not sent line by line.
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_history_length(MOST_HISTORY)
        if self._history_path and os.path.exists(self._history_path):
            try:
                readline.read_history_file(self._history_path)
            except OSError:
                # It belongs to somebody else, or is none: leave it as it is.
                self._history_path = ""

    def _complete(self, text: str, state: int) -> str | None:
        found = [f"{word} " for word in self._words if text and word.startswith(text)]
        return found[state] if state < len(found) else None

    def read_line(self, prompt: str) -> str:
        if self._is_plain:
            sys.stderr.write(prompt)
            sys.stderr.flush()
            return input()
        return input(prompt)

    def close(self) -> None:
        """Write the history, for our eyes only."""
        if self._is_plain or not self._history_path:
            return
        import readline

        try:
            fd = os.open(self._history_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.close(fd)
            readline.write_history_file(self._history_path)
        except OSError as error:
            sys.stderr.write(f"shmserve: warning: {self._history_path}: {error.strerror}\n")
