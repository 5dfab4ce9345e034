"""The truth about this instance, from shared memory, in microseconds: /live, /health, /ready.

/live is 200 while the event loop turns. /health and /ready are 200 only while new requests would be served; 503 with process,
phase and age while loading, from the first moment of a drain, and with no worker alive.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from shmserve.boards import label_of
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation_rate import GenerationRates
from shmserve.rings.board import BoardReader
from shmserve.rings.segment import SegmentError


class Boards:
    """The other processes' boards, read-only, by (role, index). Replaced when a process starts anew."""

    def __init__(self) -> None:
        self.readers: dict[tuple[str, int], BoardReader] = {}
        self.rates = GenerationRates()

    def attach(self, role: str, index: int, name: str) -> None:
        old = self.readers.pop((role, index), None)
        if old is not None:
            old.close()
        if not name:  # its process has died, and another is not there yet
            return
        try:
            self.readers[(role, index)] = BoardReader.attach(name)
        except SegmentError:
            return  # its process ended since it was announced: the next one brings a board of its own

    def phase_of(self, role: str, index: int) -> tuple[str, float]:
        """(what it is doing, for how many seconds); ("unknown", 0) if it has no board."""
        reader = self.readers.get((role, index))
        if reader is None:
            return "unknown", 0.0
        since = reader["phase_since_ns"]
        age_s = (time.monotonic_ns() - since) / 1e9 if since else 0.0
        return label_of(reader["phase"]), age_s


def live() -> web.Response:
    return web.Response(text="")


def health(front: FrontEnd, boards: Boards) -> web.Response:
    """200 with an empty body, or 503 that says why."""
    if front.client.serving() is not None and not front.admission.is_draining:
        return web.Response(text="")
    workers: list[dict[str, Any]] = []
    for link in front.client.links.values():
        phase, age_s = boards.phase_of("worker", link.worker)
        workers.append(
            {
                "worker": link.worker,
                "state": link.state,
                "phase": link.phase or phase,
                "fraction": round(link.fraction, 3),
                "phase_age_s": round(age_s, 3),
            }
        )
    status = "draining" if front.admission.is_draining else "unavailable"
    body = {"status": status, "workers": workers}
    return web.Response(
        body=msgspec.json.encode(body),
        status=503,
        content_type="application/json",
        headers={"Retry-After": str(front.admission.retry_after_s())},
    )
