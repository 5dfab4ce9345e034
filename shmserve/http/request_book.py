"""Every request from its arrival to its last word, for those who want to hear of it: the log (`request_log.py`), traces (`tracing.py`).

Owns: a record for each request that is not a GET, and the list of those that have ended and are not yet told of. Never: costs a token
anything, or keeps text. Where nobody wants to hear, there is no book.

    begin -> (entered: each of its completions) -> ended -> settled, told

Told from the heartbeat on, a few at a time, when the last FINISH has come: an aborted request's tokens are known a moment after its client
has left. A few, because a line costs 45 us, and 256 streams that end together would hold up the tokens of others for 12 ms. At most
MOST_WAITING wait. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from aiohttp import web

from shmserve.http.deadlines import ARRIVAL
from shmserve.http.endings import ending_of
from shmserve.http.hop_times import HopTimes
from shmserve.http.interval_log import IntervalLog
from shmserve.request import SamplingParams

if TYPE_CHECKING:
    from shmserve.http.in_flight import InFlight

MOST_WAITING: Final = 4_096
"""Requests that have ended and are not told of; one more, and all are told of at once."""
FEWEST_AT_ONCE: Final = 8
PAUSE_S: Final = 0.005
"""So many are told of, or a 64th of those that wait, and after so long the next: the more wait, the faster it goes."""
PATIENCE_NS: Final = 1_000_000_000
"""How long the last FINISH of a request that has ended is waited for."""
UNLOGGED: Final = frozenset(("GET", "HEAD", "OPTIONS"))
STATUS_GONE: Final = 499
"""Of a request whose client left before it was answered; the word is nginx's."""


class RequestRecord:
    """One request. `entries` are its completions, `route` the path that it was found by."""

    __slots__ = (
        "arrival_ns",
        "client",
        "ended_ns",
        "entries",
        "error_code",
        "external_id",
        "first_written_ns",
        "intervals_ms",
        "is_stream",
        "method",
        "num_prompt_tokens",
        "params",
        "parsed_ns",
        "route",
        "row",
        "status",
        "tokenised_ns",
        "trace_headers",
    )

    def __init__(self, request: web.Request, row: int) -> None:
        resource = request.match_info.route.resource
        headers = request.headers
        self.method = request.method
        self.route = request.path[:80] if resource is None else resource.canonical
        self.client = request.remote or "unix"
        self.arrival_ns: int = request[ARRIVAL]
        self.external_id = ""
        self.trace_headers = (headers.get("traceparent", ""), headers.get("tracestate", ""))
        self.row = row
        self.entries: Sequence[InFlight] = ()
        self.params: SamplingParams | None = None
        self.num_prompt_tokens = 0
        self.parsed_ns = 0
        self.tokenised_ns = 0
        self.first_written_ns = 0
        self.ended_ns = 0
        self.status = 0
        self.is_stream = False
        self.error_code = ""
        self.intervals_ms: tuple[float, ...] | None = None  # p50, p99

    @property
    def is_settled(self) -> bool:
        """No record of it will come any more."""
        return all(entry.finish is not None or entry.error is not None for entry in self.entries)

    @property
    def finish(self) -> str:
        """How its completions ended: boards.ENDINGS, each once."""
        return ",".join(dict.fromkeys(filter(None, map(ending_of, self.entries))))

    @property
    def completion_tokens(self) -> int:
        return sum(entry.finish.completion_tokens for entry in self.entries if entry.finish)

    @property
    def cached_tokens(self) -> int:
        return sum(entry.finish.cached_tokens for entry in self.entries if entry.finish)

    def first(self, stamp: str) -> int:
        """The earliest of a stamp (ns) of the workers' records; 0 if there is none."""
        found = [getattr(entry.finish or entry.started, stamp, 0) for entry in self.entries]
        return min((at for at in found if at), default=0)

    @property
    def first_token_ns(self) -> int:
        """When its client had a token, or could have had one: a stream's first frame, or what came first of a plain answer."""
        if self.first_written_ns or self.is_stream:
            return self.first_written_ns
        popped = [entry.first_popped_ns for entry in self.entries if entry.first_popped_ns]
        return min(popped, default=0)

    @property
    def engine_interval_ns(self) -> int:
        """The mean time between two tokens, as the worker made them; 0 if there were not two."""
        span = count = 0
        for entry in self.entries:
            finish = entry.finish
            if finish is not None and finish.first_token_ns and finish.completion_tokens > 1:
                span += max(0, finish.time_ns - finish.first_token_ns)
                count += finish.completion_tokens - 1
        return span // count if count else 0


RECORD: Final[web.RequestKey[RequestRecord]] = web.RequestKey("record", RequestRecord)


class RequestBook:
    """`tells` hear of each request once, when it has ended, a few at a time. `times` is the front end's, which knows the intervals."""

    def __init__(
        self,
        times: HopTimes,
        num_places: int,
        tells: Sequence[Callable[[Sequence[RequestRecord]], None]],
    ) -> None:
        self._times = times
        self._tells = tells
        self._intervals = times.intervals = IntervalLog(num_places)
        self._waiting: list[RequestRecord] = []
        self._next: asyncio.TimerHandle | None = None

    def begin(self, request: web.Request) -> RequestRecord | None:
        """A request has come; None if it is one that nobody hears of."""
        if request.method in UNLOGGED:
            return None
        record = request[RECORD] = RequestRecord(request, 0)
        return record

    def entered(self, record: RequestRecord, entry: InFlight, place: int) -> None:
        """One of its completions has a place in the table."""
        if not record.row:
            record.row = self._intervals.take_row()
        entry.log_row = record.row
        self._intervals.row_of_place[place] = record.row

    def ended(self, record: RequestRecord, answer: web.StreamResponse | None) -> None:
        """It has been answered, or its client has gone (no answer)."""
        record.ended_ns = time.monotonic_ns()
        record.status = record.status or (STATUS_GONE if answer is None else answer.status)
        record.is_stream = answer is not None and not isinstance(answer, web.Response)
        record.is_stream |= record.first_written_ns > 0
        if answer is not None:
            record.external_id = answer.headers.get("X-Request-Id", "")
        for entry in record.entries:  # of a stream that had begun; an abort is no error
            if not record.error_code and entry.error is not None and not entry.is_aborted:
                record.error_code = entry.error.code or entry.error.type
        self._waiting.append(record)
        if len(self._waiting) >= MOST_WAITING:
            self.settle(is_last=True)

    def settle(self, is_last: bool = False) -> None:
        """Tell of those whose last record has come, or did not come in time; of all now, if nobody will ask again."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._waiting:
            self._times.fold()
            self._tell(time.monotonic_ns(), is_last)

    def _tell(self, folded_ns: int, is_last: bool = False) -> None:
        """Tell of a few, or of all; the times of those that ended by `folded_ns` are in their rows."""
        too_old = folded_ns - PATIENCE_NS
        left = len(self._waiting)
        if not is_last:
            left = max(FEWEST_AT_ONCE, left // 64)
        still: list[RequestRecord] = []
        ready: list[RequestRecord] = []
        for at, record in enumerate(self._waiting):
            if record.ended_ns > folded_ns:  # the next heartbeat's
                still += self._waiting[at:]
                break
            if not left:
                still += self._waiting[at:]
                loop = asyncio.get_running_loop()
                self._next = loop.call_later(PAUSE_S, self._tell, folded_ns)
                break
            if not (record.is_settled or is_last or record.ended_ns < too_old):
                still.append(record)
                continue
            left -= 1
            record.intervals_ms = self._intervals.quantiles_ms(record.row, (0.5, 0.99))
            ready.append(record)
        self._waiting = still
        if ready:
            for tell in self._tells:
                tell(ready)
            for record in ready:
                self._forget(record)

    def _forget(self, record: RequestRecord) -> None:
        rows = self._intervals.row_of_place
        for entry in record.entries:
            place = entry.place
            if rows[place] == record.row:  # else it is another's already
                rows[place] = 0
            entry.log_row = 0
        self._intervals.give_back(record.row)
