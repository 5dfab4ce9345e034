"""The children as a crew: every post filled, every death heard, told on, and made good.

Owns: the posts, who stands at each, what the front ends were told of the workers. Never: decides when the instance drains
or ends (`supervisor.py` does); it tells its captain that something changed. Supervisor only.

    death of a worker       front ends hear state "dead" and close_channel at once; a new worker after 1, 2, 4 .. 30 s
    death of a front end    workers hear close_channel; a new one at once, on the same sockets
    "failed" before the instance was ever ready, or the fifth death in five minutes: the instance gives up; a start that fails
                            counts as a death
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final

from shmserve.children import HTTP, WORKER, Child, Command, reap_adopted
from shmserve.config import Config
from shmserve.control import ControlLink, Message
from shmserve.death_records import DeathRecords
from shmserve.devices import environment_of, visible_devices
from shmserve.health_rounds import HealthRounds
from shmserve.instance_socket import InstanceError
from shmserve.loop import Loop
from shmserve.posts import Captain, Post, posts_of
from shmserve.progress import Reporter
from shmserve.wiring import Wiring

STOP_GRACE_S: Final = 5.0
LOADING_STOP_GRACE_S: Final = 1.0  # a child that still loads has nothing to finish


class SupervisorError(RuntimeError):
    """The instance cannot go on; the text is one line for the operator."""


class Crew:
    """All posts of one instance. `is_leaving` once set, nobody who dies is replaced."""

    def __init__(
        self,
        config: Config,
        *,
        wiring: Wiring,
        loop: Loop,
        captain: Captain,
        reporter: Reporter,
        command: Command,
        environ: Mapping[str, str],
        external: frozenset[str],
        records: DeathRecords,
    ) -> None:
        self._config = config
        self._wiring = wiring
        self._loop = loop
        self._captain = captain
        self._report = reporter
        self._command = command
        self._environ = environ
        self._records = records
        self._was_whole = False
        self.is_leaving = False
        self.num_cut = 0  # requests in flight that the end did not wait for
        self.posts = posts_of(config, external)
        self._rounds = HealthRounds(
            self.posts,
            config.hang_timeout_s,
            loop=loop,
            reporter=reporter,
            set_state=self._set_state,
        )

    def start(self) -> None:
        """Fill every post that is not external. Raises SegmentError before anything is started if there is no room."""
        epoch = self._wiring.epoch
        self._wiring.reserve(epoch, self._config.num_http, self._config.num_workers)
        for post in self.posts:
            if post.is_external:
                self._report.say(f"{post.role} {post.index}: waiting for it to join")
            else:
                self._fill(post, epoch)
        self._rounds.keep_watch()

    def children(self) -> Iterator[Child]:
        return (post.child for post in self.posts if post.child is not None)

    def is_whole(self) -> bool:
        """True while every post is served by a child that is ready, and neither stopped nor hung."""
        return all(post.state == "ready" for post in self.posts)

    # --- coming

    def _fill(self, post: Post, epoch: int) -> None:
        board = self._wiring.new_board(post.role, post.index, epoch)
        try:
            child = Child.spawn(
                post.role, post.index, epoch, board, self._command, self._environ_of(post)
            )
        except OSError as error:
            raise SupervisorError(f"cannot start {post.role} {post.index}: {error}") from None
        self._settle(post, child)

    def _environ_of(self, post: Post) -> Mapping[str, str]:
        if post.role != WORKER:
            return self._environ
        return environment_of(
            post.index, self._config, self._environ, visible_devices(self._environ)
        )

    def join(self, role: str, index: int, link: ControlLink, pid: int) -> str:
        """Take in a process that was started by hand; why not, or ""."""
        post = next((p for p in self.posts if (p.role, p.index) == (role, index)), None)
        if post is None:
            return f"there is no {role} {index} in this instance"
        if not post.is_external or post.child is not None:
            return f"{role} {index} is taken (a start with --external {role} leaves it free)"
        if self.is_leaving:
            return "the instance is ending"
        try:
            epoch = self._wiring.next_epoch()
            board = self._wiring.new_board(role, index, epoch)
        except (OSError, InstanceError) as error:
            return _words_of(error)
        try:
            child = Child.adopt(role, index, epoch, board, link, pid)
        except OSError as error:  # gone; or of a namespace in which we cannot see it
            return f"process {pid} cannot be watched: {error.strerror}"
        try:
            self._settle(post, child)
        except (OSError, InstanceError) as error:
            child.kill(_words_of(error), "failed")
            return ""  # its link is a child's by now, and tells of its end
        self._report.say(f"{role} {index} joined (pid {pid})")
        return ""

    def _settle(self, post: Post, child: Child) -> None:
        others = list(self.children())
        post.child = child
        self._loop.add(child.link, lambda: self._read(post, child))
        self._wiring.welcome(child, others)
        if child.role == HTTP:
            for worker in self.posts:
                if worker.role == WORKER:
                    child.send(worker.worker_message())
        post.phase, post.fraction = "starting", 0.0
        self._set_state(post, "loading")
        self._wiring.connect(child, others)

    # --- what they say

    def _read(self, post: Post, child: Child) -> None:
        for message in child.receive():
            self._hear(post, child, message)
        if child.is_link_open:
            return
        self._loop.remove(child.link)
        if child.is_external:
            self._bury(post, child)
        else:  # its exit status follows within a moment, or it stays without a link: of no use
            self._loop.after(
                STOP_GRACE_S, lambda: child.kill("it left its control link", "protocol")
            )

    def _hear(self, post: Post, child: Child, message: Message) -> None:
        try:
            self._heed(post, child, message)
        except (TypeError, ValueError, LookupError) as error:
            child.kill(f"it sent a malformed control message: {error!r}", "protocol")

    def _heed(self, post: Post, child: Child, message: Message) -> None:
        kind = message["type"]
        if kind == "loading":
            post.phase = str(message.get("phase", ""))
            post.fraction = float(message.get("fraction") or 0.0)
            self._set_state(post, "loading")
            if post.role == WORKER:
                self._captain.crew_loading(f"{child.name}: {post.phase}", post.fraction)
        elif kind == "ready":
            child.is_ready = True
            post.info = dict(message.get("info") or {})
            self._set_state(post, "ready")
            if self._was_whole:
                self._report.say(f"{child.name} is ready (pid {child.pid})")
            self._was_whole = self._was_whole or self.is_whole()
        elif kind == "failed":
            child.failure = " ".join(str(message.get("error", "")).split()) or "it failed"
            self._loop.after(STOP_GRACE_S, child.kill)
        elif kind == "drained":
            child.has_drained = True
            self._captain.crew_changed()
        elif kind == "cut":
            child.num_cut = int(message["num"])
        elif kind == "broken":
            self._accuse(child, int(message["http"]), int(message["worker"]), message)
        else:
            child.kill(f"it sent an unknown control message {kind!r}", "protocol")

    def _accuse(self, child: Child, http: int, worker: int, message: Message) -> None:
        """`child` has ended its side of a channel, since it cannot believe the other's. The other starts anew: what wrote such
        words has lost its way, and its death gives both sides a new channel."""
        role, index = (WORKER, worker) if child.role == HTTP else (HTTP, http)
        if not self._wiring.is_open(http, worker, int(message["epoch"])):
            return  # the other has died since
        fault = " ".join(str(message.get("fault", "")).split())
        self._report.say(f"{child.name} cannot believe {role} {index}: {fault}", is_warning=True)
        for post in self.posts:
            if (post.role, post.index) == (role, index) and post.child is not None:
                post.child.kill(f"{child.name} cannot believe it: {fault}", "protocol")

    def look_at_children(self) -> None:
        """SIGCHLD: somebody ended, was stopped, or was continued."""
        for post in self.posts:
            child = post.child
            if child is None:
                continue
            if child.exit_reason() is not None:
                self._bury(post, child)
            elif child.poll_stopped():
                self._rounds.judge(post, child)
        if os.getpid() == 1:
            reap_adopted({child.pid for child in self.children()})

    def _set_state(self, post: Post, state: str, reason: str = "") -> None:
        """Note the state and tell the front ends, if it or how far it loads is news."""
        is_news = (post.state, post.reason) != (state, reason)
        if post.state != state:
            post.since = time.time()
        post.state, post.reason = state, reason
        if post.role == WORKER and (is_news or state == "loading"):
            for child in self.children():
                if child.role == HTTP:
                    child.send(post.worker_message())
        if is_news:
            self._captain.crew_changed()

    # --- going

    def _bury(self, post: Post, child: Child) -> None:
        if child.is_link_open:
            self._loop.remove(child.link)
            for message in child.receive():  # its last words
                self._hear(post, child, message)
        reason = child.exit_reason() or "gone"
        if (
            not self.is_leaving
        ):  # while its rings are as it left them, and the front ends do not know
            self._records.record(child, reason, self.children())
        post.child = None
        self._count_cut(child)
        if not self.is_leaving:
            self._replace(post, child, reason)
        self._set_state(post, "dead", reason)
        self._wiring.disconnect(child, self.children())
        self._captain.crew_changed()

    def _replace(self, post: Post, child: Child, reason: str) -> None:
        delay = self._count_death(post, child.death_cause, reason)
        died = f"{child.name} (pid {child.pid}) died: {reason}"
        if child.failure and not self._was_whole:
            self._captain.crew_failed(child.failure)
        elif post.is_external:
            self._report.say(f"{died}; waiting for another to join", is_warning=True)
        elif delay is None:
            most, window_s = post.restarts.MOST_DEATHS, post.restarts.WINDOW_S
            self._captain.crew_failed(f"{died}; {most} deaths in {window_s:g} s are too many")
        else:
            self._report.say(f"{died}; the next one starts in {delay:g} s", is_warning=True)
            self._loop.after(delay, lambda: self._refill(post))

    def _count_death(self, post: Post, cause: str, reason: str) -> float | None:
        """Seconds until the next start, or None to give up."""
        self._wiring.board.add(f"{post.role}_restarts")
        self._wiring.board.add(f"{post.role}_restarts_{cause}")
        return post.died(cause, reason)

    def _refill(self, post: Post) -> None:
        if post.child is not None or self.is_leaving:
            return
        try:
            self._fill(post, self._wiring.next_epoch())
        except (OSError, SupervisorError, InstanceError) as error:
            # The others serve on: no room for a process, a segment or a descriptor may be a matter of seconds, and so is an upgrade of
            # Python.
            if post.child is not None:
                post.child.kill(_words_of(error), "failed")
            else:
                self._try_again(post, _words_of(error))

    def _try_again(self, post: Post, error: str) -> None:
        delay = self._count_death(post, "failed", error)
        if delay is None:
            self._captain.crew_failed(error)
        else:
            self._report.say(f"{error}; again in {max(delay, 1.0):g} s", is_warning=True)
            self._loop.after(max(delay, 1.0), lambda: self._refill(post))

    def drain(self) -> None:
        """Ask the front ends to finish what is in flight. `has_drained` says when."""
        self.is_leaving = True
        for child in self.children():
            if child.role == HTTP:
                child.send({"type": "drain"})

    def has_drained(self) -> bool:
        """True when no front end that ever was ready has a request in flight."""
        return all(
            child.has_drained or not child.is_ready
            for child in self.children()
            if child.role == HTTP
        )

    def _count_cut(self, child: Child) -> None:
        """Add what a front end cut at the end: by its own word, or if it had none, by its board's last."""
        if self.is_leaving and child.role == HTTP:
            own_word = child.num_cut
            self.num_cut += child.board["in_flight"] if own_word is None else own_word

    def stop(self) -> None:
        """Ask everybody to end now; SIGKILL for who has not after the grace."""
        self.is_leaving = True
        for child in self.children():
            child.send({"type": "stop"})
            grace = STOP_GRACE_S if child.is_ready else LOADING_STOP_GRACE_S
            self._loop.after(grace, child.kill)

    def kill(self) -> None:
        for child in self.children():
            child.kill()

    def end(self) -> None:
        """End and reap everybody, whatever happened before. The last tidying up."""
        self.is_leaving = True
        self.kill()
        for post in self.posts:
            child, post.child = post.child, None
            if child is None:
                continue
            if not child.wait(STOP_GRACE_S):
                self._report.say(f"{child.name} (pid {child.pid}) cannot be killed", True)
            for message in child.receive():
                self._hear(post, child, message)
            self._count_cut(child)
            self._wiring.disconnect(child, ())


def _words_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)  # without the number of an OSError
