"""Many sends in one system call: an io_uring that the pump hands the frames of a whole step.

Owns: one ring of submissions and completions, shared with the kernel. Never: waits. Each send is tried once, in the order given, and
either the socket takes bytes at once or it does not: what `socket.send` on a non-blocking socket does, less a trip through Python and
into the kernel for each (about 1 us of 7). Event loop's thread only: the ring is made for a single one.

    frames -> entries (one numpy column per field) -> tail -> io_uring_enter -> completions (what each send returned)

Layouts and numbers: io_uring(7), io_uring_setup(2), io_uring_enter(2); Linux 6.1, the same on x86-64 and aarch64. Kernels and sandboxes
that have none, or forbid it, make the constructor raise OSError: the pump then sends one by one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_SENDS: Final = 256
"""Of one call; a power of two."""

_SYS_SETUP: Final = 425
_SYS_ENTER: Final = 426
_SETUP_SINGLE_ISSUER: Final = 1 << 12
_SETUP_DEFER_TASKRUN: Final = 1 << 13
_ENTER_GETEVENTS: Final = 1
_OFFSET_RINGS: Final = 0
_OFFSET_ENTRIES: Final = 0x10000000
_OP_SEND: Final = 26
_MSG_FLAGS: Final = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL

_ENTRY: Final = np.dtype(
    {
        "names": ["opcode", "fd", "address", "size", "msg_flags", "user_data"],
        "formats": ["u1", "<i4", "<u8", "<u4", "<u4", "<u8"],
        "offsets": [0, 4, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
_COMPLETION: Final = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])


class _SubmissionOffsets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in
                ("head", "tail", "mask", "entries", "flags", "dropped", "array", "reserved")] + [("user", ctypes.c_uint64)]  # fmt: skip


class _CompletionOffsets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in
                ("head", "tail", "mask", "entries", "overflow", "entries_at", "flags", "reserved")] + [("user", ctypes.c_uint64)]  # fmt: skip


class _Parameters(ctypes.Structure):
    _fields_ = (
        *[(name, ctypes.c_uint32) for name in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq_fd")],
        ("reserved", ctypes.c_uint32 * 3),
        ("submissions", _SubmissionOffsets),
        ("completions", _CompletionOffsets),
    )  # fmt: skip


class SendRing:
    """Sends up to MOST_SENDS frames at once. Raises OSError if the kernel has no io_uring for us."""

    def __init__(self) -> None:
        self.failure = 0
        """The errno of the call that ended it."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long
        parameters = _Parameters(flags=_SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN)
        self._fd = self._syscall(_SYS_SETUP, MOST_SENDS, ctypes.byref(parameters))
        if self._fd < 0:
            self._fd = -1
            raise OSError(ctypes.get_errno(), "io_uring_setup")
        try:
            self._map(parameters)
        except BaseException:
            self.close()
            raise

    def _map(self, parameters: _Parameters) -> None:
        sends, done = parameters.submissions, parameters.completions
        num_done = parameters.cq_entries
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        # One mapping for both rings: every kernel with the flags above has IORING_FEAT_SINGLE_MMAP.
        size = max(sends.array + 4 * MOST_SENDS, done.entries_at + _COMPLETION.itemsize * num_done)
        rings = mmap.mmap(self._fd, size, flags, offset=_OFFSET_RINGS)
        entries = mmap.mmap(
            self._fd, _ENTRY.itemsize * MOST_SENDS, flags, offset=_OFFSET_ENTRIES
        )

        def word(at: int) -> npt.NDArray[np.uint32]:
            return np.frombuffer(rings, np.uint32, 1, at)

        self._tail, self._done_head = word(sends.tail), word(done.head)
        self._done_tail = word(done.tail)
        self._entries = np.frombuffer(entries, _ENTRY)
        self._done = np.frombuffer(rings, _COMPLETION, num_done, done.entries_at)
        self._done_mask = num_done - 1
        # Entry i is always the i-th of its lap, and always a send.
        np.frombuffer(rings, np.uint32, MOST_SENDS, sends.array)[:] = np.arange(MOST_SENDS)
        self._entries["opcode"] = _OP_SEND
        self._entries["msg_flags"] = _MSG_FLAGS
        self._order = np.arange(MOST_SENDS)

    @property
    def is_open(self) -> bool:
        """False from the first call that the kernel refused: it is of no use any more."""
        return self._fd >= 0

    def send(self, fds: Sequence[int], frames: Sequence[bytes]) -> list[tuple[int, int]]:
        """Send frame i on descriptor i, at most MOST_SENDS. Of those that were not sent whole: (i, what was, or minus its errno).

        A descriptor may be in it once: of two frames on one socket, the second could be sent although the first was not.
        """
        count = len(frames)
        data = b"".join(frames)
        sizes = np.fromiter(map(len, frames), np.int64, count)
        begin = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        tail = int(self._tail[0])
        places = (tail + self._order[:count]) & (MOST_SENDS - 1)
        entries = self._entries
        entries["fd"][places] = fds
        entries["address"][places] = begin + np.cumsum(sizes) - sizes
        entries["size"][places] = sizes
        entries["user_data"][places] = self._order[:count]
        # The kernel reads it in the call below, in this very thread: program order is all the order there has to be.
        self._tail[0] = (tail + count) & 0xFFFFFFFF
        results = np.full(count, -errno.EAGAIN, np.int64)
        num_left, num_awaited = count, count
        while num_left or num_awaited:
            taken = self._enter(num_left, num_awaited)
            num_awaited -= self._collect(results)
            if taken < 0:
                # What it did not take must never be sent later, when its frames are gone: the ring goes with it.
                self.failure = -taken
                self.close()
                break
            num_left -= taken
        return [(i, int(results[i])) for i in np.flatnonzero(results != sizes).tolist()]

    def _enter(self, num_left: int, num_awaited: int) -> int:
        """How many the kernel has taken, or minus its errno."""
        taken: int = self._syscall(
            _SYS_ENTER, self._fd, num_left, num_awaited, _ENTER_GETEVENTS, None, 0
        )
        if taken >= 0:
            return taken
        error = ctypes.get_errno()
        return 0 if error == errno.EINTR else -error

    def _collect(self, results: npt.NDArray[np.int64]) -> int:
        """Take what has been completed; how many."""
        head = int(self._done_head[0])
        count = (int(self._done_tail[0]) - head) & 0xFFFFFFFF
        done = self._done[(head + self._order[:count]) & self._done_mask]
        results[done["user_data"]] = done["result"]
        self._done_head[0] = (head + count) & 0xFFFFFFFF
        return count

    def close(self) -> None:
        """Give it back. Once, or again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
