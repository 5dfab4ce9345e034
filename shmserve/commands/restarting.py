"""Starting in the background: a first time by `start --daemon`, and again as a running instance was started.

Owns: the log file's place, and what of a process says how it was started. Never: serves. Commands only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from shmserve.child import with_source_tree
from shmserve.claim import default_instance
from shmserve.commands.ending import ANSWER_TIMEOUT_S
from shmserve.commands.find import Instance
from shmserve.config import Config, ConfigError
from shmserve.daemon import launch
from shmserve.instance_socket import InstanceError, ask
from shmserve.log_file import state_dir
from shmserve.progress import Reporter


@dataclass(frozen=True, slots=True)
class Origin:
    """How a process was started: what its kernel says. `log_file` is "" if it speaks to a terminal."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: str
    log_file: str


def start_in_background(config: Config, args: Sequence[str], stderr: TextIO) -> str:
    """Run `shmserve ARGS`, less --daemon, in the background; the line that says it is ready."""
    if not config.instance and not config.http.uds and config.http.port == 0:
        raise ConfigError(
            "--daemon with --port 0 needs --instance: the log, stop and status go by the name"
        )
    # -P, as for the children: a file in the working directory must not shadow a module.
    argv = [sys.executable, "-P", "-m", "shmserve", *(arg for arg in args if arg != "--daemon")]
    environ = with_source_tree(os.environ)
    origin = Origin(tuple(argv), environ, os.getcwd(), config.log_file)
    return again(origin, default_instance(config), stderr)


def again(origin: Origin, name: str, stderr: TextIO) -> str:
    """Start it in the background; the line that says it is ready. Raises DaemonError with the line that says why not."""
    argv, log_path = origin.argv, origin.log_file
    if not log_path:
        log_path = os.path.join(state_dir(origin.environ), f"{name}.log")
        argv = (*argv, f"--log-file={log_path}")
    reporter = Reporter(stderr)

    def show(status: str) -> None:
        reporter(status, None)

    try:
        return launch(
            argv,
            environ=origin.environ,
            cwd=origin.cwd,
            log_path=os.path.join(origin.cwd, log_path),
            on_status=show,
        )
    finally:
        reporter.finish()


def origin_of(instance: Instance) -> Origin:
    """How a running instance was started. Raises InstanceError if that is not ours to repeat."""
    answer = ask(instance.directory, instance.name, {"type": "status"}, ANSWER_TIMEOUT_S)
    pid = answer["pid"]
    if pid == 1:
        raise InstanceError(
            f"instance {instance.name!r} is process 1 of its container, which ends with it; restart the container"
        )
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            argv = tuple(os.fsdecode(part) for part in file.read().split(b"\0")[:-1])
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = [os.fsdecode(part).partition("=") for part in file.read().split(b"\0")]
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError as error:
        raise InstanceError(
            f"instance {instance.name!r} (pid {pid}) cannot be looked at: {error.strerror}"
        ) from None
    environ = {key: value for key, _, value in pairs if key}
    if environ.get("NOTIFY_SOCKET", "").startswith("/"):
        raise InstanceError(
            f"instance {instance.name!r} belongs to a service manager; restart it there "
            "(systemctl restart UNIT)"
        )
    return Origin(argv, environ, cwd, answer["log_file"])
