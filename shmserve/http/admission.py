"""Who may come in: the verdict on a request, before any work is done for it.

Owns: the count of what is in flight against what may be, and the drain rate behind Retry-After. Never: asks the worker; the front
end's own table is the count, so a burst in one tick is counted right. Event loop's thread only.

    admitted while   in flight + new <= run slots + max_queued_requests
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from shmserve.http.errors import ApiError, queue_full

if TYPE_CHECKING:
    from shmserve.http.client import WorkerClient

_FINISHES_REMEMBERED = 64


class Admission:
    """`run_slots` is the sum of max_num_seqs over the workers."""

    def __init__(self, client: WorkerClient, run_slots: int, max_queued_requests: int) -> None:
        self._client = client
        self._run_slots = run_slots
        self._max_queued = max_queued_requests
        self._finishes: deque[float] = deque(maxlen=_FINISHES_REMEMBERED)
        self.is_draining = False

    def note_finish(self) -> None:
        """A sequence left: the drain rate knows."""
        self._finishes.append(time.monotonic())

    def retry_after_s(self) -> int:
        """Whole seconds until a place should be free, by the rate of the last finishes; 1 if there were none."""
        if len(self._finishes) < 2:
            return 1
        span = time.monotonic() - self._finishes[0]
        rate = len(self._finishes) / max(span, 1e-3)
        excess = max(1, self._client.num_waiting - self._max_queued + 1)
        return max(1, min(60, math.ceil(excess / rate)))

    def admit(self, num_sequences: int) -> None:
        """Raise ApiError (503) unless `num_sequences` more may be submitted now."""
        if self.is_draining:
            raise ApiError(
                503,
                "The server is shutting down.",
                code="draining",
                retry_after_s=self.retry_after_s(),
            )
        if self._client.serving() is None:
            raise self.not_serving()
        most = self._run_slots + self._max_queued
        if num_sequences > most:
            raise ApiError(
                400,
                f"{num_sequences} completions were asked for at once; this server runs {self._run_slots} "
                f"and queues {self._max_queued}",
                param="n",
                code="invalid_value",
            )
        if len(self._client.in_flight) + num_sequences > most:
            self._client.board.add("num_refused")
            raise queue_full(self.retry_after_s())

    def not_serving(self) -> ApiError:
        """503 that says what the workers are doing instead."""
        links = list(self._client.links.values())
        for link in links:
            if link.state == "loading":
                return ApiError(
                    503,
                    f"The model is loading ({link.phase or 'starting'}, {link.fraction:.0%}).",
                    code="loading",
                    retry_after_s=1,
                )
        states = (
            ", ".join(f"worker {link.worker} is {link.state}" for link in links) or "no worker yet"
        )
        return ApiError(503, f"No worker serves: {states}.", code="no_worker", retry_after_s=1)
