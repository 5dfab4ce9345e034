"""What the operator sees while a model is fetched and loaded: one moving line on a terminal, plain lines elsewhere.

Owns: that line on stderr, and the sentences of the supervisor, which must not break it. Never: writes to stdout but the one
line that says ready. A reader that went away does not end the server.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PLAIN_STEP = 0.25  # a plain line for every quarter


def write_line(stream: TextIO, text: str) -> None:
    """Print a line at once."""
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except (OSError, ValueError):
        return  # the terminal or the pipe is closed: the server is not there for its log


class Reporter:
    """Call it with a text and a fraction (0 to 1, or None where it is unknown); `say` prints a sentence."""

    def __init__(self, stream: TextIO, is_quiet: bool = False) -> None:
        self._stream = stream
        self._is_quiet = is_quiet
        self._last = ("", -1.0)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._is_terminal = stream.isatty()

    def __call__(self, text: str, fraction: float | None) -> None:
        if self._is_quiet:
            return
        if self._is_terminal:
            self._move(text, fraction)
            return
        last_text, last_fraction = self._last
        done = fraction if fraction is not None else 0.0
        if text != last_text or done >= last_fraction + _PLAIN_STEP or done >= 1.0 > last_fraction:
            self._last = (text, done)
            shown = "" if fraction is None else f" {100 * fraction:.0f} %"
            write_line(self._stream, f"shmserve: {text}{shown}")

    def _move(self, text: str, fraction: float | None) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=True,
                auto_refresh=False,  # no thread beside the supervisor's one
            )
            self._bar.start()
            self._task = self._bar.add_task(text, total=1.0)
        self._bar.update(
            self._task,
            description=text,
            total=None if fraction is None else 1.0,
            completed=fraction or 0.0,
            refresh=True,
        )

    def say(self, text: str, is_warning: bool = False) -> None:
        """Print a sentence; the moving line ends first."""
        self.finish()
        if is_warning or not self._is_quiet:
            write_line(self._stream, f"shmserve: {text}")

    def finish(self) -> None:
        """Remove the moving line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def stderr_reporter(log_level: str) -> Reporter:
    return Reporter(sys.stderr, log_level in ("warning", "error", "critical"))
