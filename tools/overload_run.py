"""An open-loop client that is light enough to offer a server ten times what it can do, and a watch on the memory of processes.

Owns: bare sockets with keep-alive, one thread, one epoll: a request costs it about 0.1 ms. Latencies count from when a request was sent;
how late it was sent is told apart. Never: retries, or leaves a request without an answer uncounted.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
STUCK_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """`num_requests`, `rate` of them a second; every `stream_every`th is streamed. `prompt` and `max_tokens` are those of each."""

    port: int
    num_requests: int
    rate: float
    prompt: str = "Once upon a time"
    max_tokens: int = 16
    stream_every: int = 10
    max_connections: int = 1_000


@dataclass(slots=True)
class Outcome:
    """What became of all requests. Latencies in ms, by what the answer was."""

    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    ok_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    num_broken: int = 0
    num_unanswered: int = 0
    num_connections: int = 0
    worst_late_ms: float = 0.0
    took_s: float = 0.0

    @property
    def num_answered(self) -> int:
        return self.statuses.total()


class _Exchange:
    """One connection: the request on it, and what came of its answer."""

    __slots__ = ("data", "sent_at", "sock")

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.data = bytearray()
        self.sent_at = 0.0

    def send(self, request: bytes) -> None:
        self.data.clear()
        self.sent_at = time.monotonic()
        sent = self.sock.send(request)
        assert sent == len(request), "a request of a few hundred bytes fits every socket"

    @property
    def is_whole(self) -> bool:
        head, mark, body = bytes(self.data).partition(b"\r\n\r\n")
        if not mark:
            return False
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return body.endswith(b"0\r\n\r\n")
        length = int(lower.partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        return len(body) >= length

    @property
    def is_last(self) -> bool:
        return b"connection: close" in bytes(self.data).partition(b"\r\n\r\n")[0].lower()


def request_bytes(load: Load, is_streamed: bool) -> bytes:
    body = json.dumps(
        {
            "prompt": load.prompt,
            "max_tokens": load.max_tokens,
            "ignore_eos": True,
            "stream": is_streamed,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def run(load: Load) -> Outcome:
    """Send them all, whatever comes, and wait until each has its answer."""
    plain, streamed = request_bytes(load, False), request_bytes(load, True)
    outcome = Outcome()
    idle: deque[_Exchange] = deque()
    busy: set[_Exchange] = set()
    selector = selectors.EpollSelector()
    begin = time.monotonic()
    num_sent = 0
    heard_at = begin
    while num_sent < load.num_requests or busy:
        now = time.monotonic()
        due = min(load.num_requests, int((now - begin) * load.rate) + 1)
        while num_sent < due and (idle or len(busy) < load.max_connections):
            exchange = idle.pop() if idle else _connect(load, selector, outcome)
            late_ms = (time.monotonic() - begin - num_sent / load.rate) * 1000
            outcome.worst_late_ms = max(outcome.worst_late_ms, late_ms)
            exchange.send(streamed if num_sent % load.stream_every == 0 else plain)
            busy.add(exchange)
            num_sent += 1
        next_s = begin + num_sent / load.rate - time.monotonic()
        wait_s = 1.0 if num_sent == load.num_requests else max(0.0, min(1.0, next_s))
        for key, _ in selector.select(wait_s):
            heard_at = time.monotonic()
            _hear(key.data, selector, idle, busy, outcome)
        if busy and time.monotonic() - heard_at > STUCK_AFTER_S:
            break
    outcome.took_s = time.monotonic() - begin
    outcome.num_unanswered = len(busy)
    for exchange in [*idle, *busy]:
        exchange.sock.close()
    selector.close()
    return outcome


def _connect(load: Load, selector: selectors.BaseSelector, outcome: Outcome) -> _Exchange:
    exchange = _Exchange(load.port)
    outcome.num_connections += 1
    selector.register(exchange.sock, selectors.EVENT_READ, exchange)
    return exchange


def _hear(
    exchange: _Exchange,
    selector: selectors.BaseSelector,
    idle: deque[_Exchange],
    busy: set[_Exchange],
    outcome: Outcome,
) -> None:
    try:
        data = exchange.sock.recv(1 << 18)
    except ConnectionError:
        data = b""
    exchange.data += data
    is_over = not data
    if exchange in busy and (is_over or exchange.is_whole):
        busy.discard(exchange)
        if exchange.is_whole:
            _note(exchange, outcome)
            is_over |= exchange.is_last
        else:
            outcome.num_broken += 1
        if not is_over:
            idle.append(exchange)
    if is_over:
        if exchange in idle:  # the server closed one that nobody used
            idle.remove(exchange)
        selector.unregister(exchange.sock)
        exchange.sock.close()


def _note(exchange: _Exchange, outcome: Outcome) -> None:
    took_ms = (time.monotonic() - exchange.sent_at) * 1000
    head, _, body = bytes(exchange.data).partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    outcome.statuses[status] += 1
    if status == 200:
        outcome.ok_ms.append(took_ms)
        return
    outcome.refused_ms.append(took_ms)
    outcome.codes[str(json.loads(body)["error"]["code"])] += 1


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, without its shared mappings."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES


class RssWatch:
    """Samples the memory of processes while it is open."""

    def __init__(self, pids: dict[str, int], every_s: float = 0.25) -> None:
        self.samples: dict[str, list[int]] = {name: [] for name in pids}
        self._pids = pids
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> RssWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(self._every_s):
            for name, pid in self._pids.items():
                self.samples[name].append(rss_bytes(pid))

    def most(self, name: str) -> int:
        return max(self.samples[name])

    def growth(self, name: str) -> int:
        """By how much the greatest of the last quarter is above the greatest of the second."""
        samples = self.samples[name]
        quarter = max(1, len(samples) // 4)
        return max(samples[-quarter:]) - max(samples[quarter : 2 * quarter] or samples[:1])
