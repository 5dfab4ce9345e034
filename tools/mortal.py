"""Servers that end with whoever started them, even where SIGKILL leaves it no time to end them.

The kernel sends SIGTERM (PR_SET_PDEATHSIG) when the *thread* that started the process ends: start what is to last in the main thread.
It outlives exec and not fork, so a server that detaches itself is not followed; and a process that is stopped ends when it is
continued. What a server starts itself is its own to end.

For tools and tests. Nothing that a user runs is started by this.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1


def _ask_for_sigterm() -> None:
    """In the child, between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen(argv, **options)`, mortal. The process keeps its pid."""
    if shutil.which(argv[0]) is None:  # setpriv would tell it by an exit code only
        raise FileNotFoundError(2, "No such file or directory", argv[0])
    if setpriv := shutil.which("setpriv"):  # no Python between fork and exec: safe beside threads
        return subprocess.Popen([setpriv, "--pdeathsig", "TERM", "--", *argv], **options)
    return subprocess.Popen(argv, preexec_fn=_ask_for_sigterm, **options)
