"""A server in the background: started as a process of its own session, waited for until it serves.

Owns: the start of that process and the wait for its READY=1, by the protocol that it speaks to systemd too (notify.py). Never:
stays: once the server is ready it belongs to nobody but init. Commands only.

    launcher --spawn, NOTIFY_SOCKET--> supervisor        its stdout and stderr go to its log file
             <--STATUS= .. READY=1----                   or its end: the last error line of the log, and its exit code
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from shmserve.log_file import open_log

_MOST_BYTES: Final = 4_096
_TAIL_BYTES: Final = 16_384
_OF_THE_LAUNCHER: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID")
_READY_LINE: Final = "shmserve: ready: "
_ERROR_LINE: Final = "shmserve: error: "


class DaemonError(RuntimeError):
    """The server ended before it was ready; the text is its own error line."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def launch(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    log_path: str,
    on_status: Callable[[str], None],
    cwd: str | None = None,
) -> str:
    """Start `argv`, which serves, in the background; the line by which it says that it is ready.

    Raises DaemonError if it ends instead. An interrupt meanwhile ends it, and is raised again when it has.
    """
    log_fd = open_log(log_path)
    began_at = os.fstat(log_fd).st_size
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
            # A name that the kernel chooses, in no directory: nothing is left of it, and who sends is seen in SCM_CREDENTIALS.
            news.bind("")
            news.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            news.setblocking(False)
            own = {key: value for key, value in environ.items() if key not in _OF_THE_LAUNCHER}
            process = subprocess.Popen(
                list(argv),
                env=own | {"NOTIFY_SOCKET": "@" + news.getsockname()[1:].decode()},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
            )
            try:
                is_ready = _wait(process, news, on_status)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                process.wait()
                raise
        said = _tail(log_path, began_at)
        if not is_ready:
            code = process.wait()
            how = f"exited with code {code}" if code >= 0 else f"was killed by signal {-code}"
            why = _last(said, _ERROR_LINE) or f"the server {how} before it was ready"
            raise DaemonError(f"{why} (log: {log_path})", code if code > 0 else 1)
        process.returncode = 0  # it goes on, and is no longer ours to wait for
        return _READY_LINE + _last(said, _READY_LINE)
    finally:
        os.close(log_fd)


def _wait(
    process: subprocess.Popen[bytes], news: socket.socket, on_status: Callable[[str], None]
) -> bool:
    """True at its READY=1, False at its end."""
    pidfd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(news, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            while True:
                keys = [key.fileobj for key, _ in selector.select()]
                if news in keys:
                    fields = _receive(news, process.pid)
                    if fields.get("READY") == "1":
                        return True
                    if "STATUS" in fields and "STOPPING" not in fields:
                        on_status(fields["STATUS"])
                elif keys:
                    return False
    finally:
        os.close(pidfd)


def _receive(news: socket.socket, pid: int) -> dict[str, str]:
    """The fields of one datagram; none if it is not from process `pid`."""
    credentials = struct.Struct("3i")
    data, ancillary, _, _ = news.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(credentials.size))
    for level, kind, content in ancillary:
        is_credentials = (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
        if is_credentials and credentials.unpack(content)[0] == pid:
            lines = data.decode(errors="replace").splitlines()
            return dict(line.split("=", 1) for line in lines if "=" in line)
    return {}


def _tail(path: str, began_at: int) -> list[str]:
    """The last lines of the log that were written since `began_at`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(min(began_at, size), size - _TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _last(lines: Sequence[str], prefix: str) -> str:
    found = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return found[-1] if found else ""
