"""The clients that do not keep up: who they are, what waits for each, and when it has been too long.

Owns: the rules of a request (the server's, or stricter ones of its own), the list of congested clients, the one timer that looks at
them, and what is counted and said about them. Never: hears of a token of a client that keeps up, runs a timer while all do, or
touches a stream but through the callback that it gave.

A client is stuck while nothing is taken: its backlog grows no smaller, and its kernel acknowledges nothing more. Slow is not stuck:
who takes something now and then is served, within the bound on bytes. The kernel tells only of whole windows, so one that reads a
byte a second looks stuck between two of them.
Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, Protocol, cast, get_args

from shmserve.config import HttpConfig, Policy
from shmserve.http import fields
from shmserve.http.backlog import acknowledged_bytes, backlog_bytes, is_gone
from shmserve.http.errors import bad_field
from shmserve.rings.board import Board

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often congested clients are looked at, at least; a bound that is short is looked at four times within its length."""
WARN_AFTER_S: Final = 1.0
"""A backlog as old as this is worth a line in the log."""
SAY_EVERY_S: Final = 10.0
"""Lines about slow clients are at least this far apart, whatever their number."""
LEAST_BYTES: Final = 1_024
LEAST_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class SlowClientRules:
    """What becomes of a stream whose client does not read, and the two bounds behind which it ends."""

    policy: Policy
    most_bytes: int
    most_seconds: float

    @property
    def look_s(self) -> float:
        return min(LOOK_S, self.most_seconds / 4)


class AsksForRules(Protocol):
    """The fields of a request body, the same on every endpoint that streams."""

    on_slow_client: str | None
    slow_client_bytes: int | None
    slow_client_seconds: float | None


def rules_of(config: HttpConfig, asked: AsksForRules | None = None) -> SlowClientRules:
    """The server's rules, or what a request asks for: any policy, and bounds that are not above the server's. 400 if they are."""
    policy, most_bytes = config.slow_client, config.slow_client_bytes
    most_seconds = config.slow_client_seconds
    if asked is None:
        return SlowClientRules(policy, most_bytes, most_seconds)
    if asked.on_slow_client is not None:
        if asked.on_slow_client not in get_args(Policy):
            raise bad_field(
                "on_slow_client",
                f"on_slow_client must be coalesce, block or drop, got {asked.on_slow_client[:40]!r}",
            )
        policy = cast(Policy, asked.on_slow_client)
    return SlowClientRules(
        policy,
        fields.in_range(
            "slow_client_bytes", asked.slow_client_bytes, LEAST_BYTES, most_bytes, most_bytes
        ),
        fields.in_range(
            "slow_client_seconds",
            asked.slow_client_seconds,
            min(LEAST_SECONDS, most_seconds),
            most_seconds,
            most_seconds,
        ),
    )


class Backlog:
    """One congested client. `text_bytes` is what waits for it in front of the transport."""

    __slots__ = (
        "_acknowledged",
        "_is_answer",
        "_left",
        "_moved_at",
        "_on_end",
        "_until",
        "is_said",
        "name",
        "req_id",
        "rules",
        "since",
        "text_bytes",
        "transport",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        rules: SlowClientRules,
        name: str,
        on_end: Callable[[bool], None],
        is_answer: bool,
        now: float,
        req_id: int = 0,
    ) -> None:
        self.transport = transport
        self.rules = rules
        self.name = name
        self.req_id = req_id
        self.since = self._moved_at = now
        self.text_bytes = 0
        self.is_said = False
        self._on_end = on_end
        self._is_answer = is_answer
        self._left = backlog_bytes(transport)
        self._acknowledged = acknowledged_bytes(transport.get_extra_info("socket"))
        self._until: float | None = None

    @property
    def num_bytes(self) -> int:
        """All that waits for this client, as of the last look."""
        return self._left + self.text_bytes

    def end_by(self, at: float) -> None:
        """Its stream was cut: what is left of it may be read until then, not longer."""
        self._until = at

    def excuse(self, seconds: float) -> None:
        """Time in which nobody served it counts for neither bound."""
        self._moved_at += seconds
        if self._until is not None:
            self._until += seconds

    def look(self, now: float) -> str:
        """What is to be said of it: "over" (nothing waits any more), "gone" (it has closed its side), "stuck", or nothing."""
        if is_gone(self.transport):
            return "over" if self._is_answer else "gone"
        left = backlog_bytes(self.transport)
        acknowledged = acknowledged_bytes(self.transport.get_extra_info("socket"))
        if left < self._left or acknowledged > self._acknowledged:
            self._moved_at = now
        self._left, self._acknowledged = left, acknowledged
        if self._is_answer and not self.transport.get_write_buffer_size():
            return "over"
        if self.transport.is_closing() and not self._is_answer:
            return "gone"
        if now - self._moved_at >= self.rules.most_seconds:
            return "stuck"
        return "stuck" if self._until is not None and now >= self._until else ""

    def end(self, is_stuck: bool) -> None:
        self._on_end(is_stuck)


class _Seldom:
    """Lets a line through every SAY_EVERY_S and counts those between."""

    def __init__(self) -> None:
        self._said_at = float("-inf")
        self._num_unsaid = 0

    def may_speak(self, now: float) -> bool:
        if now - self._said_at < SAY_EVERY_S:
            self._num_unsaid += 1
            return False
        self._said_at = now
        return True

    def unsaid(self) -> str:
        count, self._num_unsaid = self._num_unsaid, 0
        return f"; {count} more were ended since the last such line" if count else ""


class SlowClients:
    """All congested clients of one front end. `board` shows them."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._watched: dict[int, Backlog] = {}  # by id: the order is that of their coming
        self._answers: dict[asyncio.Transport, Backlog] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._backlog_lines = _Seldom()
        self._end_lines = _Seldom()

    def watch(
        self,
        transport: asyncio.Transport,
        rules: SlowClientRules,
        name: str,
        on_end: Callable[[bool], None],
        *,
        req_id: int = 0,
        is_answer: bool = False,
    ) -> Backlog:
        """Look at this client from now on. `on_end(is_stuck)` is called once it has been stuck for too long, or else has gone."""
        loop = asyncio.get_running_loop()
        backlog = Backlog(transport, rules, name, on_end, is_answer, loop.time(), req_id)
        self._watched[id(backlog)] = backlog
        self._board.add("num_congestions")
        self._board["clients_congested"] = len(self._watched)
        due = loop.time() + rules.look_s
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(due, self._look)
        return backlog

    def watch_answer(self, transport: asyncio.Transport, rules: SlowClientRules, name: str) -> None:
        """Look at a client to whom the last byte of an answer was written, if it was not taken whole; until it is."""
        if is_gone(transport) or not transport.get_write_buffer_size():
            return
        if transport in self._answers:
            return

        def end(is_stuck: bool) -> None:
            self.count_ended(name, "it has read nothing of its answer for --slow-client-seconds")
            transport.abort()

        self._answers[transport] = self.watch(transport, rules, name, end, is_answer=True)

    def release(self, backlog: Backlog) -> None:
        """It is congested no more, or its connection is closed."""
        if self._watched.pop(id(backlog), None) is None:
            return
        self.note_text(backlog, 0)
        if self._answers.get(backlog.transport) is backlog:
            del self._answers[backlog.transport]
        self._board["clients_congested"] = len(self._watched)
        if not self._watched:
            self._board["client_backlog_bytes"] = 0
            self._board.rosters["slow_clients"].clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def note_text(self, backlog: Backlog, num_bytes: int) -> None:
        """So much waits for this client in front of its transport; the gauges are sums over all clients."""
        board = self._board
        waiting = board["mailbox_bytes"] + num_bytes - backlog.text_bytes
        board["mailbox_bytes"] = waiting
        backlog.text_bytes = num_bytes
        if waiting > board["mailbox_high_water_bytes"]:
            board["mailbox_high_water_bytes"] = waiting

    def count_ended(self, name: str, reason: str) -> None:
        """A stream or an answer ends because its client is too slow."""
        self._board.add("num_slow_clients")
        if self._end_lines.may_speak(asyncio.get_running_loop().time()):
            more = self._end_lines.unsaid()
            log.warning("%s: its client is too slow (%s): ended%s", name, reason, more)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        assert self._timer is not None
        late_s = now - self._timer.when()
        self._timer = None
        for backlog in list(self._watched.values()):
            backlog.excuse(late_s)
            found = backlog.look(now)
            if found:
                self.release(backlog)
            if found in ("gone", "stuck"):
                backlog.end(found == "stuck")
        self._show()
        self._speak(now)
        if self._watched and self._timer is None:
            delay = min(backlog.rules.look_s for backlog in self._watched.values())
            self._timer = loop.call_at(now + delay, self._look)

    def _show(self) -> None:
        board = self._board
        sizes = [backlog.num_bytes for backlog in self._watched.values()]
        board["client_backlog_bytes"] = sum(sizes)
        board["client_backlog_high_water_bytes"] = max(
            board["client_backlog_high_water_bytes"], *sizes, 0
        )
        roster = board.rosters["slow_clients"]
        roster.clear()
        deepest = nlargest(roster.num_rows, self._watched.values(), key=lambda one: one.num_bytes)
        for row, one in enumerate(deepest):
            roster.enter(row, int(one.since * 1e9), one.req_id, one.num_bytes, one.text_bytes)

    def _speak(self, now: float) -> None:
        """One line about the deepest backlog that has lasted for a while and was not yet named."""
        old = [
            backlog
            for backlog in self._watched.values()
            if not backlog.is_said and now - backlog.since >= WARN_AFTER_S
        ]
        if not old or not self._backlog_lines.may_speak(now):
            return
        deepest = max(old, key=lambda backlog: backlog.num_bytes)
        for backlog in old:
            backlog.is_said = True
        log.warning(
            "%s: its client does not keep up: %d bytes wait for it, %d of them as text, since %.1f s "
            "(policy %s, at most %d bytes and %g s stuck); %d clients are congested",
            deepest.name,
            deepest.num_bytes,
            deepest.text_bytes,
            now - deepest.since,
            deepest.rules.policy,
            deepest.rules.most_bytes,
            deepest.rules.most_seconds,
            len(self._watched),
        )
