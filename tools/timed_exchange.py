"""One request on a bare socket: every byte of its answer with the time it was read at, and the `timing` objects in it.

Owns: the bytes, the clock and where events end. The clock is looked at before anything else is done with what was read, and JSON is parsed
when the answer is whole, so a client of this kind adds little of its own. Never: opens a connection, or judges. `check_hops.py`,
`plot_tuning.py`.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

EVENT = re.compile(rb"^data: (\{.*\})\n", re.MULTILINE)
READ_BYTES = 65536
LAST_CHUNK = b"0\r\n\r\n"


def request_bytes(path: str, fields: dict[str, Any]) -> bytes:
    """A POST with this body."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(slots=True)
class Exchange:
    """What came for a request that was sent at `sent_ns`. `reads`: how many bytes had come by when."""

    sent_ns: int
    data: bytearray = field(default_factory=bytearray)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def take(self, part: bytes, at_ns: int) -> None:
        """What a read has brought. Raises ConnectionError if it was the end."""
        if not part:
            raise ConnectionError(f"the answer was broken off: {bytes(self.data[:300])!r}")
        self.data += part
        self.reads.append((len(self.data), at_ns))

    def read_from(self, sock: socket.socket) -> None:
        """All of the answer, from a socket that blocks."""
        while not self.is_whole():
            part = sock.recv(READ_BYTES)
            self.take(part, time.monotonic_ns())

    @property
    def status(self) -> int:
        """0 as long as it is not known."""
        return int(self.data[9:12] or b"0")

    def is_whole(self) -> bool:
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return False
        length = re.search(rb"content-length: (\d+)", self.data[:end].lower())
        if length is None:
            return self.data.endswith(LAST_CHUNK, end)
        return len(self.data) - end - 4 >= int(length[1])

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(when it had been read, what it says) of each event, or of an answer that is no stream."""
        data = bytes(self.data)
        head, _, body = data.partition(b"\r\n\r\n")
        if b"text/event-stream" in head.lower():
            found = [(match.end(), match[1]) for match in EVENT.finditer(data)]
        else:
            found = [(len(data), body)]
        reads = iter(self.reads)
        size, at_ns = next(reads)
        for end, text in found:
            while size < end:
                size, at_ns = next(reads)
            yield at_ns, json.loads(text)

    def timings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(when it had been read, its `timing`) of each of them that has one."""
        for at_ns, told in self.objects():
            holders = [told["meta_info"]] if "meta_info" in told else told.get("choices", ())
            for holder in holders:
                if "timing" in holder:
                    yield at_ns, holder["timing"]
