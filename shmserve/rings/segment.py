"""Named POSIX shared memory: created whole or not at all, owned by a lock, swept when the owner is gone.

Owns: segment files under /dev/shm, their mappings, and the OFD locks on them. Never: interprets a byte beyond the magic.

    byte 0  owner     taken on the open file description that the creator hands to every process of its instance, so it is
                      free exactly when the last of them is gone: then, and only then, a sweep may unlink the segment
    byte 1  producer  each taken on a private description (the segment opened anew through /proc/self/fd), since a lock on an
    byte 2  consumer  inherited descriptor proves nothing: every heir holds it

OFD locks, never lockf: a POSIX lock vanishes when any descriptor of the file is closed anywhere in the process.
The magic is stored last, so a segment without it is unfinished, or its creator died at it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from typing import Final

import posix_ipc

from shmserve.rings.layout import BOARD_MAGIC, LOCK_OWNER, MAGIC, ZONE_BYTES

SHM_DIR: Final = "/dev/shm"
UNFINISHED_GRACE_S: Final = 60.0
"""A segment without magic is left alone this long: its creator may be between its steps."""
NO_SHM: Final = (
    f"there is no {SHM_DIR}: the rings need POSIX shared memory (docker run without --ipc=none)"
)
NO_OFD_LOCKS: Final = "this system has no open file description locks (F_OFD_SETLK), which shmserve needs: Linux has them, gVisor has not"


class SegmentError(OSError):
    """A segment could not be made, opened or claimed; the text is one line for the operator."""


def _lock(fd: int, command: int, kind: int, byte: int) -> int:
    """Run an OFD lock command on one byte; the lock type that the kernel answered."""
    # struct flock on 64-bit Linux: type, whence, start, len, pid (0 for OFD locks), padded to 32 bytes.
    request = struct.pack("hh4xqqi4x", kind, os.SEEK_SET, byte, 1, 0)
    try:
        answer = fcntl.fcntl(fd, command, request)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the command itself: nothing else of it can be wrong
            raise SegmentError(errno.EINVAL, NO_OFD_LOCKS) from None
        raise
    return int(struct.unpack("hh4xqqi4x", answer)[0])


def try_lock(fd: int, byte: int) -> bool:
    """Take the write lock on `byte` for this open file description; False if another description holds it."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, byte: int) -> bool:
    """True if a description other than `fd`'s holds `byte`. Works on a read-only descriptor."""
    return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK


class Segment:
    """One mapped segment. `fd` shares its open file description with every process it was passed to."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap) -> None:
        self.name = name
        self.fd = fd
        self.mapping = mapping
        self._file = os.fstat(fd)  # which file it is, for after `close` too
        self._views: list[memoryview] = []
        self._private_fds: list[int] = []

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Segment:
        """Make `name` (leading slash), reserve its pages, take the owner lock. The caller stores the magic when it is whole.

        Raises SegmentError if the name exists or /dev/shm has no room (a sparse file would be SIGBUS later).
        """
        try:
            shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError:
            if not os.path.isdir(SHM_DIR):
                raise SegmentError(errno.ENOENT, NO_SHM) from None
            raise SegmentError(
                errno.EEXIST, f"shared memory {SHM_DIR}{name} exists already"
            ) from None
        except posix_ipc.PermissionsError:
            raise SegmentError(
                errno.EACCES, f"cannot create shared memory {SHM_DIR}{name}: Permission denied"
            ) from None
        except OSError as error:
            raise SegmentError(
                error.errno, f"cannot create shared memory {SHM_DIR}{name}: {error.strerror}"
            ) from None
        try:
            os.set_inheritable(shm.fd, False)
            os.posix_fallocate(shm.fd, 0, num_bytes)
            if not try_lock(shm.fd, LOCK_OWNER):
                raise SegmentError(errno.EBUSY, f"shared memory {SHM_DIR}{name} has another owner")
            return cls(name, shm.fd, mmap.mmap(shm.fd, num_bytes))
        except BaseException as error:
            os.close(shm.fd)
            unlink(name)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise SegmentError(errno.ENOSPC, no_room(num_bytes)) from None
            raise

    @classmethod
    def from_fd(cls, name: str, fd: int) -> Segment:
        """Map a segment whose descriptor was passed to this process. Takes the descriptor over, also when it raises."""
        try:
            os.set_inheritable(fd, False)
            size = _checked_size(name, fd)
            return cls(name, fd, mmap.mmap(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach_readonly(cls, name: str) -> Segment:
        """Map `name` for looking only: the kernel refuses any write through it."""
        try:
            fd = open_ours(name, os.O_RDONLY)
        except OSError as error:
            raise SegmentError(
                error.errno, f"cannot open shared memory {SHM_DIR}{name}: {error.strerror}"
            ) from None
        try:
            size = _checked_size(name, fd)
            return cls(name, fd, mmap.mmap(fd, size, prot=mmap.PROT_READ))
        except BaseException:
            os.close(fd)
            raise

    @property
    def num_bytes(self) -> int:
        return len(self.mapping)

    def words(self) -> memoryview:
        """The whole segment as u64 words. Closed with the segment."""
        view = memoryview(self.mapping).cast("Q")
        self._views.append(view)
        return view

    def bytes_view(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the segment. Closed with the segment."""
        view = memoryview(self.mapping)[start:stop]
        self._views.append(view)
        return view

    def claim(self, byte: int) -> bool:
        """Take the role lock `byte` on a private description; False if another process, or this one, has it.

        The descriptor is opened anew through /proc, which works for a vanished name too.
        """
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        if not try_lock(fd, byte):
            os.close(fd)
            return False
        self._private_fds.append(fd)
        return True

    def close(self) -> None:
        """Unmap and close; role locks go free. numpy arrays over the views must be gone by now (BufferError otherwise)."""
        for view in self._views:
            view.release()
        self._views.clear()
        self.mapping.close()
        for fd in self._private_fds:
            os.close(fd)
        self._private_fds.clear()
        os.close(self.fd)

    def is_named(self) -> bool:
        """True if the name still leads here: it may be gone, or a later start's."""
        try:
            there = os.stat(SHM_DIR + self.name)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, self._file)

    def unlink(self) -> None:
        """Remove the name if it is still this segment's (a later start may have taken it); mappings go on."""
        if self.is_named():
            unlink(self.name)


def open_ours(name: str, flags: int) -> int:
    """A descriptor of the file `name`. Raises OSError, EPERM for what is no segment that this user, or anybody if we are root, has made.

    Anybody may put something into /dev/shm under a name of ours: a pipe that is waited for at its opening, a link, a file that shrinks
    under our mapping.
    """
    fd = os.open(SHM_DIR + name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found, user = os.fstat(fd), os.geteuid()
    if not stat.S_ISREG(found.st_mode) or user not in (0, found.st_uid):
        os.close(fd)
        raise PermissionError(errno.EPERM, "it is no file of ours")
    return fd


def _checked_size(name: str, fd: int) -> int:
    """Size of the segment file behind `fd`. Raises SegmentError if it cannot hold the magic in whole words."""
    size = os.fstat(fd).st_size
    if size == 0:
        raise SegmentError(
            errno.ENODATA, f"shared memory {SHM_DIR}{name} is unfinished (no pages yet)"
        )
    if size < ZONE_BYTES or size % 8:
        raise SegmentError(
            errno.EPROTO, f"shared memory {SHM_DIR}{name} is no segment: {size} bytes"
        )
    return size


def no_room(num_bytes: int) -> str:
    """The sentence for a /dev/shm that cannot hold `num_bytes` more."""
    stat = os.statvfs(SHM_DIR)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"{SHM_DIR} has no room: {num_bytes} bytes needed, {free} free; "
        "make it larger (docker run --shm-size) or the rings smaller (--token-ring-slots, --submit-ring-slots)"
    )


def unlink(name: str) -> None:
    """Remove the name `name`. A vanished name is no error: logind removes IPC objects of users who log out."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return


def names(prefix: str) -> list[str]:
    """Names (with leading slash) of the segments whose name begins with `prefix` (without slash), sorted."""
    try:
        entries = os.listdir(SHM_DIR)
    except FileNotFoundError:
        return []  # no shared memory here: `create` says so
    return sorted("/" + entry for entry in entries if entry.startswith(prefix))


def sweep(prefix: str) -> list[str]:
    """Unlink the segments under `prefix` whose owner is gone; the names removed.

    Whole segments go when their owner byte is free, unfinished ones when they are also older than a minute. Segments of
    living instances hold their owner byte, so any process may sweep at any time.
    """
    removed = []
    for name in names(prefix):
        try:
            fd = open_ours(name, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's: not ours to remove
        try:
            magic = os.pread(fd, 8, 0)
            is_whole = int.from_bytes(magic, "little") in (MAGIC, BOARD_MAGIC)
            if not is_whole and time.time() - os.fstat(fd).st_ctime <= UNFINISHED_GRACE_S:
                continue  # not even locked for a moment: its creator is about to take the owner byte
            if try_lock(fd, LOCK_OWNER) and _is_named(fd, name):
                unlink(name)
                removed.append(name)
        finally:
            os.close(fd)
    return removed


def _is_named(fd: int, name: str) -> bool:
    """True if `name` still leads to the file of `fd`. False after another sweep, even if the name was made anew since."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(SHM_DIR + name))
    except FileNotFoundError:
        return False
