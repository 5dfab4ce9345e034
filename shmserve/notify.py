"""systemd's notification protocol: one datagram of KEY=value lines to the socket that NOTIFY_SOCKET names.

Owns: that socket. Never: fails the server; a service manager that does not listen is not our fault. Without NOTIFY_SOCKET
every call does nothing. Supervisor only: its children are given neither variable.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

_ONCE: Final = ("READY", "STOPPING", "STATUS")
"""Told once, at a change: all else is told again before long."""


class Notifier:
    """Where to send states, and how often the service manager wants to hear that all is well."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._missed: dict[str, str | int] = {}  # what must be told, and found the queue full
        if self._address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)  # a full queue of the manager must not stop the loop
        self.watchdog_s = _watchdog_seconds(environ) if self._socket else 0.0
        """How often WATCHDOG=1 is due: an eighth of what the manager allows, so that one that could not be sent, or was
        withheld while a child was hung, costs little of it. 0: it does not ask."""

    def send(self, **fields: str | int) -> bool:
        """Send the fields, by their names; False if nobody listens, or can take them now."""
        if self._socket is None:
            return False
        fields = self._missed | fields
        text = "\n".join(f"{key}={_one_line(value)}" for key, value in fields.items())
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        try:
            self._socket.sendto(text.encode(), address)
        except BlockingIOError:
            # A manager that stands still, and will look for these when it goes on.
            self._missed = {key: fields[key] for key in _ONCE if key in fields}
            return False
        except OSError:
            return False  # gone
        self._missed = {}
        return True

    def send_missed(self) -> None:
        """Try again what a full queue did not take."""
        if self._missed:
            self.send()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def extension(seconds: float) -> dict[str, int]:
    """The field that asks the service manager for so much more time to start or to stop."""
    return {"EXTEND_TIMEOUT_USEC": int(seconds * 1e6)}


def _one_line(value: str | int) -> str:
    return " ".join(str(value).split())


def _watchdog_seconds(environ: Mapping[str, str]) -> float:
    usec = environ.get("WATCHDOG_USEC", "")
    for_pid = environ.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdecimal() or for_pid != str(os.getpid()):
        return 0.0
    return int(usec) / 8_000_000
