"""One place in the crew, and who is told when something changes there.

Owns: what a post remembers between two children, and how it is shown to front ends and operators. Never: acts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from shmserve.boards import label_of
from shmserve.children import Child
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
            }
        return row


def _age_s(now_ns: int, then_ns: int) -> float:
    """Seconds since then; 0 for what never was."""
    return round(max(0, now_ns - then_ns) / 1e9, 3) if then_ns else 0.0
