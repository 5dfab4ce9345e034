"""--emission-log: one JSON line per step, so that lag can be measured from outside.

    {"step": n, "time_ns": t, "req_ids": ["16 hex digits", ...], "indices": [i, ...], "counts": [k, ...]}

`indices` is each request's first token of the step in its completion; `counts` stands only if one differs from 1. Response ids
end in the req_id. Written by the worker's main thread, buffered: whole once the worker is idle or closed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TokenKind

if TYPE_CHECKING:
    from shmserve.worker.commit import Committed

_encode = msgspec.json.Encoder().encode

MOST_NAMES = 65_536
"""Names remembered; when there are more, all are forgotten and made anew."""


class EmissionLog:
    """An open log file. Raises OSError at construction if it cannot be written."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = open(fd, "wb", buffering=1 << 20)  # noqa: SIM115  # open as long as the worker
        self._names: dict[int, str] = {}

    def write(self, step: int, time_ns: int, committed: Committed) -> None:
        ids = committed.records["req_id"].tolist()
        indices = committed.records["index"].tolist()
        counts = [1] * len(ids)
        for _, req_id, unit in committed.units:
            for at in range(0, len(unit), TOKEN_SLOT_BYTES):
                if unit[at + 20] == TokenKind.TOKENS:
                    ids.append(req_id)
                    indices.append(int.from_bytes(unit[at + 16 : at + 20], "little"))
                    counts.append(unit[at + 21])
        line = {
            "step": step,
            "time_ns": time_ns,
            "req_ids": list(map(self._name, ids)),
            "indices": indices,
        }
        if any(count != 1 for count in counts):
            line["counts"] = counts
        self._file.write(_encode(line) + b"\n")

    def _name(self, req_id: int) -> str:
        name = self._names.get(req_id)
        if name is None:
            if len(self._names) >= MOST_NAMES:
                self._names.clear()
            name = self._names[req_id] = f"{req_id:016x}"
        return name

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
