"""The supervisor's hook at a death: what is recorded of it, and what is said about that.

Owns: whether and what `crash_dump.py` records, and its line in the log. Never: waits for a disk, or fails: a dump that cannot be
written is one warning. Supervisor only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from shmserve.children import Child
from shmserve.config import Config
from shmserve.crash_dump import CrashRecorder, Outcome
from shmserve.log_file import LogError, state_path
from shmserve.loop import Loop
from shmserve.progress import Reporter
from shmserve.recording import Death
from shmserve.wiring import Wiring


class DeathRecords:
    """Of one instance, from its start to its end. Does nothing if `config.crash_dump` says so."""

    def __init__(
        self,
        config: Config,
        *,
        wiring: Wiring,
        loop: Loop,
        reporter: Reporter,
        environ: Mapping[str, str],
    ) -> None:
        self._wiring = wiring
        self._loop = loop
        self._report = reporter
        self._recorder: CrashRecorder | None = None
        if not config.crash_dump:
            return
        try:
            folder = os.path.join(state_path(environ), config.instance_name)
        except LogError as error:
            reporter.say(f"no crash dumps: {error}", is_warning=True)
            return
        self._recorder = CrashRecorder(
            folder,
            config.instance_name,
            model=config.model.served_name,
            model_folder=config.model.folder,
            with_contents=config.http.log_prompts,
        )
        loop.add(self._recorder.done.fd, self._tell)

    def record(self, child: Child, reason: str, others: Iterable[Child]) -> None:
        """`child`, which served, is dead. Call before its rings and its board are removed."""
        if self._recorder is None or not child.is_ready:
            return
        boards = [child.board.segment.name, self._wiring.board.segment.name]
        boards += [other.board.segment.name for other in others if other.role != child.role]
        death = Death(child.role, child.index, child.pid, reason)
        self._recorder.record(death, self._wiring.rings_of(child), boards)
        self._show()

    def _tell(self) -> None:
        assert self._recorder is not None
        for outcome in self._recorder.outcomes():
            self._say(outcome)
        self._show()

    def _say(self, outcome: Outcome) -> None:
        name = f"{outcome.death.role} {outcome.death.index} (pid {outcome.death.pid})"
        if outcome.path:
            self._wiring.board.add("num_crash_dumps")
            self._report.say(f"what the rings of {name} held: shmserve dump {outcome.path}")
        else:
            self._wiring.board.add("num_crash_dumps_lost")
            self._report.say(f"no crash dump of {name}: {outcome.error}", is_warning=True)

    def _show(self) -> None:
        assert self._recorder is not None
        self._wiring.board["crash_dumps_waiting"] = self._recorder.num_waiting

    def close(self) -> None:
        """The end of the instance. Its loop and its board must still be there."""
        if self._recorder is None:
            return
        self._loop.remove(self._recorder.done.fd)
        for outcome in self._recorder.close():
            self._say(outcome)
