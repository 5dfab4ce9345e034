"""Many sends in one system call: an io_uring that the pump hands the frames of a whole step.

Owns: one ring of submissions and completions, shared with the kernel, and a table of what is to be sent: `parts`, four pieces of
memory a frame, which the kernel gathers (nobody joins them before). Never: waits. Each send is tried once, in the order given, and
either the socket takes bytes at once or it does not: what `socket.send` on a non-blocking socket does, less a trip through Python and
into the kernel for each. Event loop's thread only: the ring is made for a single one.

    parts, descriptors -> entries -> tail -> io_uring_enter -> completions (what each send returned)

Layouts and numbers: io_uring(7), io_uring_setup(2), io_uring_enter(2), sendmsg(2); Linux 6.1, the same on x86-64 and aarch64. Kernels and
sandboxes that have none, or forbid it, make the constructor raise OSError: the pump then sends one by one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MOST_SENDS: Final = 256
"""Of one call; a power of two."""
NUM_PARTS: Final = 4
"""Pieces of memory that a frame is gathered from; some may be empty."""

_SYS_SETUP: Final = 425
_SYS_ENTER: Final = 426
_SETUP_SINGLE_ISSUER: Final = 1 << 12
_SETUP_DEFER_TASKRUN: Final = 1 << 13
_ENTER_GETEVENTS: Final = 1
_OFFSET_RINGS: Final = 0
_OFFSET_ENTRIES: Final = 0x10000000
_OP_SENDMSG: Final = 9
_MSG_FLAGS: Final = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL

_ENTRY: Final = np.dtype(
    {
        "names": ["opcode", "fd", "address", "size", "msg_flags", "user_data"],
        "formats": ["u1", "<i4", "<u8", "<u4", "<u4", "<u8"],
        "offsets": [0, 4, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
# struct iovec, struct msghdr
_PART: Final = np.dtype([("address", "<u8"), ("size", "<u8")])
_MESSAGE: Final = np.dtype(
    {
        "names": ["parts", "num_parts"],
        "formats": ["<u8", "<u8"],
        "offsets": [16, 24],
        "itemsize": 56,
    }
)
_COMPLETION: Final = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])


def address_of(buffer: npt.NDArray[Any] | bytes) -> int:
    """Where its first byte is."""
    array = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else buffer
    address: int = array.__array_interface__["data"][0]
    return address


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
        self._fd: int = self._syscall(_SYS_SETUP, MOST_SENDS, ctypes.byref(parameters))
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
        entries = mmap.mmap(self._fd, _ENTRY.itemsize * MOST_SENDS, flags, offset=_OFFSET_ENTRIES)

        def word(at: int) -> npt.NDArray[np.uint32]:
            return np.frombuffer(rings, np.uint32, 1, at)

        self._tail, self._done_head = word(sends.tail), word(done.head)
        self._done_tail = word(done.tail)
        self._entries = np.frombuffer(entries, _ENTRY)
        self._done = np.frombuffer(rings, _COMPLETION, num_done, done.entries_at)
        self._done_mask = num_done - 1
        self.parts: npt.NDArray[np.void] = np.zeros((MOST_SENDS, NUM_PARTS), _PART)
        """(MOST_SENDS, NUM_PARTS) of address and size in bytes. Whatever it names must stay where it is until `send` has returned."""
        self._messages = np.zeros(MOST_SENDS, _MESSAGE)
        self._order = np.arange(MOST_SENDS)
        self._messages["parts"] = address_of(self.parts) + self._order * self.parts.strides[0]
        self._messages["num_parts"] = NUM_PARTS
        # Entry i always sends message i; which entries a call has, and in what order, `_queue` says.
        self._queue = np.frombuffer(rings, np.uint32, MOST_SENDS, sends.array)
        self._entries["opcode"] = _OP_SENDMSG
        self._entries["msg_flags"] = _MSG_FLAGS
        self._entries["address"] = address_of(self._messages) + self._order * _MESSAGE.itemsize
        self._entries["size"] = 1
        self._entries["user_data"] = self._order

    @property
    def is_open(self) -> bool:
        """False from the first call that the kernel refused: it is of no use any more."""
        return self._fd >= 0

    def send(self, fds: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Send the first rows of `parts`, at most MOST_SENDS, one on each descriptor: the bytes sent of each, or minus its errno.

        A descriptor may be in it once: of two frames on one socket, the second could be sent although the first was not.
        """
        count = len(fds)
        tail = int(self._tail[0])
        order = self._order[:count]
        self._entries["fd"][:count] = fds
        self._queue[(tail + order) & (MOST_SENDS - 1)] = order
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
        return results

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
