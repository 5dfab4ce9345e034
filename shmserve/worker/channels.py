"""The worker's ends of the channels to all front ends, and which of them can still be believed.

Owns: an inbox and an emitter for each front end, from `open` to `close`, and the list of those whose counters or records cannot be. Never:
knows a sequence, or closes a channel by itself: the engine does, which has its sequences, at the step boundary. Worker's main
thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shmserve.config import RingConfig
from shmserve.rings.channel import Channel
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.finish import pack_finish
from shmserve.wire.tokens import TokenKind
from shmserve.worker.commit import Committed
from shmserve.worker.emitter import Emitter
from shmserve.worker.inbox import Inbox, Sink
from shmserve.worker.pauses import Pauses

log = logging.getLogger(__name__)

MOST_BAD_RECORDS = 16
"""From a front end of which so many records of one channel could not be read, nothing more is taken."""


def _tell_nobody(channel: Channel, fault: str) -> None:
    """Whoever runs the engine puts its own in place of this."""


class Channels:
    """By the index of the front end. `pauses` is told whose output waits outside a ring for too long, and when it does no more."""

    def __init__(self, rings: RingConfig, pauses: Pauses) -> None:
        self._rings = rings
        self._pauses = pauses
        self.inboxes: dict[int, Inbox] = {}
        self.emitters: dict[int, Emitter] = {}
        self.broken: set[int] = set()
        self.on_broken: Callable[[Channel, str], None] = _tell_nobody

    def open(self, channel: Channel, step: int) -> None:
        """Serve a front end. Raises SegmentError if somebody else holds the worker's ends."""
        self.inboxes[channel.http] = Inbox(channel)
        emitter = self.emitters[channel.http] = Emitter(channel, self._rings)
        emitter.keep(0, pack_finish(TokenKind.READY, 0, time_ns=time.monotonic_ns(), step=step))
        emitter.flush()

    def close(self, http: int) -> None:
        self.broken.discard(http)
        del self.inboxes[http]
        self.emitters.pop(http).close()

    def poll_fds(self) -> list[int]:
        """Data of every submit ring, credits of the token rings that are starved."""
        fds = [inbox.data_fd for inbox in self.inboxes.values()]
        return fds + [e.credit_fd for e in self.emitters.values() if e.is_starved]

    def drain(self, sink: Sink) -> None:
        """Hand on what the front ends have written."""
        for http, inbox in self.inboxes.items():
            if http in self.broken:
                continue
            try:
                inbox.glance(sink)
            except RingProtocolError as error:
                self._distrust(http, error)
            if inbox.num_bad >= MOST_BAD_RECORDS:
                self._distrust(http, f"{inbox.num_bad} of its records could not be read")

    def flush(self) -> None:
        """Write what waits for credits, and answers that no step will carry."""
        for http, emitter in self.emitters.items():
            try:
                emitter.flush()
            except RingProtocolError as error:
                self._distrust(http, error)
        self._pauses.relieve(lambda http: self.emitters[http].is_relieved())

    def publish(self, committed: Committed, end_dropped: Callable[[int], bytes]) -> None:
        """Write a step. `end_dropped(req_id)` is as in `Emitter.publish`."""
        emitters = self.emitters
        for http, emitter in emitters.items():
            records = committed.records
            units = [(req_id, unit) for channel, req_id, unit in committed.units if channel == http]
            if len(emitters) > 1:
                records = records[committed.channels == http]
            try:
                emitter.publish(records, units, end_dropped)
            except RingProtocolError as error:
                self._distrust(http, error)
            for req_id in emitter.overloaded(self._pauses.can_backlog):
                self._pauses.backlog(req_id)

    def _distrust(self, http: int, fault: RingProtocolError | str) -> None:
        if http in self.broken:
            return
        log.error("the channel to front end %d cannot be believed any more: %s", http, str(fault))
        self.broken.add(http)
        self.on_broken(self.inboxes[http].channel, str(fault))
