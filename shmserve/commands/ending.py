"""How a command ends an instance, also one that still prepares its model and does not listen yet.

Owns: the asking, the wait for the process' end, and for the time before there is anybody to ask, the signal. Never: signals or
waits for a process by its number alone: the number must hold the instance's lock, through a pidfd taken before that is looked
at. Commands only.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Final

from shmserve.commands.find import Instance
from shmserve.instance_socket import NotListeningError, ask, is_holder, record_of

ANSWER_TIMEOUT_S: Final = 5.0


def end(instance: Instance, how: str) -> int:
    """End the instance by "drain" or "stop"; its pid, once the process has ended. Raises InstanceError if none runs."""
    directory, name = instance.directory, instance.name
    pid, pidfd = _holder_of(instance)
    try:
        try:
            answer = ask(directory, name, {"type": how}, ANSWER_TIMEOUT_S, until_gone=True)
            pid = int(answer["pid"])
        except NotListeningError:
            if pidfd < 0:
                raise
            _signal(
                pidfd
            )  # it prepares its model: nothing is in flight, and SIGTERM ends it at once
        if pidfd >= 0:
            select.select([pidfd], [], [])  # readable once it has ended
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return pid


def _holder_of(instance: Instance) -> tuple[int, int]:
    """(pid, pidfd) of the process that holds the name; (0, -1) if that cannot be said."""
    pid = record_of(instance.directory, instance.name).pid
    if not pid:
        return 0, -1
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0, -1
    if is_holder(instance.directory, instance.name, pid):
        return pid, pidfd
    os.close(pidfd)
    return 0, -1


def _signal(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
    except ProcessLookupError:
        return  # it has ended of its own accord, just now
