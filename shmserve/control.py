"""The control link between the supervisor and a child: small JSON messages with file descriptors on a SOCK_SEQPACKET socket.

Owns: framing and descriptor passing. Never: carries a request, a token or a weight. Its end of file is how a child learns
that its supervisor is gone, and the other way round.

supervisor -> child
    {"type": "welcome", "role", "index", "instance", "epoch", "version", "config": {...}}    first; fds: [board segment]
    {"type": "listen", "sockets": n}                                               fds: n bound sockets (http only)
    {"type": "channel", "http", "worker", "epoch"}                                 fds: the six of Channel.fds()
    {"type": "board", "role", "index", "name"}                                     a board to read, by name (http only)
    {"type": "worker", "worker", "state", "phase", "fraction", "reason", "info"}   state: loading ready stopped hung dead (http only);
                                                                                   info: what its "ready" said
    {"type": "close_channel", "http", "worker", "epoch"}                           the peer is gone; end what is in flight on it
    {"type": "drain"}                                                              no new requests; finish those in flight (http only)
    {"type": "stop"}                                                               end now, exit 0
    {"type": "refused", "error"}                                                   the answer to a join that cannot be; then EOF
child -> supervisor
    {"type": "join", "role", "index"}           only over the instance socket (started by hand)
    {"type": "loading", "phase", "fraction"}
    {"type": "ready", "info": {...}}            the worker serves; or the front end accepts
    {"type": "failed", "error"}                 it cannot go on; one line for the operator, then it exits
    {"type": "drained"}                         nothing is in flight any more
    {"type": "cut", "num"}                      requests that its end does not wait for; its last message
    {"type": "broken", "http", "worker", "epoch", "fault"}     this channel cannot be believed any more, and is closed here: the
                                                other end is at fault, and is started anew
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

Message: TypeAlias = dict[str, Any]

MAX_MESSAGE_BYTES = 256 * 1024
MAX_FDS = 64


class ControlError(RuntimeError):
    """The link was given something that it cannot be."""


class ControlLink:
    """One end of a control link. Non-blocking once `set_nonblocking` was called; one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # A message is one packet: it must fit the socket's buffer whole.
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 2 * MAX_MESSAGE_BYTES)

    @classmethod
    def pair(cls) -> tuple[ControlLink, ControlLink]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), cls(theirs)

    @classmethod
    def connect(cls, spec: str) -> ControlLink:
        """Open what `--control` names: `fd:N` (inherited) or `unix:PATH` (the instance socket)."""
        kind, _, rest = spec.partition(":")
        if kind == "fd" and rest.isdecimal():
            os.set_inheritable(int(rest), False)
            return cls(socket.socket(fileno=int(rest)))
        if kind == "unix" and rest:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(rest)
            except OSError:
                sock.close()
                raise
            return cls(sock)
        raise ControlError(f"--control must be fd:N or unix:PATH, got {spec!r}")

    def fileno(self) -> int:
        return self.sock.fileno()

    def set_nonblocking(self) -> None:
        self.sock.setblocking(False)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message. Raises OSError (BrokenPipeError, BlockingIOError) if the other end is gone or does not read."""
        data = msgspec.json.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ControlError(
                f"control message of {len(data)} bytes (at most {MAX_MESSAGE_BYTES})"
            )
        socket.send_fds(self.sock, [data], list(fds))

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors (close-on-exec); None at end of file.

        Raises BlockingIOError if none is there, ControlError if it is no message (its descriptors are closed).
        """
        fds = array.array("i")
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(
                MAX_MESSAGE_BYTES,
                socket.CMSG_SPACE(MAX_FDS * fds.itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except ConnectionResetError:
            return self.receive()  # it left some of ours unread: said once, before its last words
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ControlError("a control message was cut short")
            return _decode(data), list(fds)
        except ControlError:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        self.sock.close()


def _decode(data: bytes) -> Message:
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ControlError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ControlError("a control message has no type")
    return message
