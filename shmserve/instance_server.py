"""The supervisor's side of the instance socket: who may speak there, and what is answered.

Owns: the listening socket and the connections accepted on it, but for those that join: they become control links. Never: waits
for a client; an answer that does not fit its socket ends the connection.
"""

from __future__ import annotations

import os
from typing import Protocol

from shmserve.children import HTTP, WORKER
from shmserve.control import ControlError, ControlLink, Message
from shmserve.instance_socket import InstanceLock, Peer, peer_of
from shmserve.loop import Loop


class Supervised(Protocol):
    """What a client may ask of the supervisor."""

    def status(self) -> Message: ...

    def drain_once(self) -> None: ...

    def stop(self) -> None: ...

    def join(self, role: str, index: int, link: ControlLink, pid: int) -> str: ...


class InstanceServer:
    """Listens from construction to `close`. Who asked to drain or stop keeps its connection until then: its end is the news."""

    def __init__(self, lock: InstanceLock, loop: Loop, supervised: Supervised) -> None:
        self._loop = loop
        self._supervised = supervised
        self._socket = lock.listen()
        self._links: dict[int, ControlLink] = {}
        loop.add(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return  # the client left before it was its turn
        peer = peer_of(sock)
        if peer.uid not in (os.getuid(), 0):
            sock.close()
            return
        link = ControlLink(sock)
        link.set_nonblocking()
        self._links[link.fileno()] = link
        self._loop.add(link, lambda: self._read(link, peer))

    def _read(self, link: ControlLink, peer: Peer) -> None:
        try:
            received = link.receive()
        except BlockingIOError:
            return
        except (OSError, ControlError) as error:
            self._answer(link, {"type": "refused", "error": str(error)})
            self._drop(link)
            return
        if received is None:
            self._drop(link)
            return
        message, fds = received
        for fd in fds:
            os.close(fd)
        self._serve(link, peer, message)

    def _serve(self, link: ControlLink, peer: Peer, message: Message) -> None:
        kind = message["type"]
        if kind == "status":
            self._answer(link, self._supervised.status())
        elif kind in ("drain", "stop"):
            self._answer(link, {"type": "ok", "pid": os.getpid()})
            (self._supervised.drain_once if kind == "drain" else self._supervised.stop)()
        elif kind == "join":
            self._join(link, peer, message)
        else:
            self._answer(link, {"type": "refused", "error": f"unknown command {kind!r}"})

    def _join(self, link: ControlLink, peer: Peer, message: Message) -> None:
        role, index = message.get("role"), message.get("index", 0)
        if role not in (HTTP, WORKER) or not isinstance(index, int):
            self._answer(link, {"type": "refused", "error": f"{role!r} {index!r} is no child"})
            return
        self._forget(link)  # before it becomes a child's: a descriptor has one reader
        refusal = self._supervised.join(role, index, link, peer.pid)
        if refusal:
            self._answer(link, {"type": "refused", "error": refusal})
            link.close()

    def _answer(self, link: ControlLink, message: Message) -> None:
        try:
            link.send(message)
        except OSError:
            return  # it left, or does not read; its end of file closes the connection

    def _forget(self, link: ControlLink) -> None:
        self._loop.remove(link)
        del self._links[link.fileno()]

    def _drop(self, link: ControlLink) -> None:
        self._forget(link)
        link.close()

    def close(self) -> None:
        """Stop listening; end every connection."""
        for link in list(self._links.values()):
            self._drop(link)
        self._loop.remove(self._socket)
        self._socket.close()
