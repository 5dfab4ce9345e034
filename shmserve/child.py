"""What both kinds of child process do alike: join, heed the control link, keep the heartbeat, never outlive the supervisor.

Owns: the welcome, the signals, the parent-death signal. Never: imports torch or aiohttp. Used by `worker/__main__.py` and
`http/__main__.py`, main thread, before anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import shmserve
from shmserve.config import Config
from shmserve.control import ControlLink
from shmserve.log_writer import LogWriter, install
from shmserve.rings.board import Board
from shmserve.rings.segment import Segment

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Joined:
    """A child that was welcomed. `board` is its own to write."""

    link: ControlLink
    config: Config
    instance: str
    index: int
    epoch: int
    board: Board
    log: LogWriter


def join(role: str, argv: list[str]) -> Joined:
    """Parse `--control fd:N|unix:PATH [--index I]`, join the supervisor there, and be welcomed.

    Exits the process with one line if the supervisor is not there or refuses.
    """
    parser = argparse.ArgumentParser(prog=f"python -m shmserve.{role}", description=__doc__)
    parser.add_argument("--control", required=True, metavar="fd:N|unix:PATH")
    parser.add_argument("--index", type=int, default=0, help="which of the children of this role")
    options = parser.parse_args(argv)
    # Only the supervisor's word, or its end, ends a child: a group's Ctrl-C must not defeat a drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        link = ControlLink.connect(options.control)
        if options.control.startswith("unix:"):
            link.send({"type": "join", "role": role, "index": options.index})
        received = link.receive()
    except (OSError, RuntimeError) as error:
        sys.exit(f"shmserve {role}: error: cannot join at {options.control}: {error}")
    if received is None or received[0]["type"] != "welcome":
        reason = (
            received[0].get("error", "it answered with something else")
            if received
            else "it hung up"
        )
        sys.exit(f"shmserve {role}: error: the supervisor did not welcome us: {reason}")
    message, fds = received
    if (theirs := message.get("version")) != shmserve.__version__:
        fault = (
            f"the supervisor is shmserve {theirs}, this is {shmserve.__version__}: the package was replaced while the instance "
            "ran; start it anew (shmserve restart)"
        )
        link.send({"type": "failed", "error": fault})
        link.close()
        sys.exit(f"shmserve {role}: error: {fault}")
    config = Config.from_builtins(message["config"])
    log = install(f"{role}[{message['index']}]", config.log_level, config.log_format)
    board = Board(
        Segment.from_fd(
            Board.name(message["instance"], message["epoch"], role, message["index"]), fds[0]
        )
    )
    board["pid"] = os.getpid()
    log.show_on(board)
    return Joined(link, config, message["instance"], message["index"], message["epoch"], board, log)


def with_source_tree(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which `python -P -m shmserve...` finds this package: -P would hide a source tree that is not installed."""
    env = dict(environ)
    root = os.path.dirname(os.path.dirname(os.path.abspath(shmserve.__file__)))
    before = env.get("PYTHONPATH", "")
    if root not in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        before.split(os.pathsep)[0],
    ):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, before)))
    return env


def name_of_signal(number: int) -> str:
    """SIGKILL; of real-time signals all but the first and the last have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def wake_with_parents_end() -> None:
    """Be continued by the kernel when the parent dies: who is stopped then could neither see it nor end."""
    _ask_for_signal(signal.SIGCONT)


def die_with_parent() -> None:
    """Be killed by the kernel when the parent dies, even inside native code. Call in the main thread, once after exec.

    The signal follows the parent's *thread* that started us: the supervisor's main thread.
    """
    parent = os.getppid()
    _ask_for_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died between the two calls
        os._exit(0)


def _ask_for_signal(number: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        logging.warning("prctl(PR_SET_PDEATHSIG) failed: errno %d", ctypes.get_errno())
