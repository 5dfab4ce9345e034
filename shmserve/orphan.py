"""What the children of a supervisor that was killed leave behind: nothing.

Owns: the last tidying up of an instance without a supervisor, and the deadline for it. Never: ends a stream (`http/__main__.py` and
the control thread of the worker do, each in its own way), or touches what a living process still owns.

Whoever is last removes what is left: segments go when no process holds their owner byte any more, the files of the instance
socket when no segment is left. A new start of the same name may be on its way meanwhile: it holds the lock of the name, and its
segments have owners, so neither is touched; and it waits for us as long as one of our segments is there.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Mapping

from shmserve.control import ControlLink
from shmserve.instance_socket import InstanceError, runtime_dir, sweep_stale
from shmserve.rings.segment import Segment, names, sweep

log = logging.getLogger(__name__)

GRACE_S = 4.0
"""A front end has this long to end its streams, from the supervisor's end on. Its own limits add up to less."""
PATIENCE_S = 2.5
"""How long one waits for the others: the kernel kills the worker at once, but frees its memory before its locks."""


def remove_leftovers(own: Segment, environ: Mapping[str, str], patience_s: float) -> None:
    """Remove `own`, the board of this process, and of its instance whatever nobody owns any more. Waits for dying siblings."""
    instance = own.name.removeprefix("/").rsplit(".", 3)[0]
    deadline = time.monotonic() + patience_s
    own.unlink()
    while True:
        sweep(f"{instance}.")
        if not names(f"{instance}."):
            break
        if time.monotonic() >= deadline:
            return  # a sibling lives: it is the last then
        time.sleep(0.02)
    try:
        sweep_stale(runtime_dir(environ))
    except (InstanceError, OSError) as error:
        log.debug(
            "the instance socket stays: %s", error
        )  # a new start holds it, or the directory is gone


class OrphanGuard:
    """A thread that sleeps until the supervisor is gone, and ends this process if it has not ended by itself in GRACE_S.

    For a front end whose event loop is stuck: nobody else would end it, and it holds the port.
    """

    def __init__(self, link: ControlLink, board: Segment, environ: Mapping[str, str]) -> None:
        self._link = link
        self._board = board
        self._environ = environ
        threading.Thread(target=self._run, name="orphan guard", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), 0)  # no event but the end of the other side
        poll.poll()
        time.sleep(GRACE_S)
        log.error(
            "the supervisor is gone, and this process did not end in %g s: it is ended", GRACE_S
        )
        remove_leftovers(self._board, self._environ, 0.0)
        os._exit(1)
