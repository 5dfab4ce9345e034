"""The worker's second thread: heartbeat and control link, alive while the main thread is inside native code.

Owns: `heartbeat_ns` on the board, and the reading of the control link. Never: touches the engine; messages are queued for the
main thread, which is woken by an eventfd. Two it acts on itself: the link's end of file (the supervisor is gone: unlink, exit
now) and "stop" (exit, with a second of grace for the step that runs).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from shmserve.boards import IDLE_HEARTBEAT_S
from shmserve.control import ControlError, ControlLink, Message
from shmserve.rings.board import Board
from shmserve.rings.wakeup import Counter

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0


class ControlThread:
    """`on_orphaned` unlinks what must not stay behind; it runs in this thread, just before the process ends."""

    def __init__(self, link: ControlLink, board: Board, on_orphaned: Callable[[], None]) -> None:
        self.messages: deque[tuple[Message, list[int]]] = deque()
        self.wake = Counter.create()
        self._link = link
        self._board = board
        self._on_orphaned = on_orphaned
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._board["heartbeat_ns"] = time.monotonic_ns()
        self._thread.start()

    def stopped(self) -> None:
        """The main thread has heeded "stop": no need to be ended by force."""
        self._stopped.set()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        while True:
            ready = poll.poll(IDLE_HEARTBEAT_S * 1000)
            self._board["heartbeat_ns"] = time.monotonic_ns()
            if not ready:
                continue
            try:
                received = self._link.receive()
            except ControlError as error:
                log.error("the control link cannot be believed any more: %s", error)
                received = None
            if received is None:
                log.warning("the supervisor is gone: ending")
                self._on_orphaned()
                logging.shutdown()  # a moment for the line above
                os._exit(0)
            self.messages.append(received)
            self.wake.add(1)
            if received[0]["type"] == "stop":
                if not self._stopped.wait(STOP_GRACE_S):
                    os._exit(0)
                return
