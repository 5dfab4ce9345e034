"""One client's connection: how long a request may take to come, and what is no request.

Owns: the bounds on a request's head and body that aiohttp has not, and the answers to what is no HTTP. Never: decides who may ask, or
costs a request anything that comes whole and alone. Event loop's thread only.

    head     whole within --request-timeout of its first byte, or 408 and the end; at most MOST_* bytes, or 431
    body     whole within --request-timeout of the head, or 408 and the end
    idle     --idle-timeout between requests, and for the first
    pipeline a second request while one runs ends the connection behind the first: a stream may take minutes, and what waits behind
             it would have no admission, no deadline and no bound
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import (
    BadHttpMessage,
    ContentEncodingError,
    HttpProcessingError,
    LineTooLong,
)

from shmserve.config import HttpConfig
from shmserve.http.errors import ApiError
from shmserve.http.occupancy import Occupancy

log = logging.getLogger(__name__)

MOST_LINE_BYTES: Final = 8_190  # of the request line, and of one header
MOST_HEADERS: Final = 128
MOST_HEAD_BYTES: Final = 65_536  # of a head that comes in parts; memory_bounds.py counts on it
MOST_LINGERING_S: Final = 5.0
"""How long the rest of a refused body is read and thrown away: a connection closed before it would take the refusal with it."""

MOST_LOGGED_BYTES: Final = 4_096


class Connection(web.RequestHandler):
    """aiohttp's own, with the bounds above. What it overrides are the protocol's public callbacks."""

    __slots__ = ("_head_bytes", "_head_timeout_s", "_head_timer", "_occupancy")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        config: HttpConfig,
        occupancy: Occupancy,
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=config.idle_timeout_s,
            tcp_keepalive=False,  # the listening socket has it, and its connections with it
            lingering_time=min(MOST_LINGERING_S, config.request_timeout_s),
            access_log=None,  # type: ignore[arg-type]  # its own runner passes None as well
            max_line_size=MOST_LINE_BYTES,
            max_field_size=MOST_LINE_BYTES,
            max_headers=MOST_HEADERS,
        )
        self._occupancy = occupancy
        self._head_timeout_s = config.request_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of a head that comes in parts

    def data_received(self, data: bytes) -> None:
        before, running = self._request_count, self._current_request
        # Asked before: what completes the body of the one that runs is not the next one's.
        is_early = running is not None and not self._close and running.content.is_eof()
        super().data_received(data)
        if self._request_count != before:  # a head is whole
            self._stop_head_timer()
            self._head_bytes = 0
            # The one that runs has been taken from the queue; else the first in it is the next to run.
            room = 1 if self._current_request is None else 0
            if len(self._messages) > room:
                log.debug("a client sent a request before the one before it was answered")
                while len(self._messages) > room:
                    self._messages.pop()
                self.close()
        elif data and self._is_between_requests():
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(self._head_timeout_s, self._head_is_late)
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._head_is_large()
        elif is_early:  # it may, as far as a head goes
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                log.debug("a client sends a large head before its request is answered")
                self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._occupancy.num_open += 1
        self._occupancy.num_beginning -= 1
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._occupancy.num_open -= 1
        self._stop_head_timer()
        super().connection_lost(exc)

    def _is_between_requests(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport is None or not self._is_between_requests():
            return
        error = ApiError(
            408,
            f"The request's head did not come within {self._head_timeout_s:g} s (--request-timeout).",
            code="request_timeout",
        )
        self._refuse_head("408 Request Timeout", error)

    def _head_is_large(self) -> None:
        self._stop_head_timer()
        error = ApiError(
            431,
            f"The request's head may have {MOST_HEAD_BYTES} bytes; {self._head_bytes} came, and not its end.",
            code="headers_too_large",
        )
        self._refuse_head("431 Request Header Fields Too Large", error)

    def _refuse_head(self, status: str, error: ApiError) -> None:
        if self.transport is None:
            return
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request: its client's fault, so a debug line; without its bytes, which may be anybody's secret."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.debug("a client sent what is no HTTP: %s", type(exc).__name__)
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            error = ApiError(
                431,
                f"The request line and each header may have {MOST_LINE_BYTES} bytes, "
                f"and there may be {MOST_HEADERS} headers.",
                code="headers_too_large",
            )
        elif isinstance(exc, ContentEncodingError):
            error = ApiError(
                415,
                "A body may be compressed as gzip or deflate says, or not at all.",
                code="unsupported_encoding",
            )
        else:
            what = "message" if isinstance(exc, BadHttpMessage) else "request"
            error = ApiError(400, f"This is no HTTP {what}.", code="bad_request")
        response = error.response()
        response.force_close()
        return response


def connections(
    server: web.Server, config: HttpConfig, occupancy: Occupancy
) -> Callable[[], Connection]:
    """The protocol factory for a listening socket of this server."""
    loop = asyncio.get_running_loop()
    return lambda: Connection(server, loop, config, occupancy)


async def expect_later(request: web.Request) -> None:
    """A client that asks whether its body is welcome is told when it is read (`go_on`), not before its key was looked at."""


async def go_on(request: web.Request) -> None:
    """Tell a client that asked whether its body is welcome that it is."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response has not begun


async def in_time(
    request: web.Request, read: Callable[[web.Request], Awaitable[bytes]], timeout_s: float
) -> bytes:
    """The body that `read` reads. Raises ApiError 408 if it takes too long: the connection is to be closed then."""
    if request.content.is_eof():  # it came with its head: no timer for it
        return await read(request)
    try:
        async with asyncio.timeout(timeout_s):
            return await read(request)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not come within {timeout_s:g} s (--request-timeout).",
            code="request_timeout",
        ) from None


def log_body(request: web.Request, body: bytes) -> None:
    """One line with what a client sent, cut; for --log-prompts only."""
    shown = body[:MOST_LOGGED_BYTES].decode("utf-8", "replace")
    more = len(body) - MOST_LOGGED_BYTES
    log.info("%s %s: %r%s", request.method, request.path, shown, f" and {more} bytes" * (more > 0))
