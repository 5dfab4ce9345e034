"""The user's cache directory: where it is, how one process at a time fills a place in it.

Owns: `ModelError`, the directory's path, locks, atomic publication of files and folders, and the
remembered SHA-256 of model files. Never: knows what a model is, or leaves a half-written thing
under a final name.

    <cache>/downloads/...           files from PyPI, checked
    <cache>/models/<name>-<hash>/   prepared folders
    <cache>/hashes/<hash>.json      path, size, time and SHA-256 of a model file

Any number of processes may use one cache at the same time; the supervisor and the tools do.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

Progress = Callable[[str, float | None], None]
HASH_CHUNK_BYTES = 16 << 20


class ModelError(Exception):
    """One line: which path or spec, what is wrong, and what to do."""


def cache_root() -> Path:
    """$XDG_CACHE_HOME/shmserve, by default ~/.cache/shmserve. Raises ModelError if there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG specification: a relative path there is to be ignored
        return Path(base) / "shmserve"
    try:
        return Path.home() / ".cache" / "shmserve"
    except RuntimeError:
        raise ModelError("this user has no home directory (HOME): set XDG_CACHE_HOME") from None


@contextlib.contextmanager
def exclusive(target: Path, progress: Progress) -> Iterator[Path]:
    """Holds the lock of `target` and yields an empty place beside it to build in.

    Waits for another process that builds the same thing; so look again for `target` inside. The
    place is `target` with `.partial` behind it, and whatever is left there is removed at both ends.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {target.name}", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        remove(partial)
        partial.mkdir()
        try:
            yield partial
        finally:
            remove(partial)


def publish(built: Path, target: Path) -> None:
    """Moves a finished file or folder to its final name; on disk before it has that name."""
    for path in (built, *(built.iterdir() if built.is_dir() else ())):
        _sync(path)
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(built, target)
    _sync(target.parent)


def remove(path: Path) -> None:
    """The file or folder is gone; not an error if it was."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256_of(path: Path, progress: Progress) -> str:
    """The SHA-256 of a file's content, in hex. Reads all of it."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"reading {path.name}", done / total if total else None)
    return digest.hexdigest()


class _Remembered(msgspec.Struct):
    path: str
    size: int
    mtime_ns: int
    sha256: str


def remembered_sha256(path: Path, cache: Path, progress: Progress) -> str:
    """As `sha256_of`, but a file that has not changed since the last time is not read again."""
    path = path.resolve()
    stat = path.stat()
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    note = cache / "hashes" / f"{name}.json"
    try:
        known = msgspec.json.decode(note.read_bytes(), type=_Remembered)
    except (FileNotFoundError, msgspec.DecodeError):
        known = None  # never noted, or unreadable: both mean that it is to be read again
    if known and (known.path, known.size, known.mtime_ns) == (
        str(path),
        stat.st_size,
        stat.st_mtime_ns,
    ):
        return known.sha256
    digest = sha256_of(path, progress)
    remembered = _Remembered(str(path), stat.st_size, stat.st_mtime_ns, digest)
    # A cache that is only read: the file is then read again each time.
    with contextlib.suppress(OSError):
        _note(note, remembered)
    return digest


def _note(note: Path, remembered: _Remembered) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        fresh.write_bytes(msgspec.json.encode(remembered))
        os.replace(fresh, note)
    finally:
        fresh.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
