"""What the operator sees while a model is fetched and loaded: one moving line on a terminal, plain lines elsewhere.

Owns: that line on stderr, and the sentences of the supervisor, which must not break it. Never: writes to stdout but the one
line that says ready, or starts a thread. A reader that went away does not end the server.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import Final, TextIO

from shmserve.log_writer import Lines

_PLAIN_STEP: Final = 0.25  # a plain line for every quarter
_BAR_CELLS: Final = 24
_ERASE_LINE: Final = "\r\x1b[K"


def write_line(stream: TextIO, text: str) -> None:
    """Print a line at once."""
    _write(stream, f"{text}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal or the pipe is closed: the server is not there for its log


class Reporter:
    """Call it with a text and a fraction (0 to 1, or None where it is unknown); `say` prints a sentence."""

    def __init__(self, stream: TextIO, is_quiet: bool = False, lines: Lines | None = None) -> None:
        self._stream = stream
        self._lines = lines  # where every line is to be a JSON object
        self._is_quiet = is_quiet
        self._is_terminal = stream.isatty()
        self._is_moving = False
        self._last = ("", 0.0)

    def __call__(self, text: str, fraction: float | None) -> None:
        if self._is_quiet:
            return
        if self._is_terminal:
            self._is_moving = True
            line = f"shmserve: {_bar(fraction)}{text}"
            _write(self._stream, _ERASE_LINE + line[: shutil.get_terminal_size().columns - 1])
            return
        last_text, last_done = self._last
        done = fraction if fraction is not None else 0.0
        if text != last_text or done >= last_done + _PLAIN_STEP or done >= 1.0 > last_done:
            self._last = (text, done)
            shown = "" if fraction is None else f" {100 * fraction:.0f} %"
            self._say(f"{text}{shown}", "info")

    def say(self, text: str, is_warning: bool = False) -> None:
        """Print a sentence; the moving line ends first. A quiet reporter says warnings only."""
        self.finish()
        if is_warning or not self._is_quiet:
            self._say(text, "warning" if is_warning else "info")

    def _say(self, text: str, level: str) -> None:
        if self._lines is None:
            write_line(self._stream, f"shmserve: {text}")
        else:
            fields = self._lines.fields(time.time(), level, text)
            write_line(self._stream, json.dumps(fields))

    def finish(self) -> None:
        """Remove the moving line."""
        if self._is_moving:
            self._is_moving = False
            _write(self._stream, _ERASE_LINE)


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return ""
    done = round(_BAR_CELLS * min(1.0, max(0.0, fraction)))
    return f"[{'=' * done}{' ' * (_BAR_CELLS - done)}] {100 * fraction:3.0f} % "
