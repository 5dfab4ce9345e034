"""The supervisor: it starts the front ends and the workers, hears of every death, and leaves nothing behind.

Owns: the order of a life, from the claim to the last unlink, and when it ends. Never: loads torch or aiohttp, serves a request
(until there is a front end its lobby says 503), or polls: one thread sleeps in one loop, and wakes twice a second for
its heartbeat. After a death a second one writes the crash dump.

    starting --all ready--> ready <--> degraded --SIGTERM, drain--> draining --none in flight--> stopping --all gone--> end
                                                        a second signal, stop: stopping at once; a third: SIGKILL

The end is the same on every path, errors included: children ended and reaped, channels and boards unlinked, sockets closed
and removed. Only a SIGKILL of this process leaves names, and the next start sweeps those.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Final

from shmserve.boards import IDLE_HEARTBEAT_S
from shmserve.children import TERMINAL_SIGNALS, Command, child_command
from shmserve.claim import Claim, claim
from shmserve.config import Config
from shmserve.control import ControlLink, Message
from shmserve.crew import STOP_GRACE_S, Crew, SupervisorError
from shmserve.death_records import DeathRecords
from shmserve.devices import check_devices, visible_devices
from shmserve.instance_server import InstanceServer
from shmserve.lobby import Lobby
from shmserve.log_file import CHECK_S as LOG_CHECK_S
from shmserve.log_file import BoundedLog, LogError
from shmserve.loop import Loop, exit_on_signals
from shmserve.notify import Notifier, extension
from shmserve.posts import queue_of
from shmserve.progress import Reporter, write_line
from shmserve.sockets import raise_descriptor_limit
from shmserve.wiring import Wiring

Prepare = Callable[[Config, Callable[[str, float | None], None]], Config]
"""Makes the model ready and gives the config with its folder and name. Called once, before any child is started."""

_MORE_TIME_S: Final = 120.0  # what a service manager grants with every word of progress, and
_ASK_TIME_S: Final = 15.0  # how often it is asked where there is none to tell
_SPARE_S: Final = 5.0
_TOUCH_S: Final = 3600.0


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
        self._state = "starting"
        self._was_ready = False
        self._error = ""
        self._url = ""
        self._since = time.time()
        self._is_over = False
        self._notifier = Notifier(environ)

    # --- a life

    def run(self) -> int:
        """Serve until stopped; the exit code. Raises ConfigError, InstanceError, ListenError, SegmentError, SupervisorError,
        and what `prepare` raises: one line each.

        Main thread only: it takes the signals over, and leaves them ignored when it served.
        """
        faulthandler.enable(2)  # a watchdog's SIGABRT says where this process stood
        exit_on_signals(TERMINAL_SIGNALS)
        self.config.validate()
        check_devices(self.config, visible_devices(self._environ))
        try:
            claimed = claim(self.config, self._environ)
            try:
                self.config, self._url = claimed.config, claimed.listeners.url
                self.config = self._prepare_in_sight(claimed)
                self._report.finish()
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

    def _prepare_in_sight(self, claimed: Claim) -> Config:
        """Prepare the model while clients are told how far that is."""
        if self.config.http.ssl_certfile:  # who speaks TLS waits in the backlog
            return self._prepare(self.config, self.crew_loading)
        sockets = [sock for group in claimed.listeners.groups for sock in group]
        with Lobby(sockets) as lobby:

            def progress(text: str, fraction: float | None) -> None:
                lobby.tell(text, fraction)
                self.crew_loading(text, fraction)

            return self._prepare(self.config, progress)

    def _serve(self, claimed: Claim) -> None:
        raise_descriptor_limit()
        self._loop = Loop()
        try:
            self._wiring = Wiring(self.config, claimed.listeners, claimed.next_epoch)
            records = DeathRecords(
                self.config,
                wiring=self._wiring,
                loop=self._loop,
                reporter=self._report,
                environ=self._environ,
            )
            self._crew = Crew(
                self.config,
                wiring=self._wiring,
                loop=self._loop,
                captain=self,
                reporter=self._report,
                command=self._command,
                environ=self._environ,
                external=self._external,
                records=records,
            )
            server = InstanceServer(claimed.lock, self._loop, self)
            try:
                self._loop.watch_signals(
                    dict.fromkeys(TERMINAL_SIGNALS, self.drain)
                    | {signal.SIGCHLD: self._crew.look_at_children}
                )
                self._crew.start()
                self._beat()
                self._feed_watchdog()
                self._ask_for_time()
                self._bound_log()
                self._keep_files(claimed)
                while not self._is_over:
                    self._loop.turn()
            finally:
                self._crew.end()
                self._say_ended()
                server.close()
                records.close()
                self._wiring.close()
        finally:
            self._loop.close()

    def _beat(self) -> None:
        self._wiring.board["heartbeat_ns"] = time.monotonic_ns()
        self._notifier.send_missed()
        self._loop.after(IDLE_HEARTBEAT_S, self._beat)

    def _bound_log(self) -> None:
        if not self.config.log_file:
            return
        try:
            lost = BoundedLog(self.config.log_file, self.config.log_max_bytes).check()
        except LogError as error:
            self._report.say(str(error), is_warning=True)
            return  # said once: the next check would find the same
        if lost:
            self._report.say(lost, is_warning=True)
        self._loop.after(LOG_CHECK_S, self._bound_log)

    def _keep_files(self, claimed: Claim) -> None:
        """What nobody touches for days is removed from /tmp (systemd-tmpfiles), and the specification lets $XDG_RUNTIME_DIR do so after six hours."""
        claimed.lock.touch()
        self._loop.after(_TOUCH_S, lambda: self._keep_files(claimed))

    def _feed_watchdog(self) -> None:
        """WATCHDOG=1 while nobody is stopped or hung: the service manager restarts what does not get well."""
        if not self._notifier.watchdog_s:
            return
        if all(post.state not in ("stopped", "hung") for post in self._crew.posts):
            self._notifier.send(WATCHDOG=1)
        self._loop.after(self._notifier.watchdog_s, self._feed_watchdog)

    # --- what the crew tells

    def crew_changed(self) -> None:
        if self._state == "stopping":
            self._is_over = not any(self._crew.children())
        elif self._state == "draining":
            if self._crew.has_drained():
                self.stop()
        elif self._crew.is_whole():
            if not self._was_ready:
                self._was_ready = True
                self._say_ready()
            self._set_state("ready", READY=1, STATUS=f"serving on {self._url}")
        elif self._was_ready:
            ill = next(post for post in self._crew.posts if post.state != "ready")
            self._set_state("degraded", STATUS=f"{ill.role} {ill.index} is {ill.state}")

    def crew_failed(self, error: str) -> None:
        self._error = self._error or error
        self.stop()

    def crew_loading(self, text: str, fraction: float | None) -> None:
        self._report(text, fraction)
        if self._state == "starting":
            done = "" if fraction is None else f" {100 * fraction:.0f} %"
            self._notifier.send(STATUS=f"{text}{done}", **extension(_MORE_TIME_S))

    def _ask_for_time(self) -> None:
        """One phase of loading may be silent for minutes; what hangs there is ended by the rules of health.py."""
        if self._state == "starting":
            self._notifier.send(**extension(_MORE_TIME_S))
            self._loop.after(_ASK_TIME_S, self._ask_for_time)

    def _set_state(self, state: str, **news: str | int) -> None:
        if self._state != state:
            self._state, self._since = state, time.time()
            self._notifier.send(**news)

    def _say_ready(self) -> None:
        self._report.finish()
        pids = ", ".join(f"{child.name} {child.pid}" for child in self._crew.children())
        write_line(
            sys.stdout,
            f"shmserve: ready: {self._url} serves {self.config.model.served_name or 'a model'} "
            f"(pids: supervisor {os.getpid()}, {pids})",
        )

    def _say_ended(self) -> None:
        if self._state != "stopping":
            return  # it never came to serve: the error that is on its way says it all
        num = self._crew.num_cut
        word = "request was" if num == 1 else "requests were"
        self._report.say(f"ended; {num} {word} cut", is_warning=bool(num))

    # --- what the operator says: signals, and the instance socket

    def drain(self) -> None:
        """No new requests; end when none is in flight, or at the drain timeout. A second call hurries, a third kills."""
        if self._state == "stopping":
            self._crew.kill()
            return
        if self._state == "draining":
            self.stop()
            return
        timeout_s = self.config.drain_timeout_s
        extend_s = timeout_s + 2 * STOP_GRACE_S + _SPARE_S
        self._set_state("draining", STOPPING=1, STATUS="draining", **extension(extend_s))
        self._wiring.board["draining"] = 1
        self._report.say(f"draining: requests in flight get {timeout_s:g} s; once more ends now")
        self._crew.drain()
        self._loop.after(timeout_s, self._end_drain)
        self.crew_changed()

    def drain_once(self) -> None:
        """As `drain`, but who asks a second time only waits with the first: several may want one end."""
        if self._state not in ("draining", "stopping"):
            self.drain()

    def _end_drain(self) -> None:
        if self._state == "draining":
            self.stop()

    def stop(self) -> None:
        """End now: what is in flight gets an error."""
        if self._state == "stopping":
            return
        extend_s = 2 * STOP_GRACE_S + _SPARE_S
        self._set_state("stopping", STOPPING=1, STATUS="stopping", **extension(extend_s))
        self._crew.stop()
        self._loop.after(2 * STOP_GRACE_S, self._leave)
        self.crew_changed()

    def _leave(self) -> None:
        self._is_over = True  # `Crew.end` names who could not be killed

    def join(self, role: str, index: int, link: ControlLink, pid: int) -> str:
        return self._crew.join(role, index, link, pid)

    def status(self) -> Message:
        """Everything that `shmserve status` shows; `since` is seconds since 1970."""
        queue = queue_of(self._crew.children())
        return {
            "type": "status",
            "instance": self.config.instance_name,
            "pid": os.getpid(),
            "state": self._state,
            "since": self._since,
            "url": self._url,
            "model": self.config.model.served_name,
            "model_folder": self.config.model.folder,
            "in_flight": queue["in_flight"],
            "queue": queue,
            "log_file": os.path.abspath(self.config.log_file) if self.config.log_file else "",
            "children": [post.status(time.monotonic_ns()) for post in self._crew.posts],
            "channels": self._wiring.channels(),
        }
