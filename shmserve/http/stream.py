"""One SSE response: frames, congestion, keep-alive, end.

Owns: the response's transport from its headers to its last chunk, and the choice of who writes a token: the pump, directly, while the
stream is plain and keeps up; this module otherwise. Never: decides when a completion ends, or builds JSON (formats do).

What happens from the write that a client does not take whole until it has read is `congestion.py`'s. The kernel would hide a slow
client behind megabytes of its own buffers: `backlog.py` bounds them. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from aiohttp import web
from aiohttp.http import HttpVersion11, StreamWriter

from shmserve.http.backlog import NOTSENT_LOWAT_BYTES
from shmserve.http.choice import Choice, ResponseFormat
from shmserve.http.congestion import Congestion
from shmserve.http.deadlines import failure_of
from shmserve.http.direct import direct_path
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.logprob_send import LogprobPath
from shmserve.http.made_send import MadePath
from shmserve.http.request_book import RECORD
from shmserve.http.slow_client import SlowClientRules
from shmserve.http.ways import NO_MARKS, Made, Unmarked, Way

if TYPE_CHECKING:
    from shmserve.http.direct import Direct
    from shmserve.http.front_end import FrontEnd

log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
TAIL_BYTES: Final = NOTSENT_LOWAT_BYTES
"""Last events that the kernel takes at once from a client that keeps up: they go in one send with the end of the body."""
RECHECK_S: Final = 1.0
"""How often a stream that has no token yet looks whether it has been started."""


class SseResponse(web.StreamResponse):
    """One whose headers go with what is written first: a send less. (aiohttp's own name; one that knows it not sends two.)"""

    _send_headers_immediately = False


class SseStream:
    """Runs one streamed response. `choices` share one connection and one signal."""

    def __init__(
        self,
        request: web.Request,
        front: FrontEnd,
        rules: SlowClientRules,
        signal: Signal,
        choices: Sequence[Choice],
        fmt: ResponseFormat,
        headers: dict[str, str],
    ) -> None:
        self._request = request
        self._client = front.client
        self._config = front.config.http
        self._turnstile = front.turnstile
        self._slow_clients = front.slow_clients
        self._rules = rules
        self._signal = signal
        self._choices = choices
        self._format = fmt
        self._times = front.client.times
        self._has_written = False  # a token: from then on the pump may write
        self._is_chunked = request.version >= HttpVersion11
        self.response = SseResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        if not self._is_chunked:
            self.response.force_close()

    async def run(self) -> web.StreamResponse:
        """Wait for the first token, answer 200, stream to the end. Raises ApiError before the 200 only."""
        await self._first_word()
        await self._turnstile.turn(has_tokens=True)
        writer = await self.response.prepare(self._request)
        transport = self._request.transport
        if writer is None or transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        assert isinstance(writer, StreamWriter)
        self._transport = transport
        # asyncio's write costs 0.5 us more than the send in it. The pump sends on a descriptor of its own: while we hold it, its
        # number cannot become another connection's.
        self._socket = transport.get_extra_info("socket").dup()
        is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._send = self._send_encrypted if is_encrypted else self._socket.send
        # Two choices of one connection must not go together: the first may be cut short.
        self._is_lone = len(self._choices) == 1 and not is_encrypted
        # drain() then waits until nothing is buffered. asyncio's TLS calls a buffer full that is as large as the limit: at 0 an empty one.
        transport.set_write_buffer_limits(high=1 if is_encrypted else 0)
        self._congestion = Congestion(
            self._slow_clients, self._client, self._rules, transport, writer.drain, self._choices
        )
        self._by_entry = {id(choice.entry): choice for choice in self._choices}
        try:
            tail = await self._body(writer)
        finally:
            self._congestion.end()
            for choice in self._choices:
                choice.entry.direct = None
                choice.way = choice.direct = (
                    None  # it leads back here: all of the request would wait for the garbage collector
                )
            self._socket.close()
        # Looked at once it is written: who does not read the end is not waited for without a bound.
        asyncio.get_running_loop().call_soon(
            self._slow_clients.watch_answer, transport, self._rules, self._congestion.name
        )
        await self.response.write_eof(tail)  # one send with the end of the last choice
        return self.response

    async def _body(self, writer: StreamWriter) -> bytes:
        """Write all but the tail, and return that. A status is no longer possible: whatever fails here is an event."""
        try:
            opening = b"".join(choice.format.opening() for choice in self._choices)
            opening += self._advance_all()
            # The headers go with it. Not drained: what it does not take is congestion, which has its bounds.
            await writer.write(opening or KEEP_ALIVE, drain=False)
            self._count_frames(opening)
            self._note_all_written()
            for choice in self._choices:  # the interval to a choice's first token counts from here
                choice.entry.last_written_ns = time.monotonic_ns()
            rest = await self._stream()
            return rest + self._format.ending([choice.entry for choice in self._choices])
        except ApiError as raised:
            error = raised
        except ConnectionError:
            raise
        except Exception:
            log.exception("request %016x: its stream failed", self._choices[0].entry.req_id)
            error = ApiError(500, "The server could not go on.", code="internal_error")
        return self._format.failing(error)

    async def _first_word(self) -> None:
        """Return when there is something to send: a token, an end, or a started request that takes long."""
        while True:
            entries = [choice.entry for choice in self._choices]
            failure = failure_of(entries)
            if failure is not None:
                raise failure
            if any(
                entry.token_ids or (entry.is_over and entry.expiry is None) for entry in entries
            ):
                return
            # STARTED wakes nobody: 40 us a request, for a wait that hardly ever lasts long enough.
            wait_s = min(RECHECK_S, self._config.headers_after_s)
            started = [entry.started.admitted_ns for entry in entries if entry.started is not None]
            if started:
                left_s = min(started) / 1e9 + self._config.headers_after_s - time.monotonic()
                if left_s <= 0:
                    return
                wait_s = min(wait_s, left_s)
            await self._signal.wait(wait_s)

    async def _stream(self) -> bytes:
        """Move tokens until every choice has ended; the last events, not yet written. Raises the ApiError that ended it early."""
        for choice in self._choices:
            choice.entry.on_tokens = self._on_tokens
        if self._transport.get_write_buffer_size():
            self._congestion.begin()
        while True:
            if self._congestion.is_on:
                await self._congestion.relieve()
            events = self._advance_all()
            is_over = not any(choice.is_open for choice in self._choices)
            if is_over and len(events) <= TAIL_BYTES:
                self._count_frames(events)
                self._note_all_written()
                return events
            self._write(events)  # what came before an error is sent before it
            self._note_all_written()
            for choice in self._choices:
                if choice.is_open and choice.entry.error is not None:
                    raise choice.entry.error
            if self._congestion.is_on:
                continue
            if is_over:
                return b""
            still_open = [choice for choice in self._choices if choice.is_open]
            for choice in still_open:
                self._go_direct(choice)
            if not await self._signal.wait(self._config.keep_alive_s):
                newest = max(choice.entry.last_written_ns for choice in still_open) / 1e9
                if time.monotonic() - newest >= self._config.keep_alive_s:
                    self._write(KEEP_ALIVE)
            else:
                await self._turnstile.turn(has_tokens=True)

    def _advance_all(self) -> bytes:
        return b"".join(self._advance(choice) for choice in self._choices if choice.is_open)

    def _advance(self, choice: Choice) -> bytes:
        """Events for what has come, the choice's end included."""
        frames = [choice.waiting_frame()]
        frames += [choice.format.delta(text, ids) for text, ids in choice.take()]
        whole = b"".join(frames)
        entry = choice.entry
        if entry.finish is not None and entry.error is None:
            if entry.timing is None or not whole:
                whole += choice.closing()
            else:  # its end tells when these were written
                self._signal.set()
        choice.has_events = bool(whole)
        return whole

    def _note_written(self, choice: Choice) -> None:
        """A frame of this choice is on its way: its first token ends an interval, the others came with it."""
        now, entry = time.monotonic_ns(), choice.entry
        if choice.num_unwritten:
            self._times.note_frame(entry, choice.framed_ns, now, choice.num_unwritten)
            if choice.held_ns:
                num_others = choice.num_unwritten - 1
                self._times.note_held(choice.held_ns, choice.framed_ns, now, num_others)
                choice.held_ns = 0
            if not self._has_written:
                self._has_written = True
                ttft_us = (now - entry.arrival_ns) // 1000
                self._client.board.histograms["ttft_us"].observe_one(ttft_us)
                record = self._request.get(RECORD)
                if record is not None:
                    record.first_written_ns = now
        if entry.timing is not None:
            entry.timing.written(now)
        choice.num_unwritten = 0
        entry.last_written_ns = now

    def _note_all_written(self) -> None:
        for choice in self._choices:
            if choice.has_events:
                choice.has_events = False
                self._note_written(choice)

    def _on_tokens(self, entry: InFlight) -> None:
        """The pump has tokens that it could not write itself: one event for one record, or into what waits."""
        if self._transport.is_closing():
            self._client.abort(
                entry
            )  # a half-closed client is gone, though its handler is never cancelled
            return
        choice = self._by_entry[id(entry)]
        text, ids = choice.take_joined()
        if self._congestion.is_on:
            self._congestion.hold(choice, text, ids)
            return
        frame = choice.format.delta(text, ids)
        if frame:
            self._write(frame)
            self._note_written(choice)
        if not self._congestion.is_on:
            self._go_direct(choice)

    def _go_direct(self, choice: Choice) -> None:
        """Let the pump write this choice's plain tokens by itself."""
        entry = choice.entry
        if not self._has_written or entry.is_over or entry.is_aborted:
            return
        way = choice.format.way
        if way is None or not choice.text.is_plain:
            entry.direct = None  # what is held goes out before the next token's text
            return
        if choice.direct is None or way != choice.way:
            choice.text.pass_by()
            choice.way, choice.direct = way, self._path_for(choice, way)
        entry.direct = choice.direct

    def _path_for(self, choice: Choice, way: Way) -> Direct | LogprobPath | MadePath | None:
        marks, out = NO_MARKS, (self._is_chunked, self._send, self._spill)
        if isinstance(way, Unmarked):
            marks, way = way.marks, way.around
        elif isinstance(way, Made):
            pieces = choice.text.plain_pieces(way.marks)
            return MadePath(choice, way.frame, pieces, *out, self._note_written)
        pieces = choice.text.plain_pieces(marks)
        if not isinstance(way, tuple):
            return LogprobPath(way, pieces, *out)
        longest, fd = choice.pieces.longest, self._descriptor_for(choice)
        return direct_path(*way, self._is_chunked, pieces, longest, self._send, self._spill, fd)

    def _descriptor_for(self, choice: Choice) -> int:
        """What its frames may be sent on together with those of other connections; -1 if they may not."""
        sender = self._client.step_sender
        can = self._is_lone and sender is not None and sender.takes(choice.pieces.common)
        return self._socket.fileno() if can else -1

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._count_frames(data)
        if self._transport.get_write_buffer_size():
            self._congestion.begin()

    def _count_frames(self, data: bytes) -> None:
        if data is not KEEP_ALIVE:
            self._client.board.add("frames", data.count(b"\n\n"))

    def _send_encrypted(self, frame: bytes) -> int:
        """A frame of the pump's on a TLS connection: it must go through the transport."""
        if self._transport.is_closing():  # asyncio's may then have nothing left to write to
            raise ConnectionResetError("the client has gone")
        self._transport.write(frame)
        if self._transport.get_write_buffer_size():
            self._congestion.begin()
        return len(frame)

    def _spill(self, frame: bytes, sent: int) -> None:
        """The pump could not send a frame whole: the rest is the transport's, and what follows must wait behind it."""
        if sent < 0:
            # The end of the connection, which cancels the handler: nothing may follow a frame that is lost, whatever was in its way.
            log.debug("request %016x: its connection is broken", self._choices[0].entry.req_id)
            for choice in self._choices:
                choice.entry.direct = None
            self._transport.abort()
            return
        self._transport.write(frame[sent:])
        self._congestion.begin()
