"""A server with a key and few places, set as a router in front of it wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving import Answer, Server

KEY = "contract-key"
RUN_SLOTS, QUEUE_SLOTS = 2, 3
FLAGS = (
    "--runner=simulated",
    "--step-ms=2",
    f"--max-num-seqs={RUN_SLOTS}",
    f"--max-queued-requests={QUEUE_SLOTS}",
    "--queue-full-status=429",
    f"--api-key={KEY}",
)


class Keyed(Server):
    """Sends the key, as a router that was given it does."""

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        with_key = {"Authorization": f"Bearer {KEY}"} | dict(headers or {})
        return super().request(method, path, body, with_key)

    def without_key(self, path: str) -> Answer:
        return super().request("GET", path)
