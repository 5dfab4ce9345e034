"""One server in one phase of its life, for the tests that kill parts of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asking import Ask, status_of

PHASES = ("idle", "loading", "prefill", "decode")
NUM_STREAMS = 32
RINGS = {"token_slots": 4096, "submit_slots": 256}


class Scene:
    """A server in one phase, with the requests that put it there."""

    def __init__(
        self,
        start: Callable[..., Any],
        folder: Path,
        until: Any,
        words_of: Any,
        phase: str,
        *,
        token_ms: float = 0.0,
        worker: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.folder = folder
        self.until = until
        self._words_of = words_of
        self.phase = phase
        self.asks: list[Ask] = []
        if phase == "loading":
            self.hold("loading")
        (folder / "token-ms").write_text(str(token_ms))
        engine = {"runner": "simulated", "step_ms": 10.0, "max_num_seqs": NUM_STREAMS}
        config |= {"worker": engine | (worker or {}), "rings": RINGS}
        self.server = start(strange=str(folder), config=config)

    def begin(self) -> Scene:
        phase = self.phase
        if phase == "loading":
            self.until(lambda: self.worker_row()["phase"] == "weights", "the worker loads")
            self.until(lambda: self.server.child("http")["state"] == "ready", "the front end")
        else:
            self.server.wait_ready()
        self.port = self.server.port()
        self.fill(phase)
        self.pids = {role: self.server.pids(role)[0] for role in ("http", "worker")}
        self.pids["supervisor"] = self.server.pid
        return self

    def fill(self, phase: str) -> None:
        """Bring the requests of `phase` on their way."""
        if phase == "prefill":
            self.hold("prefill")
            self.asks = [Ask(self.port, prompt=[19556] * 600, max_tokens=20)]
            self.until(lambda: self.words("worker")["phase"] == 4, "a prefill step")
        elif phase == "decode":
            self.asks = [Ask(self.port, max_tokens=300) for _ in range(NUM_STREAMS)]
            for each in self.asks:
                each.wait_first()

    def hold(self, what: str) -> None:
        (self.folder / f"hold-{what}").touch()

    def let_go(self) -> None:
        for path in self.folder.glob("hold-*"):
            path.unlink()

    def worker_row(self) -> dict[str, Any]:
        row: dict[str, Any] = self.server.child("worker")
        return row

    def words(self, role: str) -> dict[str, int]:
        """The words of the board of `role` as it lives now."""
        words: dict[str, int] = self._words_of(self.server, role)
        return words

    def kill(self, role: str, number: int) -> None:
        os.kill(self.pids[role], number)

    def outcomes(self) -> set[str]:
        asks, self.asks = self.asks, []
        return {each.outcome() for each in asks}

    def is_as_before(self, *roles: str) -> bool:
        return all(self.server.pids(role)[0] == self.pids[role] for role in roles)

    def expect_successor(self, role: str) -> None:
        """A new process of this role; the other is the same; all serve."""
        self.until(lambda: self.server.pids(role)[0] not in (0, self.pids[role]), f"a new {role}")
        self.let_go()
        self.until(lambda: self.server.status()["state"] in ("ready", "starting"), "recovery")
        self.until(lambda: status_of(self.port, "/ready")[0] == 200, "ready again")
        assert self.is_as_before("http" if role == "worker" else "worker")
        self.pids[role] = self.server.pids(role)[0]

    def expect_service(self) -> None:
        """One more request is served, and nothing of those before it is left."""
        ask = Ask(self.port, max_tokens=5)
        assert ask.outcome() == "done"
        self.until(self.is_empty, "idle")

    def expect_good_end(self) -> None:
        """It serves, ends when it is told to, and leaves nothing."""
        self.expect_service()
        self.kill("supervisor", signal.SIGTERM)
        self.expect_end()

    def is_empty(self) -> bool:
        worker, http = self.words("worker"), self.words("http")
        busy = ("running", "waiting", "paused", "kv_blocks_used")
        return not any(worker[word] for word in busy) and not http["in_flight"]

    def expect_end(self, code: int = 0) -> None:
        """The supervisor ends, and every process, segment, socket and file with it."""
        assert self.server.wait() == code, self.server.output()
        assert self.server.leftovers() == []
        assert not any(os.path.exists(f"/proc/{pid}") for pid in self.pids.values())

    def expect_nothing_left(self, is_alive: Callable[[int], bool]) -> None:
        """The supervisor was killed: everybody ends, and removes what there was."""
        self.server.process.wait(30)
        self.until(lambda: not any(is_alive(pid) for pid in self.pids.values()), "all ended")
        assert self.server.leftovers() == []
