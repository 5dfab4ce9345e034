"""The log of a process: lines that go to stderr from a thread of their own, so that nobody who says something waits for it.

Owns: the lines that stderr has not taken, at most MOST_BYTES of them, and what a line looks like (--log-format). Never: waits in
`write`, or reorders.

    write -> [ at most 1 MiB ] -> one thread -> stderr      full: the new line is lost, and counted; the next one that fits says so

A reader of stderr that stalls (a full pipe, journald, a terminal that was stopped) costs lines, not tokens. SIGKILL costs what stderr had not
taken at that moment. Any thread may write.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import threading
import time
from collections import deque
from typing import Final

from shmserve.config import LogFormat
from shmserve.rings.board import Board

MOST_BYTES: Final = 1 << 20
FLUSH_S: Final = 1.0
_WRITE_BYTES: Final = 65_536


class LogWriter:
    """Lines to a descriptor, in order."""

    def __init__(self, fd: int = 2, most_bytes: int = MOST_BYTES) -> None:
        self.num_lost = 0
        self._fd = fd
        self._most_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # of the lines that wait, and of those that are being written
        self._num_unsaid = 0  # lost, and not yet said so
        self._changed = threading.Condition()
        self._board: Board | None = None
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """What stderr has not taken yet."""
        return self._num_bytes

    def show_on(self, board: Board) -> None:
        """Show the two numbers there from now on, whoever's line changes them."""
        self._board = board

    def write(self, text: str) -> None:
        """Say whole lines, each with its end. Returns at once."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > self._most_bytes:
                lines = data.count(b"\n")
                self.num_lost += lines
                self._num_unsaid += lines
            else:
                self._lines.append(data)
                self._num_bytes += len(data)
                self._changed.notify_all()
            self._show()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was said is written; False if stderr did not take it in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, timeout_s)

    def _show(self) -> None:
        if self._board is not None:
            self._board["log_bytes"] = self._num_bytes
            self._board["num_log_lines_lost"] = self.num_lost

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                data = bytearray(self._lines.popleft())
                while self._lines and len(data) + len(self._lines[0]) <= _WRITE_BYTES:
                    data += self._lines.popleft()
                taken = len(data)
                if self._num_unsaid:
                    data += f"shmserve: {self._num_unsaid} lines of the log were lost here: nobody took them\n".encode()
                    self._num_unsaid = 0
            num_written = self._write(data)
            with self._changed:
                self._num_bytes -= taken
                if num_written < len(data):  # the reader is gone
                    self.num_lost += data.count(b"\n", num_written)
                self._show()
                self._changed.notify_all()

    def _write(self, data: bytearray) -> int:
        """How many bytes were taken: all, unless the descriptor fails."""
        done = 0
        with contextlib.suppress(OSError):  # whoever read it has gone; what it missed is counted
            while done < len(data):
                try:
                    done += os.write(self._fd, data[done:])
                except BlockingIOError:
                    # Whose descriptor it was has made it so, for all that have it.
                    poll = select.poll()
                    poll.register(self._fd, select.POLLOUT)
                    poll.poll()
        return done


class LogStream(io.TextIOBase):
    """A text stream for who prints lines: each write is one or more whole lines."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._writer.write(text)
        return len(text)


class _ToWriter(logging.Handler):
    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record) + "\n")
        except Exception:  # a record whose arguments do not fit its text
            self.handleError(record)

    def flush(self) -> None:
        """At the process' end (logging.shutdown): wait a moment for a stderr that is only slow."""
        self._writer.flush(FLUSH_S)


class Lines:
    """How a line of one process looks: its time, its level, who says it, what."""

    def __init__(self, process: str, log_format: LogFormat) -> None:
        self.process = process
        self.is_json = log_format == "json"
        self._second = (0, "")

    def time_of(self, at_s: float) -> str:
        """2026-11-30 09:50:30,123 local time, or with its offset as ISO 8601 has it."""
        second = int(at_s)
        if self._second[0] != second:  # formatting it costs more than all else of a line
            shape = "%Y-%m-%dT%H:%M:%S" if self.is_json else "%Y-%m-%d %H:%M:%S"
            self._second = (second, time.strftime(shape, time.localtime(second)))
        millis = int((at_s - second) * 1000)
        if not self.is_json:
            return f"{self._second[1]},{millis:03d}"
        return f"{self._second[1]}.{millis:03d}{time.strftime('%z', time.localtime(second))}"

    def fields(self, at_s: float, level: str, message: str) -> dict[str, object]:
        """The first fields of a JSON line."""
        return {
            "time": self.time_of(at_s),
            "level": level.lower(),
            "process": self.process,
            "message": message,
        }


class _Formatter(logging.Formatter):
    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        lines, message = self._lines, record.getMessage()
        if not lines.is_json:
            more = ""
            if record.exc_info:
                more = "\n" + self.formatException(record.exc_info)
            head = f"{lines.time_of(record.created)} {record.levelname} {lines.process}"
            return f"{head} {message}{more}"
        fields = lines.fields(record.created, record.levelname, message)
        fields["logger"] = record.name
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)  # not msgspec: a path or an error may hold half a surrogate pair


def install(process: str, level: str, log_format: LogFormat, fd: int = 2) -> LogWriter:
    """Send all that this process logs through a writer to `fd`."""
    writer = LogWriter(fd)
    handler = _ToWriter(writer)
    handler.setFormatter(_Formatter(Lines(process, log_format)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    return writer
