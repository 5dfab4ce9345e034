"""The worker's way in: the records of one channel's submit ring, as calls on the engine.

Owns: the submit ring's reading end. Never: waits, or decides anything about a request. A record that cannot be is counted; if
it is a SUBMIT it is refused, since every SUBMIT is answered, and nothing else is. It never ends the worker; counters that
cannot be end the channel (RingProtocolError).
"""

from __future__ import annotations

import logging
from typing import Protocol

from shmserve.rings.channel import Channel
from shmserve.wire.errors import WireError
from shmserve.wire.submit import Submit, unpack_submit
from shmserve.wire.submit_slots import SubmitKind, control_digest, submit_head

log = logging.getLogger(__name__)

MOST_GLANCES = 16


class Sink(Protocol):
    """What the records ask for. `http` is the index of the front end that wrote them."""

    def submit(self, request: Submit, http: int) -> None: ...
    def refuse(self, req_id: int, http: int, reason: str) -> None: ...
    def abort(self, req_id: int) -> None: ...
    def evict(self, req_id: int) -> None: ...
    def abort_by_digest(self, req_id: int, http: int, digest: bytes) -> None: ...
    def set_paused(self, req_id: int, is_paused: bool) -> None: ...
    def flush_cache(self, req_id: int, http: int) -> None: ...
    def note_bad(self) -> None: ...


class Inbox:
    """One channel's submit ring, from the worker's side. Takes the consumer's role. Main thread only."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.num_bad = 0
        self._num_glances = 0
        self._consumer = channel.submit.consumer()

    @property
    def data_fd(self) -> int:
        return self.channel.submit.data.fd

    def glance(self, sink: Sink) -> int:
        """`drain`, without its system call as long as the front end's cursor says that there is nothing: for every step.

        The counter is read every MOST_GLANCES times all the same, so a peer whose cursor stands still is found out.
        """
        if self._num_glances < MOST_GLANCES and self._consumer.seems_empty():
            self._num_glances += 1
            return 0
        return self.drain(sink)

    def drain(self, sink: Sink) -> int:
        """Hand every announced record to `sink`; the number of slots handled."""
        self._num_glances = 0
        consumer = self._consumer
        owed = handled = consumer.poll()
        while owed:
            req_id = kind = 0
            count = 1
            try:
                req_id, kind, count = submit_head(consumer.peek(0))
                # A unit goes into one publish: all its slots are here, or it is broken.
                if not 1 <= count <= owed:
                    count = 1
                    raise WireError(f"SUBMIT {req_id:016x} is not whole")
                self._hand_over(sink, req_id, kind, [consumer.peek(i) for i in range(count)])
            except WireError as error:
                self._bad(sink, req_id, kind, error)
            consumer.release(count)
            owed -= count
        return handled

    def _hand_over(self, sink: Sink, req_id: int, kind: int, slots: list[memoryview]) -> None:
        http = self.channel.http
        if kind == SubmitKind.SUBMIT:
            sink.submit(unpack_submit(slots), http)
        elif kind == SubmitKind.ABORT:
            sink.abort(req_id)
        elif kind == SubmitKind.EVICT:
            sink.evict(req_id)
        elif kind == SubmitKind.ABORT_BY_ID:
            sink.abort_by_digest(req_id, http, control_digest(slots[0]))
        elif kind in (SubmitKind.PAUSE, SubmitKind.RESUME):
            sink.set_paused(req_id, kind == SubmitKind.PAUSE)
        elif kind == SubmitKind.FLUSH_CACHE:
            sink.flush_cache(req_id, http)
        else:
            raise WireError(f"a stray record of kind {kind}")

    def _bad(self, sink: Sink, req_id: int, kind: int, error: WireError) -> None:
        self.num_bad += 1
        sink.note_bad()
        # Its text alone: who keeps the error keeps views of the slots, and the channel could not be closed.
        reason = str(error)
        log.warning("bad submit record from front end %d: %s", self.channel.http, reason)
        if kind == SubmitKind.SUBMIT:
            reason = f"the worker could not read the request: {reason}"
            sink.refuse(req_id, self.channel.http, reason)
