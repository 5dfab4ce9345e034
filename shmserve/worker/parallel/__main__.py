"""A rank of a worker that is not the first: `python -m shmserve.worker.parallel --link fd:N`, started by rank 0.

It loads its part of the model, and then computes what rank 0 tells it to, until its link ends. Owns no ring, no board, no request and no
random number. Nobody but rank 0 speaks to it, and it says nothing but why it fails.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from shmserve.child import die_with_parent
from shmserve.control import ControlLink, Message
from shmserve.log_writer import install
from shmserve.model_cache import ModelError

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""What fails because another rank is gone is not what rank 0 should hear: until then its link has ended, and this process."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m shmserve.worker.parallel", description=__doc__)
    parser.add_argument("--link", required=True, metavar="fd:N")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    link = ControlLink.connect(options.link)
    received = link.receive()
    if received is None:
        return 0
    welcome, fds = received
    install(*welcome["log"])
    threading.Thread(target=_end_with, args=(link,), name="link", daemon=True).start()
    try:
        _serve(welcome, fds)
    except Exception as error:
        log.debug("this rank failed", exc_info=True)
        if not isinstance(error, ModelError):
            time.sleep(PATIENCE_S)
        line = " ".join(str(error).split())
        if not isinstance(error, ModelError):
            line = f"{type(error).__name__}: {line}"
        link.send({"type": "failed", "error": line[:500]})
    return 1


def _serve(welcome: Message, fds: list[int]) -> NoReturn:
    """Load, and follow rank 0 for ever. Raises whatever fails."""
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.lead import group_of, runner_of
    from shmserve.worker.parallel.steps import StepReader
    from shmserve.worker.parallel.team import Team

    store_fd, *step_fds = fds
    model = PreparedModel.load(Path(welcome["folder"]))
    group = group_of(welcome["kind"], store_fd, welcome["rank"], welcome["num_ranks"])
    runner: Any = runner_of(
        model, welcome["kind"], welcome["options"], Team(group), lambda what, share: None
    )
    gc.collect()
    gc.freeze()
    reader = StepReader(*step_fds)
    while True:
        message = reader.read()
        if message.batch is not None:
            runner.follow(message.batch, message.carried)
        elif message.rows is not None:
            runner.follow_logits(message.rows)


def _end_with(link: ControlLink) -> None:
    """Sleep until rank 0 is gone, or done; then this process has nothing left to do, whatever it waits for."""
    poll = select.poll()
    poll.register(link.fileno(), 0)  # no event but the end of the other side
    poll.poll()
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)
