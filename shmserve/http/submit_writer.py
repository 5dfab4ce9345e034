"""The writing end of one channel's submit ring: SUBMITs under the operator's policy, control records that are never lost.

Owns: the ring's writer with what waits for credits, and the line of requests that wait for room. Never: answers a client, chooses a worker, or
outlives its channel: a new life of the worker gets a new one.

    block      a SUBMIT without room waits in line, first come first served, until a deadline; then it is refused
    drop       it is refused at once
    coalesce   it waits in the writer's backlog: the front end's table bounds how many, and an abort before it is written undoes it

A control record waits in the backlog whatever the policy says, one per request. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from shmserve.config import RingConfig
from shmserve.http.errors import worker_died
from shmserve.http.in_flight import InFlight, Signal
from shmserve.rings.channel import Ring
from shmserve.rings.policy import Dropping
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.submit_slots import SubmitKind, pack_control


class SubmitWriter:
    """`on_written` is told of a request whose SUBMIT had waited in the backlog, `on_broken` of counters that cannot be."""

    def __init__(
        self,
        ring: Ring,
        rings: RingConfig,
        on_written: Callable[[InFlight], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._credits_fd = ring.credits.fd
        self._policy = rings.submit_policy
        self._deadline_s = rings.submit_deadline_s
        self._on_written = on_written
        self._on_broken = on_broken
        # It keeps what must not be lost; whether a SUBMIT waits or is refused is decided in `submit`.
        self._writer = Dropping(ring.producer())
        self._line: deque[Signal] = deque()
        # Whose SUBMIT waits in the backlog (coalesce), which they leave in this order.
        self._kept: OrderedDict[int, InFlight] = OrderedDict()
        self._is_watching = False
        self._is_closed = False

    @property
    def is_starved(self) -> bool:
        """True while its backlog waits for credits."""
        return self._writer.is_starved

    def close(self) -> None:
        """The channel ends: nothing is written any more, and who waits in line finds that out."""
        self._watch_credits(False)
        self._is_closed = True
        for turn in self._line:
            turn.set()
        self._line.clear()

    async def submit(self, entry: InFlight, record: bytes, num_slots: int) -> bool:
        """Write a SUBMIT, or take care that it will be; False if the policy refuses it.

        Raises RingProtocolError, and while it waits in line the entry's own error or that of the worker's end (ApiError); nothing is
        written then.
        """
        if not self._line and self._writer.try_unit(record, num_slots):
            entry.is_submitted = True
            return True
        if self._policy == "coalesce":
            self._writer.keep(entry.req_id, record)
            if self._waits(entry):
                self._kept[entry.req_id] = entry
            else:
                entry.is_submitted = True
            self._watch_credits(True)
            return True
        if self._policy == "block" and await self._wait_for_room(entry, record, num_slots):
            entry.is_submitted = True
            return True
        self._writer.refuse()
        return False

    async def _wait_for_room(self, entry: InFlight, record: bytes, num_slots: int) -> bool:
        """Wait in line until the record is written, or the deadline is over."""
        deadline = time.monotonic() + self._deadline_s
        turn = Signal()
        self._line.append(turn)
        self._watch_credits(True)
        try:
            while True:
                if entry.error is not None:  # withdrawn
                    raise entry.error
                if self._line[0] is turn and self._writer.try_unit(record, num_slots):
                    return True
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                await turn.wait(left)
                if self._is_closed:
                    raise worker_died("it is restarting")
        finally:
            turn.close()
            if not self._is_closed:  # `close` has emptied the line
                self._line.remove(turn)
                self._wake_first()

    def control(self, req_id: int, kind: SubmitKind, digest: bytes = b"") -> None:
        """Write a control record, now or when credits come, in place of what this request has waiting."""
        if self._is_closed:
            return
        self._writer.cancel(req_id)
        try:
            self._writer.keep(
                req_id,
                pack_control(kind, req_id, time_ns=time.monotonic_ns(), digest=digest),
            )
        except RingProtocolError as error:  # it ends the channel, not whoever aborts here
            self._on_broken(str(error))
            return
        self._note_written()  # the credits that came may have been enough for others too
        self._watch_credits(self._writer.is_starved or bool(self._line))

    def withdraw(self, entry: InFlight) -> bool:
        """Take back a SUBMIT that is not in the ring yet; True if it will not be."""
        if entry.is_submitted:
            return False
        if self._policy == "coalesce":
            self._kept.pop(entry.req_id, None)
            entry.is_submitted = not self._writer.cancel(entry.req_id)
            return not entry.is_submitted
        for turn in self._line:  # one of them is its own, and finds its error
            turn.set()
        return True

    def _watch_credits(self, wanted: bool) -> None:
        if wanted == self._is_watching or self._is_closed:
            return
        loop = asyncio.get_running_loop()
        if wanted:
            loop.add_reader(self._credits_fd, self.take_credits)
        else:
            loop.remove_reader(self._credits_fd)
        self._is_watching = wanted

    def take_credits(self) -> None:
        """The event loop calls it when the worker has given slots back: whoever waits longest is written."""
        try:
            self._writer.producer.free(self._writer.producer.capacity)
            self._writer.flush()
        except RingProtocolError as error:
            self._watch_credits(False)
            self._on_broken(str(error))
            return
        self._note_written()
        self._wake_first()
        self._watch_credits(self._writer.is_starved or bool(self._line))

    def _note_written(self) -> None:
        """Tell of the SUBMITs that have left the backlog."""
        while self._kept and not self._waits(next(iter(self._kept.values()))):
            _, entry = self._kept.popitem(last=False)
            entry.is_submitted = True
            self._on_written(entry)

    def _waits(self, entry: InFlight) -> bool:
        return self._writer.pending_of(entry.req_id) > 0

    def _wake_first(self) -> None:
        if self._line:
            self._line[0].set()
