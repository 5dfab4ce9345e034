"""One SSE response: frames, congestion, keep-alive, end.

Owns: the response's transport from its headers to its last chunk, and the choice of who writes a token: the pump, directly, while the
stream is plain and keeps up; this module otherwise. Never: decides when a completion ends, or builds JSON (formats do).

The second boundary, from a request to a slow client's socket, has the three policies of the first (`--slow-client`):

    coalesce   what cannot be written waits as text and becomes one frame per choice when the client reads on; past either
               bound (`--slow-client-bytes`, `--slow-client-seconds`) the connection is closed and its requests aborted
    block      and its sequences are paused in the scheduler meanwhile
    drop       the connection is closed at once

The kernel would hide a slow client behind megabytes of its own buffers: `listener.py` bounds them. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11

from shmserve.http.detokenizer import TextStream
from shmserve.http.direct import Direct, direct_path
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.listener import NOTSENT_LOWAT_BYTES, backlog_bytes

if TYPE_CHECKING:
    from shmserve.config import HttpConfig
    from shmserve.http.client import WorkerClient
    from shmserve.http.detokenizer import Pieces
    from shmserve.http.turnstile import Turnstile

log = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
TAIL_BYTES: Final = NOTSENT_LOWAT_BYTES
"""Last events that the kernel takes at once from a client that keeps up: they go in one send with the end of the body."""
RECHECK_S: Final = 1.0
"""How often a stream that has no token yet looks whether it has been started."""


class ChoiceFormat(Protocol):
    """How one choice looks on the wire: whole SSE events as bytes."""

    @property
    def around_text(self) -> tuple[bytes, bytes] | None:
        """What stands before and behind the JSON-escaped text of a delta, if that is all that changes; else None."""

    def opening(self) -> bytes:
        """Events before the first text."""

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        """The event for new tokens and the text they released (maybe none); b"" for no event."""

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        """The events that end the choice; `text` was held until now."""


class ResponseFormat(Protocol):
    """What stands around the choices."""

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        """Events after the last choice's end, [DONE] included."""

    def failing(self, error: ApiError) -> bytes:
        """Events that end a stream that could not go on."""


class Choice:
    """One completion of a streamed response."""

    def __init__(
        self, entry: InFlight, text: TextStream, pieces: Pieces, fmt: ChoiceFormat
    ) -> None:
        self.entry = entry
        self.text = text
        self.pieces = pieces
        self.format = fmt
        self.is_open = True
        self.direct: Direct | None = None  # made when the pump may first write
        self.waiting_text: list[str] = []  # for a congested client
        self.waiting_ids: list[int] = []

    def take(self) -> list[tuple[str, list[int]]]:
        """What has come since the last call, token by token: (text, [id])."""
        entry = self.entry
        ids, entry.token_ids = entry.token_ids, []
        taken = []
        last = len(ids) - 1
        for i, token_id in enumerate(ids):
            has_text = not (entry.was_stop_token and i == last)
            taken.append((self.text.feed(token_id) if has_text else "", [token_id]))
        return taken


class SseStream:
    """Runs one streamed response. `choices` share one connection and one signal."""

    def __init__(
        self,
        request: web.Request,
        client: WorkerClient,
        config: HttpConfig,
        turnstile: Turnstile,
        signal: Signal,
        choices: Sequence[Choice],
        fmt: ResponseFormat,
        headers: dict[str, str],
    ) -> None:
        self._request = request
        self._client = client
        self._config = config
        self._turnstile = turnstile
        self._signal = signal
        self._choices = choices
        self._format = fmt
        self._is_chunked = request.version >= HttpVersion11
        self._is_congested = False
        self._waiting_bytes = 0
        self.response = web.StreamResponse(
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
        self._transport = transport
        # asyncio's write costs 0.5 us more than the send in it. The pump sends on a descriptor of its own: while we hold it, its
        # number cannot become another connection's.
        self._socket = transport.get_extra_info("socket").dup()
        transport.set_write_buffer_limits(high=0)  # drain() then waits until nothing is buffered
        self._drain = writer.drain
        self._by_entry = {id(choice.entry): choice for choice in self._choices}
        try:
            tail = await self._body(writer)
        finally:
            self._note_waiting(0)
            for choice in self._choices:
                choice.entry.direct = None
            self._socket.close()
        try:
            async with asyncio.timeout(self._config.slow_client_seconds):
                await self.response.write_eof(tail)  # one send with the end of the last choice
        except TimeoutError:
            self._give_up("it has not read the end for --slow-client-seconds")
            raise ConnectionResetError("the client was too slow") from None
        return self.response

    async def _body(self, writer: AbstractStreamWriter) -> bytes:
        """Write all but the tail, and return that. A status is no longer possible: whatever fails here is an event."""
        try:
            opening = b"".join(choice.format.opening() for choice in self._choices)
            opening += self._advance_all()
            await writer.write(opening or KEEP_ALIVE)  # the headers go with it
            self._count_frames(opening)
            for choice in self._choices:  # the interval to a choice's first token counts from here
                choice.entry.last_written_ns = time.monotonic_ns()
            self._client.board.histograms["ttft_us"].observe_one(
                (time.monotonic_ns() - self._choices[0].entry.arrival_ns) // 1000
            )
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
            for entry in entries:
                if entry.error is not None:
                    raise entry.error
            if any(entry.token_ids or entry.is_over for entry in entries):
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
            self._congest()
        while True:
            events = self._advance_all()
            is_over = not any(choice.is_open for choice in self._choices)
            if is_over and not self._is_congested and len(events) <= TAIL_BYTES:
                self._count_frames(events)
                return events
            self._write(events)  # what came before an error is sent before it
            for choice in self._choices:
                if choice.is_open and choice.entry.error is not None:
                    raise choice.entry.error
            if self._is_congested:
                await self._relieve()
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
        frames = [self._waiting_frame(choice)]
        frames += [choice.format.delta(text, ids) for text, ids in choice.take()]
        entry = choice.entry
        if entry.finish is not None and entry.error is None:
            choice.is_open = False
            frames.append(
                choice.format.closing(choice.text.finish(entry.finish.keep_bytes), (), entry)
            )
        whole = b"".join(frames)
        if whole:
            entry.last_written_ns = time.monotonic_ns()
        return whole

    def _waiting_frame(self, choice: Choice) -> bytes:
        if not choice.waiting_ids:
            return b""
        text, ids = "".join(choice.waiting_text), choice.waiting_ids
        choice.waiting_text, choice.waiting_ids = [], []
        return choice.format.delta(text, ids)

    def _on_tokens(self, entry: InFlight) -> None:
        """The pump has tokens that it could not write itself: one event for one record, or into what waits."""
        if self._transport.is_closing():
            self._client.abort(
                entry
            )  # a half-closed client is gone, though its handler is never cancelled
            return
        choice = self._by_entry[id(entry)]
        taken = choice.take()
        text = "".join(part for part, _ in taken)
        ids = [token_id for _, part in taken for token_id in part]
        if self._is_congested:
            choice.waiting_text.append(text)
            choice.waiting_ids += ids
            self._note_waiting(self._waiting_bytes + len(text.encode()))
            if self._waiting_bytes > self._config.slow_client_bytes:
                self._give_up("more waits for it than --slow-client-bytes")
            return
        self._write(choice.format.delta(text, ids))
        entry.last_written_ns = time.monotonic_ns()
        if not self._is_congested:
            self._go_direct(choice)

    def _go_direct(self, choice: Choice) -> None:
        """Let the pump write this choice's plain tokens by itself."""
        entry, around = choice.entry, choice.format.around_text
        if around is None or entry.is_over or entry.is_aborted:
            return
        if not choice.text.is_plain:
            entry.direct = None  # what is held goes out before the next token's text
            return
        if choice.direct is None:
            choice.direct = direct_path(
                *around,
                self._is_chunked,
                choice.pieces.direct,
                choice.pieces.longest,
                self._socket.send,
                self._spill,
            )
        entry.direct = choice.direct

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._count_frames(data)
        if self._transport.get_write_buffer_size():
            self._congest()

    def _count_frames(self, data: bytes) -> None:
        if data is not KEEP_ALIVE:
            self._client.board.add("frames", data.count(b"\n\n"))

    def _congest(self) -> None:
        """The transport did not take everything: from here on tokens wait as text."""
        if self._is_congested:
            return
        self._is_congested = True
        for choice in self._choices:
            choice.entry.direct = None
        if self._config.slow_client == "drop":
            self._give_up("it does not keep up, and --slow-client is drop")
        self._signal.set()

    async def _relieve(self) -> None:
        """Wait until the client has read what was written, as long as it may take."""
        is_blocking = self._config.slow_client == "block"
        still_open = [choice.entry for choice in self._choices if choice.is_open]
        if is_blocking:
            for entry in still_open:
                self._client.set_paused(entry, True)
        await self._until_read()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._is_congested = False
        self._note_waiting(0)
        if is_blocking:
            for entry in still_open:
                self._client.set_paused(entry, False)

    async def _until_read(self) -> None:
        """Return when the transport's buffer is empty. Raises ConnectionError for a client that reads nothing for too long."""
        # One wait for all: aiohttp's drain, once cancelled by a timeout, raises CancelledError for ever after.
        drained = asyncio.ensure_future(self._drained())
        left = backlog_bytes(self._transport)
        try:
            while not drained.done():
                await asyncio.wait([drained], timeout=self._config.slow_client_seconds)
                before, left = left, backlog_bytes(self._transport)
                if not drained.done() and left >= before:  # slow is not stuck
                    self._give_up("it has read nothing for --slow-client-seconds")
                    raise ConnectionResetError("the client was too slow")
            lost = drained.result()
            if lost is not None:
                raise lost
        finally:
            drained.cancel()

    async def _drained(self) -> ConnectionError | None:
        """Wait until nothing is buffered; the error, if the connection was lost first (returned: its waiter may be gone)."""
        try:
            await self._drain()
        except ConnectionError as error:
            return error
        return None

    def _give_up(self, reason: str) -> None:
        """Close the connection of a client that is too slow. Its handler is cancelled by that, and aborts its requests."""
        log.warning(
            "request %016x: its client is too slow (%s): closed",
            self._choices[0].entry.req_id,
            reason,
        )
        self._client.board.add("num_slow_clients")
        for choice in self._choices:
            self._client.abort(choice.entry)
        self._transport.abort()

    def _spill(self, frame: bytes, sent: int) -> None:
        """The pump could not send a frame whole: the rest is the transport's, and what follows must wait behind it."""
        if sent >= 0:
            self._transport.write(frame[sent:])
        else:  # its reader will notice, and cancel the handler
            log.debug("request %016x: its connection is broken", self._choices[0].entry.req_id)
        self._congest()

    def _note_waiting(self, num_bytes: int) -> None:
        """`num_bytes` wait for this client now; the gauges are sums over all clients."""
        board = self._client.board
        board.add("mailbox_bytes", num_bytes - self._waiting_bytes)
        self._waiting_bytes = num_bytes
        if board["mailbox_bytes"] > board["mailbox_high_water_bytes"]:
            board["mailbox_high_water_bytes"] = board["mailbox_bytes"]
