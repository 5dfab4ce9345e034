"""The crash dump: what the rings and boards said when a child died, as a file of the state directory.

Owns: the file's form, which files are kept, and the thread that writes. Never: makes the supervisor wait: at a death it maps the
rings of the dead (the mapping outlives the names) and copies the boards, less than a millisecond; the rest is the thread's.

    $XDG_STATE_HOME/shmserve/<instance>/<UTC time>-<role><index>-<pid>.dump     0600; the newest 5 are kept

     0  b"SHMDUMP1", length of the head u64        8 bytes each, little endian
    16  the head: JSON, a Recording whose rings have no slots
        the slots of each ring, in the head's order, from its `first` cursor on: length u64, then so many bytes of zlib's

Half a file never has such a name. What clients sent is left out unless --log-prompts says that it may be written down; what the model
answered is there as token ids. A disk that does not answer costs the dumps of later deaths (`MOST_WAITING`), nothing else.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from shmserve.boards import REQUEST_COLUMNS
from shmserve.recording import (
    BoardCopy,
    Death,
    Recording,
    board_place,
    copy_board,
    ring_place,
)
from shmserve.rings import layout as L
from shmserve.rings.board import BoardReader
from shmserve.rings.observe import RingCopy, RingView
from shmserve.rings.segment import SegmentError
from shmserve.rings.wakeup import Counter
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, without_contents
from shmserve.wire.tokens import TOKEN_SLOT_BYTES

MAGIC: Final = b"SHMDUMP1"
MOST_KEPT: Final = 5
MOST_WAITING: Final = 4
SUFFIX: Final = ".dump"
_PARTIAL: Final = ".partial"
_RING_WORDS: Final = L.PRODUCER_WORDS.keys() | L.CONSUMER_WORDS.keys()
_PREFIX: Final = struct.Struct("<8sQ")
_LENGTH: Final = struct.Struct("<Q")
_MOST_S: Final = 1e11  # since 1970
_MOST_HEAD_BYTES: Final = 1 << 28
_JOIN_S: Final = 5.0


class DumpError(RuntimeError):
    """A dump cannot be read or written; the text is one line that names the file."""


def write_dump(path: str, recording: Recording) -> None:
    """Write the file, 0600, whole or not at all. Raises DumpError."""
    bare = replace(recording, rings=tuple(replace(ring, slots=b"") for ring in recording.rings))
    head = msgspec.json.encode(bare)
    partial = path + _PARTIAL
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(partial, flags, 0o600), "wb") as file:
            file.write(_PREFIX.pack(MAGIC, len(head)))
            file.write(head)
            for ring in recording.rings:
                packed = zlib.compress(ring.slots, 1)
                file.write(_LENGTH.pack(len(packed)))
                file.write(packed)
        os.replace(partial, path)
    except OSError as error:
        _remove(partial)
        raise DumpError(f"cannot write {path}: {error.strerror}") from None


def read_dump(path: str) -> Recording:
    """The recording in a file. Raises DumpError if it is none, or not whole."""
    try:
        with open(path, "rb") as file:
            magic, size = _PREFIX.unpack(file.read(_PREFIX.size))
            if magic != MAGIC or size > _MOST_HEAD_BYTES:
                raise DumpError(f"{path} is no crash dump of this version")
            bare = msgspec.json.decode(file.read(size), type=Recording)
            if not _is_sound(bare):
                raise DumpError(f"{path} is damaged: its head says what cannot be")
            rings = []
            for ring in bare.rings:
                num_slots = ring.words["write_cursor"] - ring.first
                (num_packed,) = _LENGTH.unpack(file.read(_LENGTH.size))
                packed = file.read(min(num_packed, os.fstat(file.fileno()).st_size))
                size = num_slots * ring.slot_size
                unpacker = zlib.decompressobj()
                slots = unpacker.decompress(packed, size + 1)
                if len(slots) != size or len(packed) != num_packed:
                    raise DumpError(f"{path} is damaged, or cut short: {ring.name} is not whole")
                rings.append(replace(ring, slots=slots))
    except OSError as error:
        raise DumpError(f"cannot read {path}: {error.strerror}") from None
    except struct.error:
        raise DumpError(f"{path} is no crash dump of this version") from None
    except (msgspec.MsgspecError, LookupError, zlib.error) as error:
        raise DumpError(f"{path} is damaged: {error}") from None
    return replace(bare, rings=tuple(rings))


def _is_sound(recording: Recording) -> bool:
    """Whether a head can be read on: every name and number in it that something is computed from."""
    try:
        for board in recording.boards:
            board_place(board.name)
        kinds = [ring_place(ring.name)[3] for ring in recording.rings]
    except SegmentError:
        return False
    rows = [row for board in recording.boards for row in board.requests]
    return (
        0 <= recording.taken_at < _MOST_S
        and all(row.keys() == set(REQUEST_COLUMNS) for row in rows)
        and all(0 <= row["req_id"] < 1 << 64 for row in rows)
        and all(map(_is_sound_ring, recording.rings, kinds))
    )


def _is_sound_ring(ring: RingCopy, kind: str) -> bool:
    size = SUBMIT_SLOT_BYTES if kind == "submit" else TOKEN_SLOT_BYTES
    if ring.slot_size != size or not ring.words.keys() >= _RING_WORDS:
        return False
    return ring.capacity > 0 and 0 <= ring.words["write_cursor"] - ring.first <= ring.capacity


def dumps_in(folder: str) -> list[str]:
    """Paths of the dumps in a folder, oldest first: their names begin with the time."""
    return _files(folder, SUFFIX)


def _files(folder: str, suffix: str) -> list[str]:
    try:
        found = [entry for entry in os.listdir(folder) if entry.endswith(suffix)]
    except OSError:
        return []
    return [os.path.join(folder, entry) for entry in sorted(found)]


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it never came to be, or the disk that fails us fails here too


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one dump: its path, or why there is none."""

    death: Death
    path: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Job:
    recording: Recording  # without rings
    views: tuple[RingView, ...]
    ends: tuple[
        tuple[bool, bool], ...
    ]  # who was there at the death; the others leave soon after it


class CrashRecorder:
    """Records deaths into `folder`. One thread calls it, the supervisor's; `done` is readable when there are `outcomes`."""

    def __init__(
        self, folder: str, instance: str, *, model: str, model_folder: str, with_contents: bool
    ) -> None:
        self._folder = folder
        self._instance = instance
        self._model = model
        self._model_folder = model_folder
        self._with_contents = with_contents
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MOST_WAITING)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.done = Counter.create()

    @property
    def num_waiting(self) -> int:
        return self._jobs.qsize()

    def record(self, death: Death, rings: Sequence[str], boards: Sequence[str]) -> None:
        """Take down what these segments hold; the names may vanish as soon as this returns. What cannot be is an outcome."""
        taken_ns, taken_at = time.monotonic_ns(), time.time()
        copies: list[BoardCopy] = []
        views: list[RingView] = []
        try:
            for name in boards:
                reader = BoardReader.attach(name)
                try:
                    copies.append(copy_board(name, reader))
                finally:
                    reader.close()
            for name in rings:
                views.append(RingView(name))
            recording = Recording(
                instance=self._instance,
                taken_ns=taken_ns,
                taken_at=taken_at,
                boards=tuple(copies),
                rings=(),
                death=death,
                model=self._model,
                model_folder=self._model_folder,
                has_contents=self._with_contents,
            )
            self._start()
            self._jobs.put_nowait(
                _Job(recording, tuple(views), tuple(view.ends() for view in views))
            )
        except (OSError, RuntimeError, queue.Full) as error:
            for view in views:
                view.close()
            is_full = isinstance(error, queue.Full)
            why = "the disk has not taken the former ones" if is_full else str(error)
            self._tell(Outcome(death, error=why))

    def outcomes(self) -> list[Outcome]:
        """What was written, and what was not, since the last call."""
        self.done.take()
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get_nowait())
        return found

    def close(self) -> list[Outcome]:
        """Wait a little for what is being written; the last outcomes. A thread that its disk does not answer ends with us."""
        if self._is_closed:
            return []
        self._is_closed = True
        if self._thread is not None and self._thread.is_alive():
            deadline = time.monotonic() + _JOIN_S
            try:
                self._jobs.put(None, timeout=_JOIN_S)
            except queue.Full:
                return self.outcomes()
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                return self.outcomes()  # it may still tell: its counter stays open
        left = self.outcomes()
        self.done.close()
        return left

    # --- the thread's

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="crash dumps", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            death = job.recording.death
            assert death is not None, "record() gave it"
            try:
                self._tell(Outcome(death, path=self._write(job, death)))
            except (DumpError, OSError) as error:
                self._tell(Outcome(death, error=str(error)))

    def _write(self, job: _Job, death: Death) -> str:
        rings: list[RingCopy] = []
        for view, (has_producer, has_consumer) in zip(job.views, job.ends, strict=True):
            try:
                ring = view.copy()
            finally:
                view.close()
            ring = replace(ring, has_producer=has_producer, has_consumer=has_consumer)
            if not self._with_contents and ring.slot_size == SUBMIT_SLOT_BYTES:
                ring = replace(ring, slots=without_contents(ring.slots))
            rings.append(ring)
        recording = replace(job.recording, rings=tuple(rings))
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise DumpError(f"cannot make {self._folder}: {error.strerror}") from None
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(recording.taken_at))
        stamp += f".{int(recording.taken_at % 1 * 1000):03}Z"
        name = f"{stamp}-{death.role}{death.index}-{death.pid}{SUFFIX}"
        path = os.path.join(self._folder, name)
        # Before it: the disk may be full. A killed supervisor may have left half a file.
        for old in [*dumps_in(self._folder)[: -(MOST_KEPT - 1)], *_files(self._folder, _PARTIAL)]:
            _remove(old)
        write_dump(path, recording)
        return path

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self.done.add(1)
