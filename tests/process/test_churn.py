"""Ten thousand clients that come and go in every phase: what they held is free again, to the last block and place."""

from __future__ import annotations

import asyncio
import collections
import os
from pathlib import Path
from typing import Any

import pytest
from asking import Ask
from churn import Churn

pytestmark = pytest.mark.usefixtures("default_model")

TABLE_SIZE = 64
NUM_CONNECTIONS = 10_000


def open_files(pid: int) -> dict[str, int]:
    """How many descriptors of each kind a process has."""
    kinds: collections.Counter[str] = collections.Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        kinds[os.readlink(f"/proc/{pid}/fd/{fd}").partition(":[")[0]] += 1
    return kinds


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clients_that_come_and_go_leave_nothing(
    start: Any, until: Any, words_of: Any, tmp_path: Path
) -> None:
    """The worker checks all its conservation laws whenever it has nothing to do, and dies of the first that is broken."""
    (tmp_path / "checks").touch()
    worker = {"runner": "simulated", "step_ms": 2.0, "max_num_seqs": 16}
    server = start(
        strange=str(tmp_path),
        config={
            "worker": worker,
            "rings": {"table_size": TABLE_SIZE, "token_slots": 256, "submit_slots": 64},
        },
    )
    server.wait_ready()
    pids, port = server.pids(), server.port()

    def is_idle() -> bool:
        worker, http = words_of(server, "worker"), words_of(server, "http")
        busy = ("running", "waiting", "paused", "kv_blocks_used")
        return not any(worker[word] for word in busy) and not (
            http["in_flight"] or http["connections"] or http["mailbox_bytes"]
        )

    before = [open_files(pid) for pid in pids]
    churn = Churn(port, seed=1)
    asyncio.run(churn.run(NUM_CONNECTIONS))
    print(churn.left, churn.statuses)
    assert set(churn.statuses) <= {200, 503}
    assert churn.statuses[200] > NUM_CONNECTIONS / 10
    until(is_idle, "idle")

    # Every place of the table can be taken, and every block.
    asks = [Ask(port, prompt=[7 + i] * 8, max_tokens=20) for i in range(TABLE_SIZE)]
    assert {ask.outcome() for ask in asks} == {"done"}
    until(is_idle, "idle")
    assert server.pids() == pids
    # Empty while it is written anew.
    assert int(until((tmp_path / "checks").read_text, "the number of checks")) > 2
    until(lambda: [open_files(pid) for pid in pids] == before, "descriptors as before")
    assert "Traceback" not in server.output()
