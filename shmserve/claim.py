"""What a start claims before it loads anything: the name of the instance, the port, and room without leftovers.

Owns: the order of the three. Never: starts a process. Supervisor only.

    lock the name -> if its last holder was killed, wait for that one's children -> bind the sockets -> sweep

The name comes first because the children of a killed supervisor hold the port for a moment: who has the lock knows that they
are leaving. A second start of a name that lives is refused by the lock, with its address; a port that another program has,
by the probe: both before a model is touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Final

from shmserve.config import Config
from shmserve.instance_socket import InstanceError, InstanceLock, LockRecord, runtime_dir
from shmserve.rings.layout import LOCK_OWNER
from shmserve.rings.segment import SHM_DIR, is_locked, names, open_ours, sweep
from shmserve.sockets import Listeners, open_listeners

FORMER_CHILDREN_S: Final = 5.0
"""The children of a killed supervisor are gone by then, or somebody must look."""


@dataclass(slots=True)
class Claim:
    """Held for the supervisor's life. `config` has the name and the port that were found."""

    config: Config
    lock: InstanceLock
    listeners: Listeners
    epoch: int

    def next_epoch(self) -> int:
        """A number greater than any that this instance has used, also before a kill -9."""
        self.epoch += 1
        self.lock.record(LockRecord(os.getpid(), self.listeners.url, self.epoch))
        return self.epoch

    def close(self) -> None:
        self.listeners.close()
        self.lock.release()


def claim(config: Config, environ: MutableMapping[str, str]) -> Claim:
    """Claim all, or nothing. Raises InstanceError, ListenError."""
    directory = runtime_dir(environ)
    name = _name_before_binding(config, environ)
    lock = _take(directory, name) if name else None
    try:
        listeners = open_listeners(config.http, config.num_http, environ)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    try:
        if lock is None:
            lock = _take(directory, f"{os.getuid()}-{listeners.port}")
        http = replace(config.http, port=listeners.port or config.http.port)
        config = replace(config, instance=lock.name, http=http)
        claimed = Claim(config, lock, listeners, lock.former.epoch)
        lock.record(LockRecord(os.getpid(), listeners.url, claimed.epoch))
    except BaseException:
        listeners.close()
        if lock is not None:
            lock.release()
        raise
    sweep("shmserve.")
    return claimed


def default_instance(config: Config) -> str:
    """The name of an instance that was given none: by port, or by the Unix socket's file name."""
    if config.instance or not config.http.uds:
        return config.instance_name
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", os.path.basename(config.http.uds))
    return f"{os.getuid()}-{stem}"[:64]


def _name_before_binding(config: Config, environ: MutableMapping[str, str]) -> str:
    """The name if it can be known by now: port 0 and sockets from systemd tell theirs later."""
    by_port = not config.instance and not config.http.uds
    if by_port and (config.http.port == 0 or environ.get("LISTEN_PID") == str(os.getpid())):
        return ""
    return default_instance(config)


def _take(directory: str, name: str) -> InstanceLock:
    lock = InstanceLock.claim(directory, name)
    deadline = time.monotonic() + FORMER_CHILDREN_S
    while (alive := _held_segments(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        # What a killed holder wrote must stay: its epoch still guards its names.
        (lock.abandon if lock.former.epoch else lock.release)()
        raise InstanceError(
            f"processes of a former run still hold {SHM_DIR}{alive[0]} of instance {name!r}; "
            "end them (fuser shows them) or choose another --instance"
        )
    return lock


def _held_segments(name: str) -> list[str]:
    """Segments of instance `name` of which some process is still the owner."""
    held = []
    for segment in names(f"shmserve.{name}."):
        try:
            fd = open_ours(segment, os.O_RDONLY)
        except OSError:
            continue  # gone meanwhile, or not ours
        try:
            if is_locked(fd, LOCK_OWNER):
                held.append(segment)
        finally:
            os.close(fd)
    return held
