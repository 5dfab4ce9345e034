"""A worker that loads: what gets on is left alone, however long it takes in all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.boards import Phase
from shmserve.health import LOADING_TIMEOUT_S, Vitals, examine
from shmserve.worker import __main__ as worker_main
from shmserve.worker.__main__ import Worker

S = 1_000_000_000


def test_a_load_of_hours_is_not_hung_as_long_as_it_gets_on(monkeypatch) -> None:
    """70 billion weights from a slow disk. The heart beats in a thread of its own, so it says nothing of that."""
    now_ns, told = 1_000 * S, []
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns)
    monkeypatch.setattr(worker_main, "time", clock)
    worker: Any = Worker.__new__(Worker)
    worker.board = {"phase": Phase.LOADING, "phase_since_ns": now_ns}
    worker.joined = SimpleNamespace(link=SimpleNamespace(send=told.append))

    def must_end() -> bool:
        vitals = Vitals(now_ns, Phase.LOADING, worker.board["phase_since_ns"], 0, 0, 0, False)
        return examine(vitals, now_ns, 60.0).must_end

    for share in range(5):
        now_ns += int(0.9 * LOADING_TIMEOUT_S) * S
        assert not must_end()
        worker.progress("loading weights", share / 5)
    now_ns += int(LOADING_TIMEOUT_S) * S
    assert must_end(), "what gets no further is hung"
    assert [message["fraction"] for message in told] == [0.0, 0.2, 0.4, 0.6, 0.8]
