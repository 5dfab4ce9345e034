"""The instance socket: one name, one supervisor, and a place to ask it.

Owns: `<instance>.lock` and `<instance>.sock` in a directory that is ours alone (0700), and the few words spoken there. Never:
carries a request. Peers must be of our own uid, or root (SO_PEERCRED).

    lock file   OFD lock, held for the supervisor's life on a descriptor that no child inherits: free exactly when it is gone.
                Its text is {"pid", "url", "epoch"}: `epoch` is the greatest ever used, so that after a kill -9 a new start gives
                no segment a name that a dying process of the former one might still remove.
    socket      SOCK_SEQPACKET, 0600; bound only by the holder of the lock, who may therefore remove a stale file

    client -> supervisor                             supervisor -> client
    {"type": "status"}                               {"type": "status", ...}                     see Supervisor.status
    {"type": "drain"} | {"type": "stop"}             {"type": "ok", "pid"}, then end of file when the supervisor is gone
    {"type": "join", "role", "index"}                the messages of a control link (control.py), or
    anything else                                    {"type": "refused", "error"}
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from shmserve.control import ControlError, ControlLink, Message
from shmserve.rings.layout import LOCK_OWNER
from shmserve.rings.segment import is_locked, names, try_lock

_MAX_PATH_BYTES = 107  # sun_path, less its terminator
_SWEEP_S: Final = 1.0
SYSTEM_RUNTIME_DIRS: Final = "/run/shmserve/*/shmserve"
"""Where units of the system's service manager have theirs (systemd_unit.py): root's commands look there too."""


class InstanceError(RuntimeError):
    """An instance cannot be claimed or asked; the text is one line for the operator."""


class NotListeningError(InstanceError):
    """Nobody is at the instance socket: no instance, or one that still prepares its model."""


@dataclass(frozen=True, slots=True)
class LockRecord:
    """What the lock file says. Zero and empty where it says nothing."""

    pid: int = 0
    url: str = ""
    epoch: int = 0


def runtime_dir(environ: Mapping[str, str]) -> str:
    """The directory of instance sockets, made if need be. Raises InstanceError unless it is ours alone."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    path = os.path.join(base, "shmserve") if base else f"/tmp/shmserve-{os.getuid()}"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise InstanceError(
            f"cannot make {path}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours"
        ) from None
    # In /tmp anybody may have been there first, also with a link to elsewhere.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InstanceError(f"{path} is not a directory of ours alone (0700); remove it")
    return path


def system_runtime_dirs() -> list[str]:
    """Those directories of system services that we may look into: root may, others may not."""
    return [path for path in sorted(glob.glob(SYSTEM_RUNTIME_DIRS)) if os.access(path, os.X_OK)]


def _paths(directory: str, name: str) -> tuple[str, str]:
    stem = os.path.join(directory, name)
    if len(os.fsencode(stem)) + len(".sock") > _MAX_PATH_BYTES:
        raise InstanceError(f"{stem}.sock is longer than a socket path may be; shorten --instance")
    return f"{stem}.lock", f"{stem}.sock"


class InstanceLock:
    """The claim to a name. `former` is what the lock file said: its epoch is not 0 if the last holder was killed."""

    def __init__(self, name: str, fd: int, lock_path: str, socket_path: str) -> None:
        self.name = name
        self.socket_path = socket_path
        self._fd = fd
        self._lock_path = lock_path
        self.former = _read_record(fd)

    @classmethod
    def claim(cls, directory: str, name: str) -> InstanceLock:
        """Take the name. Raises InstanceError, which says who has it."""
        lock_path, socket_path = _paths(directory, name)
        deadline = time.monotonic() + _SWEEP_S
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(lock_path, flags, 0o600)
            except OSError as error:
                raise InstanceError(f"cannot open {lock_path}: {error.strerror}") from None
            if not try_lock(fd, LOCK_OWNER):
                holder = _read_record(fd)
                os.close(fd)
                if holder.pid and not _is_running(holder.pid) and time.monotonic() < deadline:
                    time.sleep(0.01)  # the lock is the sweep's of a dead instance, for a moment
                    continue
                raise InstanceError(
                    f"instance {name!r} is already running (pid {holder.pid or 'unknown'}, "
                    f"{holder.url or 'still starting'}); stop it (shmserve stop --instance {name}) "
                    "or choose another --port or --instance"
                ) from None
            if _is_file(fd, lock_path):
                return cls(name, fd, lock_path, socket_path)
            os.close(fd)  # its holder removed it between our open and our lock

    def record(self, record: LockRecord) -> None:
        """Write what a second start, and a start after a kill -9, should know."""
        data = msgspec.json.encode(record)
        try:
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        except OSError as error:
            raise InstanceError(f"cannot write {self._lock_path}: {error.strerror}") from None

    def touch(self) -> None:
        """Show that the file is in use: what is old in a directory like /tmp is removed there, and the name would be nobody's."""
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is removed
            os.utime(self._fd)

    def listen(self) -> socket.socket:
        """Bind the instance socket; a stale file is removed, since only the lock's holder may bind."""
        _unlink(self.socket_path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mask = os.umask(0o177)
        try:
            sock.bind(self.socket_path)
            sock.listen(16)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        finally:
            os.umask(mask)
        return sock

    def abandon(self) -> None:
        """Give the name back and leave the files: what they say of the former holder still holds."""
        os.close(self._fd)

    def release(self) -> None:
        """Remove both files, then give the name back."""
        _unlink(self.socket_path)
        _unlink(self._lock_path)  # before the lock goes free: who opened it meanwhile looks again
        os.close(self._fd)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_file(fd: int, path: str) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _read_record(fd: int) -> LockRecord:
    data = os.pread(fd, 4096, 0)
    try:
        return msgspec.json.decode(data, type=LockRecord)
    except msgspec.MsgspecError:
        return LockRecord()  # empty: a new file, or its holder has not written yet


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Who is at the other end of a Unix socket, by the kernel's word."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


def instances(directory: str) -> list[str]:
    """Names of the instances that run, sorted: whose lock is held."""
    return [name for name in _lock_names(directory) if _is_held(directory, name)]


def record_of(directory: str, name: str) -> LockRecord:
    """What the supervisor of instance `name` wrote down; an empty record if none runs, or it has not written yet."""
    if not _is_held(directory, name):
        return LockRecord()
    try:
        fd = os.open(_paths(directory, name)[0], os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return LockRecord()
    try:
        return _read_record(fd)
    finally:
        os.close(fd)


def is_holder(directory: str, name: str, pid: int) -> bool:
    """True if process `pid` has the lock file open: the record alone may be of a holder that was killed."""
    lock_path = os.path.realpath(_paths(directory, name)[0])
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False  # it is gone, or was never ours
    for entry in entries:
        with contextlib.suppress(OSError):  # a descriptor that has been closed since
            if os.readlink(f"/proc/{pid}/fd/{entry}") == lock_path:
                return True
    return False


def sweep_stale(directory: str) -> list[str]:
    """Remove the files of instances of which nothing is left, no segment either; their names.

    While a child of a killed supervisor still dies, the lock file's epoch keeps a new start from its names.
    """
    removed = []
    for name in _lock_names(directory):
        if not _is_held(directory, name) and not names(f"shmserve.{name}."):
            InstanceLock.claim(directory, name).release()
            removed.append(name)
    return removed


def _lock_names(directory: str) -> list[str]:
    return sorted(entry[:-5] for entry in os.listdir(directory) if entry.endswith(".lock"))


def _is_held(directory: str, name: str) -> bool:
    try:
        fd = os.open(_paths(directory, name)[0], os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return is_locked(fd, LOCK_OWNER)  # only asks: a probe that locked could refuse a start
    finally:
        os.close(fd)


def _connect(path: str, timeout_s: float) -> ControlLink:
    """Raises BlockingIOError if the backlog is full for so long: who does not answer may have many askers already."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # The kernel's own limit: with one of Python's the socket would not wait at all.
        seconds, rest = divmod(max(timeout_s, 1e-3), 1.0)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return ControlLink(sock)


def _no_answer(name: str, timeout_s: float) -> InstanceError:
    return InstanceError(
        f"instance {name!r} did not answer in {timeout_s:g} s (it may still prepare its model)"
    )


def ask(
    directory: str, name: str, message: Message, timeout_s: float, until_gone: bool = False
) -> Message:
    """Send `message` to instance `name`; its answer. With `until_gone`, waits on, without limit, until that supervisor has ended.

    Raises InstanceError if nobody answers in time.
    """
    _, socket_path = _paths(directory, name)
    try:
        link = _connect(socket_path, timeout_s)
    except BlockingIOError:
        raise _no_answer(name, timeout_s) from None
    except OSError:
        raise NotListeningError(
            f"no instance {name!r} is running (nobody answers on {socket_path})"
        ) from None
    try:
        link.sock.settimeout(timeout_s)
        link.send(message)
        received = link.receive()
        if received is None:
            raise InstanceError(f"instance {name!r} closed the connection without an answer")
        answer, _ = received
        if answer["type"] == "refused":
            raise InstanceError(f"instance {name!r} refused: {answer.get('error')}")
        link.sock.settimeout(None)
        while until_gone and link.receive() is not None:
            continue
        return answer
    except TimeoutError:
        raise _no_answer(name, timeout_s) from None
    except (OSError, ControlError) as error:
        raise InstanceError(f"instance {name!r} cannot be asked: {error}") from None
    finally:
        link.close()
