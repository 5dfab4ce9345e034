"""Who answers while there is no front end yet: the model is fetched and made ready, which may take minutes.

Owns: the connections that it accepts on the instance's sockets, and one thread. Never: serves a model, keeps a connection, or lives
beside the children: the supervisor opens it before the model is prepared and closes it before any child is started.

    GET /live     200: the port is served                    anything else      503, Retry-After, and how far it is

Bounded: at most MOST_CONNECTIONS at once, more wait in the backlog; PATIENCE_S for a request to come and for its answer to be
taken; what a client sends beyond its request is read and forgotten, since a close with unread bytes would be a reset, and the
client would never see its answer.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import msgspec

MOST_CONNECTIONS: Final = 64
PATIENCE_S: Final = 2.0
_MOST_HEAD_BYTES: Final = 16_384
_TICK_S: Final = 0.5
_LAST_CALL_S: Final = 0.25  # for requests that are on their way when the lobby closes
_RETRY_ACCEPT_S: Final = 0.1


class _Visitor:
    """A connection: first its request is read, then it is answered, then its end is awaited."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.head = b""
        self.is_answered = False
        self.leaves_at = time.monotonic() + PATIENCE_S


class Lobby:
    """`with Lobby(sockets) as lobby: lobby.tell(...)`: answers from entry to exit."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = list({sock.fileno(): sock for sock in sockets}.values())
        # Replaced as a whole: the thread reads one or the other.
        self._news: tuple[str, float | None] = ("starting", None)
        self._visitors: dict[int, _Visitor] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._is_full = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="lobby", daemon=True)

    def tell(self, text: str, fraction: float | None) -> None:
        """What is answered from now on."""
        self._news = (text, fraction)

    def __enter__(self) -> Lobby:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Answer nobody any more; who waits in the backlog is the front ends'."""
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)

    # --- the thread

    def _serve(self) -> None:
        with self._selector:
            self._selector.register(self._wake_fd, selectors.EVENT_READ)
            self._open()
            while self._turn(_TICK_S if self._visitors else None):
                self._see_off(time.monotonic())
            self._is_closing = True
            if not self._is_full:
                self._close()
            closes_at = time.monotonic() + _LAST_CALL_S
            while self._visitors and (left := closes_at - time.monotonic()) > 0:
                self._turn(left)
            self._see_off(math.inf)  # who has not said a word is told,
            self._see_off(math.inf)  # and all must leave

    def _turn(self, timeout_s: float | None) -> bool:
        """Wait for the next events and serve them; False once the lobby is to close."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        if self._wake_fd in ready:
            self._selector.unregister(self._wake_fd)
            return False
        for source in ready:
            assert isinstance(source, socket.socket)
            visitor = self._visitors.get(source.fileno())
            if visitor is None:
                self._accept(source)
            else:
                self._read(visitor)
        return True

    def _close(self) -> None:
        for sock in self._sockets:
            self._selector.unregister(sock)

    def _open(self) -> None:
        for sock in self._sockets:
            self._selector.register(sock, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # gone before its turn
        except OSError:
            time.sleep(
                _RETRY_ACCEPT_S
            )  # no descriptor is left: it stays readable, and must not spin
            return
        sock.setblocking(False)
        self._visitors[sock.fileno()] = _Visitor(sock)
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._visitors) >= MOST_CONNECTIONS and not self._is_full:
            self._is_full = True
            self._close()

    def _read(self, visitor: _Visitor) -> None:
        try:
            data = visitor.sock.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave(visitor)
            return
        if visitor.is_answered:
            return
        visitor.head += data
        if b"\r\n\r\n" in visitor.head or len(visitor.head) > _MOST_HEAD_BYTES:
            self._answer(visitor)

    def _answer(self, visitor: _Visitor) -> None:
        visitor.is_answered = True
        visitor.leaves_at = time.monotonic() + PATIENCE_S
        try:
            # A few hundred bytes into an empty buffer: all or, if it has gone, nothing.
            visitor.sock.send(self._response(visitor.head))
            visitor.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._leave(visitor)

    def _response(self, head: bytes) -> bytes:
        path = head.split(b" ", 2)[1].split(b"?")[0] if head.count(b" ") >= 2 else b""
        if path == b"/live":
            return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        body = b"" if head.startswith(b"HEAD ") else self._body(path)
        return (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        ) + body

    def _body(self, path: bytes) -> bytes:
        text, fraction = self._news
        if path in (b"/health", b"/ready"):
            news: dict[str, Any] = {
                "status": "preparing",
                "phase": text,
                "fraction": fraction,
                "workers": [],
            }
            return msgspec.json.encode(news)
        done = "" if fraction is None else f", {fraction:.0%}"
        message = f"The model is being prepared ({text}{done})."
        error = {"message": message, "type": "server_error", "param": None, "code": "loading"}
        return msgspec.json.encode({"error": error})

    def _see_off(self, now: float) -> None:
        """Answer who does not get to the point, and close who does not leave."""
        for visitor in list(self._visitors.values()):
            if now >= visitor.leaves_at:
                if visitor.is_answered:
                    self._leave(visitor)
                else:
                    self._answer(visitor)

    def _leave(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor.sock.fileno()]
        visitor.sock.close()
        if self._is_full:
            self._is_full = False
            if not self._is_closing:
                self._open()
