"""Whether the kernels may use the CPU's AMX tiles: asked of a child, of the kernel, and of the bits, in this order.

Owns: the decision at a worker's start, and the log line where it is no. Never: compiles; AMX that cannot be had is no error, the
same rows are then computed without, to the same bits. Runs as a program, too (`python -m shmserve.worker.cpu.amx LIBRARY`): the
child that may die of an instruction that its CPU or its kernel does not know.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import Library
from shmserve.worker.cpu.pack import BLOCK8, GROUP, PackedMatrix
from shmserve.worker.cpu.selftest import check_amx

log = logging.getLogger(__name__)

TRY_TIMEOUT_S = 30
TRIED_ROWS = 40
"""Rows of the child's product: enough to be a prompt's, and not whole tiles."""


def switch_on(library: Library) -> None:
    """Let `library` use AMX if it has code for it, a child of this process lives through it, and no bit differs."""
    if not library.has_amx:
        return
    if refusal := _tried_in_child(library.path):
        log.info("AMX is not used: %s", refusal)
        return
    try:
        library.use_amx(True)
    except KernelsError as error:
        log.info("AMX is not used: %s", error)
        return
    try:
        check_amx(library)
    except KernelsError as error:
        library.use_amx(False)
        log.warning("AMX is not used: %s", error)


def _tried_in_child(path: Path) -> str:
    """Why a child could not multiply by AMX; empty if it could."""
    command = [sys.executable, "-P", "-m", "shmserve.worker.cpu.amx", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode < 0:
        return f"a process that tried it died: {signal.strsignal(-done.returncode)}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return ""


def main(argv: list[str]) -> int:
    """Multiply by AMX once, to no purpose but to come out of it alive: whether the bits are right is `check_amx`'s question."""
    matrix = PackedMatrix(np.zeros((1, 5), BLOCK8))
    try:
        library = Library(Path(argv[0]))
        library.use_amx(True)
    except KernelsError as error:
        print(error, file=sys.stderr)
        return 1
    library.matmul(matrix, np.ones((TRIED_ROWS, matrix.num_groups * GROUP), np.float32))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
