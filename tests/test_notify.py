"""What a service manager is told: once, whole, and also where it stood still for a while."""

from __future__ import annotations

import socket
from pathlib import Path

from shmserve.notify import Notifier


def test_what_a_full_queue_did_not_take_is_told_when_there_is_room(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": path})
        while notifier.send(STATUS="loading"):
            continue
        assert not notifier.send(READY=1, STATUS="serving", EXTEND_TIMEOUT_USEC=7)
        notifier.send_missed()  # as full as before
        assert manager.recv(4096) == b"STATUS=loading"
        notifier.send_missed()
        heard = b""
        while b"READY" not in heard:
            heard = manager.recv(4096)
        assert sorted(heard.splitlines()) == [b"READY=1", b"STATUS=serving"]
        notifier.send_missed()
        assert notifier.send(WATCHDOG=1)
        assert manager.recv(4096) == b"WATCHDOG=1"
        notifier.close()


def test_nobody_to_tell_is_no_fault(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
        notifier = Notifier(environ)
        assert not notifier.send(READY=1)
        notifier.send_missed()
        notifier.close()
