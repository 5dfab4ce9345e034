"""The supervisor: it starts the front ends and the workers, hears of every death, and leaves nothing behind.

Owns: the order of a life, from the claim to the last unlink; who runs; who is told what. Never: loads torch or aiohttp, sees
a request, or polls. One thread, one loop; children are told by control messages, observers by its board.

    claim -> prepare -> start children -> ready -> draining -> stopping -> end           (any error: straight to the end)

The end is the same on every path: children are ended and reaped, channels and boards unlinked, sockets closed and removed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from shmserve.boards import HEARTBEAT_S, label_of
from shmserve.children import HTTP, TERMINAL_SIGNALS, WORKER, Child, Command, child_command
from shmserve.claim import Claim, claim
from shmserve.config import Config
from shmserve.control import ControlLink, Message
from shmserve.health import RestartPolicy, Verdict, examine
from shmserve.instance_server import InstanceServer
from shmserve.loop import Loop, exit_on_signals
from shmserve.notify import Notifier
from shmserve.progress import Reporter, write_line
from shmserve.wiring import Wiring

HEALTH_CHECK_S: Final = 1.0
STOP_GRACE_S: Final = 5.0
"""From "stop" to SIGKILL; one second for a child that still loads and so has nothing to finish."""

Prepare = Callable[[Config, Callable[[str, float | None], None]], Config]
"""Makes the model ready; gives the config with its folder and name."""


class SupervisorError(RuntimeError):
    """It cannot go on; the text is one line for the operator."""


@dataclass(slots=True)
class Post:
    """One place to be filled: worker j or front end i. `child` is None between a death and the next start."""

    role: str
    index: int
    is_external: bool
    policy: RestartPolicy
    child: Child | None = None
    epoch: int = 0
    state: str = "starting"  # as told to the front ends: loading ready stopped hung dead
    reason: str = ""
    phase: str = ""
    fraction: float = 0.0
    since: float = field(default_factory=time.time)


class Supervisor:
    """`run` is the whole life. `command` gives the children's argv; roles in `external` are not started but join by hand."""

    def __init__(
        self,
        config: Config,
        *,
        prepare: Prepare,
        reporter: Reporter,
        environ: MutableMapping[str, str],
        command: Command = child_command,
        external: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self._prepare = prepare
        self._report = reporter
        self._environ = environ
        self._command = command
        self._external = external
        self._state = "starting"  # ready degraded draining stopping
        self._was_ready = False
        self._since = time.time()
        self._error = ""
        self._last_check_ns = time.monotonic_ns()
        self._is_over = False

    # --- a life

    def run(self) -> int:
        """Serve until stopped; the exit code. Raises the claim's errors, SegmentError, SupervisorError: one line each.

        Main thread only: it takes the signals over and, once it has served, leaves them ignored.
        """
        exit_on_signals(TERMINAL_SIGNALS)
        self.config.validate()
        self._notifier = Notifier(self._environ)
        try:
            claimed = claim(self.config, self._environ)
            try:
                self.config = claimed.config
                self._serve(claimed)
            finally:
                claimed.close()
        finally:
            self._report.finish()
            self._notifier.send(STOPPING=1)
            self._notifier.close()
        if self._error:
            raise SupervisorError(self._error)
        return 0

    def _serve(self, claimed: Claim) -> None:
        _raise_descriptor_limit()
        self._url = claimed.listeners.url
        self.config = self._prepare(self.config, self._report_loading)
        self._loop = Loop()
        try:
            self._loop.watch_signals(
                {s: self.drain for s in TERMINAL_SIGNALS} | {signal.SIGCHLD: self._look_at_children}
            )
            self._wiring = Wiring(self.config, claimed.listeners, claimed.next_epoch)
            self._posts = self._make_posts()
            server = InstanceServer(claimed.lock, self._loop, self)
            try:
                self._start_all()
                while not self._is_over:
                    self._loop.turn()
            finally:
                self._end_children()
                server.close()
                self._wiring.close()
        finally:
            self._loop.close()

    def _make_posts(self) -> list[Post]:
        # Front ends first: they answer 503 with the progress while the workers load.
        return [
            Post(role, index, role in self._external, RestartPolicy(first_delay_s=delay))
            for role, count, delay in (
                (HTTP, self.config.num_http, 0.0),
                (WORKER, self.config.num_workers, 1.0),
            )
            for index in range(count)
        ]

    def _start_all(self) -> None:
        epoch = self._wiring.epoch
        if not self._external:
            self._wiring.reserve(epoch, self.config.num_http, self.config.num_workers)
        for post in self._posts:
            if not post.is_external:
                self._fill(post, epoch)
            else:
                self._report.say(f"waiting for {post.role} {post.index} to join {self._url}")
        self._tick()
        self._check_health()
        if self._notifier.watchdog_s:
            self._feed_watchdog()

    # --- children

    def _children(self) -> Iterator[Child]:
        return (post.child for post in self._posts if post.child is not None)

    def _fill(self, post: Post, epoch: int = 0) -> None:
        """Start a child for `post`."""
        epoch = epoch or self._wiring.next_epoch()
        board = self._wiring.new_board(post.role, post.index, epoch)
        try:
            child = Child.spawn(
                post.role, post.index, epoch, board, self._command, self._environ
            )
        except BaseException as error:
            board.segment.unlink()
            board.close()
            if isinstance(error, OSError):
                raise SupervisorError(f"cannot start {post.role} {post.index}: {error}") from None
            raise
        self._settle(post, child)

    def join(self, role: str, index: int, link: ControlLink, pid: int) -> str:
        """Take in a process that was started by hand; why not, or "". Called by the instance socket."""
        post = next((p for p in self._posts if (p.role, p.index) == (role, index)), None)
        if post is None:
            return f"there is no {role} {index} in this instance"
        if not post.is_external or post.child is not None:
            return f"{role} {index} is taken (start the instance with --external {role})"
        if self._state in ("draining", "stopping"):
            return "the instance is ending"
        epoch = self._wiring.next_epoch()
        board = self._wiring.new_board(role, index, epoch)
        self._settle(post, Child(role, index, epoch, board, link, None, pid))
        return ""

    def _settle(self, post: Post, child: Child) -> None:
        others = list(self._children())
        post.child, post.epoch, post.since = child, child.epoch, time.time()
        self._loop.add(child.link, lambda: self._read(post, child))
        self._wiring.welcome(child, others)
        if child.role == HTTP:
            for worker in self._posts:
                if worker.role == WORKER:
                    child.send(self._worker_message(worker))
        self._set_state(post, "loading")
        self._wiring.connect(child, others)

    def _read(self, post: Post, child: Child) -> None:
        for message in child.receive():
            self._take(post, child, message)
        if not child.is_link_open:
            self._loop.remove(child.link)
            if child.is_external:
                self._bury(post, child)
                return
            # Its exit follows within a moment, or it closed the link and stays: then it is of no use.
            self._loop.after(STOP_GRACE_S, lambda: self._kill_if(child, "it left its control link"))

    def _take(self, post: Post, child: Child, message: Message) -> None:
        kind = message["type"]
        if kind == "loading":
            post.phase = str(message.get("phase", ""))
            post.fraction = float(message.get("fraction") or 0.0)
            self._set_state(post, "loading", force=True)
            if post.role == WORKER:
                self._report_loading(f"{child.name}: {post.phase}", post.fraction)
        elif kind == "ready":
            child.is_ready = True
            self._set_state(post, "ready")
            self._look_if_ready(post, child)
        elif kind == "failed":
            child.failure = " ".join(str(message.get("error", "")).split()) or "it failed"
            self._loop.after(STOP_GRACE_S, lambda: self._kill_if(child, child.failure))
        elif kind == "drained":
            child.has_drained = True
            self._look_if_drained()
        else:
            child.kill(f"it sent an unknown control message {kind!r}")

    def _kill_if(self, child: Child, reason: str) -> None:
        if any(child is living for living in self._children()):
            child.kill(reason)

    def _look_at_children(self) -> None:
        """SIGCHLD: somebody ended, was stopped, or was continued."""
        for post in self._posts:
            child = post.child
            if child is None:
                continue
            if child.exit_reason() is not None:
                self._bury(post, child)
            elif child.poll_stopped():
                self._judge(post, child)

    def _bury(self, post: Post, child: Child) -> None:
        """A child is gone: tell everybody, remove what was its own, and see to a successor."""
        if child.is_link_open:
            self._loop.remove(child.link)
            for message in child.receive():  # its last words
                self._take(post, child, message)
        reason = child.exit_reason() or "gone"
        post.child = None
        self._set_state(post, "dead", reason)
        self._wiring.disconnect(child, self._children())
        if self._state == "stopping":
            self._is_over = not any(self._children())
            return
        if self._state == "draining":
            self._report.say(f"{child.name} (pid {child.pid}) died: {reason}", is_warning=True)
            self._look_if_drained()
            return
        self._replace(post, child, reason)

    def _replace(self, post: Post, child: Child, reason: str) -> None:
        if child.failure and not self._was_ready:
            self._give_up(child.failure)
            return
        delay = post.policy.died(time.monotonic())
        died = f"{child.name} (pid {child.pid}) died: {reason}"
        self._wiring.board[f"{post.role}_restarts"] = post.policy.num_deaths
        if post.is_external:
            self._report.say(f"{died}; waiting for another to join", is_warning=True)
        elif delay is None:
            self._give_up(f"{died}; that was the {RestartPolicy.MOST_DEATHS}th in 5 minutes")
        else:
            self._report.say(f"{died}; the next one starts in {delay:g} s", is_warning=True)
            self._loop.after(delay, lambda: self._refill(post))
        self._look_if_ready(post, child)

    def _refill(self, post: Post) -> None:
        if post.child is None and self._state not in ("draining", "stopping"):
            self._fill(post)

    # --- states

    def _set_state(self, post: Post, state: str, reason: str = "", force: bool = False) -> None:
        if (post.state, post.reason) == (state, reason) and not force:
            return
        post.state, post.reason = state, reason
        if post.role == WORKER:
            for child in self._children():
                if child.role == HTTP:
                    child.send(self._worker_message(post))
