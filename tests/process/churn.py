"""A light client that comes and goes as it likes: thousands of connections, left in every phase of a request."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import socket
import struct
from typing import Any

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the close is a reset


class Churn:
    """`run` makes the connections, `num_at_once` of them at a time. `left` counts by the place where each left."""

    WAYS = ("connect", "half a head", "head", "at once", "soon", "first event", "events", "whole")

    def __init__(self, port: int, seed: int, num_at_once: int = 48) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._turns = asyncio.Semaphore(num_at_once)
        self.left: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int] = collections.Counter()

    async def run(self, num_connections: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_connections):
                await self._turns.acquire()
                group.create_task(self._one())

    def _request(self) -> bytes:
        pick = self._random
        fields: dict[str, Any] = {
            "prompt": [pick.choice((19556, 905))] * pick.randint(1, pick.choice((8, 700))),
            "max_tokens": pick.choice((1, 5, 200)),
            "stream": pick.random() < 0.7,
            "n": pick.choice((1, 1, 1, 3)),
            "priority": pick.choice((0, 0, 1)),
            "ignore_eos": True,
        }
        if pick.random() < 0.3:
            fields["stop"] = ["zebra", "\n\n"]
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        )
        return head.encode() + b"Content-Type: application/json\r\n\r\n" + body

    async def _one(self) -> None:
        way = self._random.choice(self.WAYS)
        sock = socket.socket()
        sock.setblocking(False)
        try:
            async with asyncio.timeout(60):
                await self._leave(sock, way)
        except ConnectionError:
            way += ", broken"
        finally:
            self.left[way] += 1
            if self._random.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()
            self._turns.release()

    async def _leave(self, sock: socket.socket, way: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", self._port))
        request = self._request()
        if way == "connect":
            return
        if way == "half a head":
            await loop.sock_sendall(sock, request[:40])
            return
        if way == "head":
            await loop.sock_sendall(sock, request[: request.index(b"\r\n\r\n") + 4])
            return
        await loop.sock_sendall(sock, request)
        if way == "soon":
            await asyncio.sleep(self._random.random() / 20)
        if way in ("at once", "soon"):
            return
        if way == "events" and self._random.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)  # a half-closed client is gone for the server
            return
        most = {"first event": 1, "events": self._random.randint(2, 2_000)}.get(way, 1 << 30)
        data = b""
        while more := await loop.sock_recv(sock, 65_536):
            data += more
            if len(data) >= most or data.endswith(b"0\r\n\r\n"):
                break
            head, _, body = data.partition(b"\r\n\r\n")
            at = head.lower().find(b"content-length: ")
            if at >= 0 and len(body) >= int(head[at + 16 :].split(b"\r\n")[0]):
                break
        if data:
            self.statuses[int(data[9:12])] += 1
