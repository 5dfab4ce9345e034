"""A log file with a bound: what every process of an instance says, in one file, and in one more what was said before.

Owns: the file that stderr is sent to, and its size. Never: stands between a process and its file: each writes by itself, with
O_APPEND, so nobody waits for a log writer, and none can be killed. Supervisor, and who starts it.

    NAME.log      appended to by all           past its bound it is copied to NAME.log.1 and emptied; O_APPEND makes the next
    NAME.log.1    what was said before         line of each process the first. What is said between copy and cut is lost.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

CHECK_S: Final = 1.0
_CHUNK_BYTES: Final = 1 << 20


class LogError(RuntimeError):
    """The log file cannot be written; the text is one line that names it."""


def state_path(environ: Mapping[str, str]) -> str:
    """$XDG_STATE_HOME/shmserve, by default ~/.local/state/shmserve, there or not. Raises LogError if there is no home."""
    base = environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):  # the specification: a relative path there is to be ignored
        home = environ.get("HOME", "") or os.path.expanduser("~")
        if not home.startswith("/"):
            raise LogError("this user has no home directory (HOME): set XDG_STATE_HOME")
        base = os.path.join(home, ".local", "state")
    return os.path.join(base, "shmserve")


def state_dir(environ: Mapping[str, str]) -> str:
    """The state directory, made if need be, 0700. Raises LogError."""
    path = state_path(environ)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise LogError(f"cannot make {path}: {error.strerror}; set XDG_STATE_HOME") from None
    return path


def open_log(path: str) -> int:
    """A descriptor that appends to `path`, which is made 0600. Raises LogError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LogError(f"cannot write --log-file {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise LogError(f"--log-file {path} is no regular file: its size could not be bounded")
    return fd


def redirect_stderr(path: str) -> None:
    """Send this process' stderr, and so its children's, to the end of `path`. Raises LogError."""
    fd = open_log(path)
    os.dup2(fd, 2)
    os.close(fd)


class BoundedLog:
    """Keeps the file that `path` names, open as `fd`, within `max_bytes`. A file that was moved away is another program's now."""

    def __init__(self, path: str, max_bytes: int, fd: int = 2) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._fd = fd

    def check(self) -> str:
        """Empty the file if it is past its bound, and say why what was in it is lost, or "". Raises LogError if it cannot be emptied."""
        found = os.fstat(self._fd)
        if found.st_size <= self._max_bytes:
            return ""
        if not self._is_ours():
            if not found.st_nlink:  # removed: nobody will ever read it, and it would fill the disk
                self._empty()
            return ""
        lost = ""
        try:
            self._keep()
        except OSError as error:
            lost = f"the log was emptied, and not kept: {self._path}.1: {error.strerror}"
        self._empty()
        return lost

    def _empty(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
        except OSError as error:
            # It may only be appended to (chattr +a), or its disk is read-only by now.
            raise LogError(
                f"the log cannot be kept within --log-max-bytes: {self._path}: {error.strerror}"
            ) from None

    def _is_ours(self) -> bool:
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        ours = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def _keep(self) -> None:
        """Copy all of it to a new NAME.log.1; half a copy never has that name."""
        partial = f"{self._path}.1.partial"
        try:
            with open(self._path, "rb", buffering=0) as source, open(partial, "wb") as target:
                os.fchmod(target.fileno(), 0o600)
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
            os.replace(partial, f"{self._path}.1")
        except OSError:
            _remove(partial)
            raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it never came to be, or the disk that fails us fails here too
