"""What an instance's shared memory says at one moment: its boards and all that its rings still hold, as copies.

Owns: the copies, and how they are taken from a living instance or from what a killed one left in /dev/shm. Never: interprets a slot
(`dump.py` does), writes, or asks a process anything: who is stopped, hung or dead can be looked at all the same. Commands, and the
supervisor at a child's death (`crash_dump.py`).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from shmserve.rings.board import BoardReader
from shmserve.rings.observe import RingCopy, RingView, boards_of, rings_of
from shmserve.rings.segment import SegmentError, names

_BOARD_NAME: Final = re.compile(r"\.(\d+)\.([a-z]+)(\d+)\.board$")
_RING_NAME: Final = re.compile(r"\.(\d+)\.(\d+)-(\d+)\.(submit|tokens)$")


@dataclass(frozen=True, slots=True)
class BoardCopy:
    """One process' board. `requests` are the rows of a front end's roster (boards.REQUEST_COLUMNS)."""

    name: str
    role: str
    index: int
    epoch: int
    words: dict[str, int]
    requests: list[dict[str, int]]


@dataclass(frozen=True, slots=True)
class Death:
    """Whose death a recording was made at."""

    role: str
    index: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`taken_ns` is CLOCK_MONOTONIC, as all times in records are; `taken_at` the same moment in seconds since 1970.

    `has_contents`: what clients sent (prompts, stop strings, grammars) is still in the submit slots. `num_missing` segments were
    removed while the copies were taken, or are none of ours.
    """

    instance: str
    taken_ns: int
    taken_at: float
    boards: tuple[BoardCopy, ...]
    rings: tuple[RingCopy, ...]
    death: Death | None = None
    model: str = ""
    model_folder: str = ""
    has_contents: bool = True
    num_missing: int = 0


def copy_board(name: str, reader: BoardReader) -> BoardCopy:
    """Raises SegmentError for a name that is no board's."""
    epoch, role, index = board_place(name)
    return BoardCopy(name, role, index, epoch, reader.words(), reader.roster("requests"))


def board_place(name: str) -> tuple[int, str, int]:
    """(epoch, role, index) of a board by its name. Raises SegmentError if it is no such name."""
    match = _BOARD_NAME.search(name)
    if match is None:
        raise SegmentError(f"{name} is no name of a board")
    return int(match[1]), match[2], int(match[3])


def ring_place(name: str) -> tuple[int, int, int, str]:
    """(epoch, http, worker, "submit" or "tokens") of a ring by its name. Raises SegmentError if it is no such name."""
    match = _RING_NAME.search(name)
    if match is None:
        raise SegmentError(f"{name} is no name of a ring")
    return int(match[1]), int(match[2]), int(match[3]), match[4]


def take(instance: str, *, model: str = "", model_folder: str = "") -> Recording:
    """Copy what `instance` shows and holds now. Raises SegmentError if nothing of it is there.

    Boards come first: a request that ends meanwhile is seen by its FINISH in the ring.
    """
    taken_ns, taken_at = time.monotonic_ns(), time.time()
    boards: list[BoardCopy] = []
    rings: list[RingCopy] = []
    num_missing = 0
    for name in boards_of(instance):
        try:
            reader = BoardReader.attach(name)
        except SegmentError:
            num_missing += 1  # its process died since we listed it, or is about to show itself
            continue
        try:
            boards.append(copy_board(name, reader))
        finally:
            reader.close()
    for name in rings_of(instance):
        try:
            view = RingView(name)
        except SegmentError:
            num_missing += 1
            continue
        try:
            rings.append(view.copy())
        finally:
            view.close()
    if not boards and not rings:
        raise SegmentError(f"nothing of instance {instance!r} is in /dev/shm")
    return Recording(
        instance=instance,
        taken_ns=taken_ns,
        taken_at=taken_at,
        boards=tuple(boards),
        rings=tuple(rings),
        model=model,
        model_folder=model_folder,
        num_missing=num_missing,
    )


def instances_in_memory() -> list[str]:
    """Names of the instances of which something is in /dev/shm, living or not, sorted."""
    found = (name.removeprefix("/shmserve.").split(".") for name in names("shmserve."))
    return sorted({parts[0] for parts in found if len(parts) > 1})
