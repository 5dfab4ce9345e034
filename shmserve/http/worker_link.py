"""One worker as a front end sees it: its state, and the channel to it while there is one.

Owns: the channel, with the pump of its token ring and the writer of its submit ring: both live exactly as long as it does. Never: chooses among
workers, or gives a place of the table away: entries are the client's, and come and go by its word. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from shmserve.http.errors import ApiError, worker_died
from shmserve.http.pump import Pump
from shmserve.http.submit_writer import SubmitWriter
from shmserve.rings.spsc import RingProtocolError

if TYPE_CHECKING:
    from shmserve.http.client import WorkerClient
    from shmserve.http.in_flight import InFlight
    from shmserve.rings.channel import Channel
    from shmserve.wire.submit_slots import SubmitKind

log = logging.getLogger(__name__)


class WorkerLink:
    """`in_flight` is the part of the client's table that this worker has."""

    def __init__(self, worker: int, client: WorkerClient) -> None:
        self.worker = worker
        self.state = "loading"
        self.phase = ""
        self.fraction = 0.0
        self.info: dict[str, Any] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.channel: Channel | None = None
        self.pump: Pump | None = None
        self.writer: SubmitWriter | None = None
        self._client = client
        self._is_broken = False

    @property
    def is_serving(self) -> bool:
        return self.channel is not None and self.state == "ready"

    @property
    def is_behind(self) -> bool:
        return self.pump is not None and self.pump.is_behind

    def open(self, channel: Channel) -> None:
        """A new life of the worker: its rings are empty."""
        client = self._client
        self.channel = channel
        self._is_broken = False
        self.writer = SubmitWriter(channel.submit, client.rings, client.was_written, self.break_off)
        self.pump = Pump(
            channel.tokens,
            self.in_flight,
            client.table,
            client.board,
            client.times,
            client.forget,
            self.break_off,
            client.vocab_size,
            client.step_sender,
        )

    def close(self, reason: str) -> None:
        """The worker is gone: what it had announced is handled, then whatever is left gets its error end."""
        if self.channel is None or self.pump is None or self.writer is None:
            return
        self.writer.close()
        self.pump.close()
        for entry in list(self.in_flight.values()):
            entry.fail(worker_died(reason))
            self._client.forget(entry)
        self._client.router.forget(self.worker)
        self.writer = None
        self.pump = None
        self.channel.close()
        self.channel = None

    def break_off(self, reason: str) -> None:
        """The worker's end of a ring cannot be believed any more: the channel ends here, and the worker is started anew."""
        if self.channel is None or self._is_broken:
            return
        self._is_broken = True
        log.error("worker %d: %s", self.worker, reason)
        self.state = "dead"
        self._client.on_broken(self.worker, self.channel.epoch, reason)
        asyncio.get_running_loop().call_soon(self._close_broken, self.channel, reason)

    def _close_broken(self, channel: Channel, reason: str) -> None:
        if self.channel is channel:  # else it was replaced in the same turn
            self.close(reason)

    def fold_times(self) -> None:
        if self.pump is not None:
            self._client.times.fold()

    async def submit(self, entry: InFlight, record: bytes, num_slots: int) -> None:
        """Write a SUBMIT under the submit ring's policy. Raises ApiError (413, 503) with nothing written."""
        channel, writer = self.channel, self.writer
        if channel is None or writer is None:
            raise worker_died("it is restarting")
        if num_slots > channel.submit.capacity // 2:
            size = channel.submit.slot_size
            raise ApiError(
                413,
                f"The request takes {num_slots * size} bytes of the submit ring, at most "
                f"{channel.submit.capacity // 2 * size} are allowed (--submit-ring-slots).",
                code="request_too_large",
            )
        try:
            is_taken = await writer.submit(entry, record, num_slots)
        except RingProtocolError as error:
            self.break_off(str(error))
            raise worker_died(str(error)) from None
        if not is_taken:
            self._client.note_refusal("submit_ring")
            raise ApiError(
                503,
                "The worker does not take requests fast enough: its submit ring is full.",
                type="overloaded_error",
                code="submit_ring_full",
                retry_after_s=1,
            )

    def control(self, req_id: int, kind: SubmitKind, digest: bytes = b"") -> None:
        """Send a control record (an ABORT, a PAUSE ...); to a worker that is gone, nothing."""
        if self.writer is not None:
            self.writer.control(req_id, kind, digest)

    def withdraw(self, entry: InFlight) -> bool:
        """Take back a SUBMIT that still waits outside the ring; True if it was."""
        return self.writer is not None and self.writer.withdraw(entry)

    def started(self, entry: InFlight) -> None:
        """Its STARTED came."""
        self._client.on_started(entry)

    def abort(self, entry: InFlight) -> None:
        """End an entry whose client is gone, or whose output could not be used."""
        self._client.abort(entry)
