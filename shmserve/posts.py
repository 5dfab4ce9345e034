"""The places in the crew, and who is told when something changes there.

Owns: what a post remembers between two children, and how it is shown to front ends and operators. Never: acts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmserve.boards import label_of
from shmserve.children import HTTP, WORKER, Child
from shmserve.config import Config
from shmserve.control import Message
from shmserve.health import RestartPolicy


class Captain(Protocol):
    """Who is told."""

    def crew_changed(self) -> None:
        """A child became ready, drained, was stopped, hung, died or came."""

    def crew_failed(self, error: str) -> None:
        """The crew cannot be made whole."""

    def crew_loading(self, text: str, fraction: float) -> None:
        """A worker told how far it is."""


@dataclass(slots=True)
class Post:
    """One place to be filled: worker j or front end i. `child` is None between a death and the next start."""

    role: str
    index: int
    is_external: bool
    restarts: RestartPolicy
    child: Child | None = None
    state: str = "loading"  # as the front ends are told: loading ready stopped hung dead
    reason: str = ""
    phase: str = ""
    fraction: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)  # what its last "ready" said
    since: float = field(default_factory=time.time)
    num_deaths: dict[str, int] = field(default_factory=dict)  # by cause: boards.DEATH_CAUSES
    last_death: str = ""

    def died(self, cause: str, reason: str) -> float | None:
        """Note the death of its child; seconds until the next is to start, or None to give up."""
        self.num_deaths[cause] = self.num_deaths.get(cause, 0) + 1
        self.last_death = reason
        return self.restarts.died(time.monotonic())

    def worker_message(self) -> Message:
        return {
            "type": "worker",
            "worker": self.index,
            "state": self.state,
            "phase": self.phase,
            "fraction": self.fraction,
            "reason": self.reason,
            "info": self.info,
        }

    def status(self, now_ns: int) -> Message:
        """The row of `shmserve status`. Ages in seconds; `since` in seconds since 1970."""
        row: Message = {
            "role": self.role,
            "index": self.index,
            "state": self.state,
            "reason": self.reason,
            "since": self.since,
            "deaths": self.restarts.num_deaths,
            "causes": dict(self.num_deaths),
            "last_death": self.last_death,
            "pid": 0,
        }
        if self.child is not None:
            board = self.child.board
            is_ready = self.child.is_ready
            row |= {
                "pid": self.child.pid,
                "epoch": self.child.epoch,
                "phase": label_of(board["phase"]) if is_ready else self.phase,
                "fraction": 1.0 if is_ready else self.fraction,
                "phase_age_s": _age_s(now_ns, board["phase_since_ns"]),
                "heartbeat_age_s": _age_s(now_ns, board["heartbeat_ns"]),
                "board": board.segment.name,
                "rank_pids": list(self.info.get("rank_pids", ())) if is_ready else [],
            }
        return row


def posts_of(config: Config, external: frozenset[str]) -> list[Post]:
    """All posts of an instance. Front ends first: they answer 503 with the progress while the workers load."""
    counts = ((HTTP, config.num_http, 0.0), (WORKER, config.num_workers, 1.0))
    return [
        Post(role, index, role in external, RestartPolicy(first_delay_s))
        for role, count, first_delay_s in counts
        for index in range(count)
    ]


def queue_of(children: Iterable[Child]) -> dict[str, int]:
    """The sums over all children that live: what waits, what runs, what was asked so far."""
    boards = [(child.role, child.board) for child in children]
    fronts = [board for role, board in boards if role == HTTP]
    workers = [board for role, board in boards if role == WORKER]
    return {
        "in_flight": sum(board["in_flight"] for board in fronts),
        "waiting": sum(board["waiting"] for board in fronts),
        "running": sum(board["running"] for board in workers),
        "max_running": sum(board["max_num_seqs"] for board in workers),
        "requests": sum(board["num_requests"] for board in fronts),
        "refused": sum(board["num_refused"] for board in fronts),
    }


def _age_s(now_ns: int, then_ns: int) -> float:
    """Seconds since then; 0 for what never was."""
    return round(max(0, now_ns - then_ns) / 1e9, 3) if then_ns else 0.0
