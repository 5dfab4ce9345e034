"""Runs a real Supervisor over fake children, or over the real front end and a strange worker: for tests, as a process of its own.

run_supervisor.py JSON       {"config": {...}, "modes": {"http": "", "worker": ""}, "prepare_s": 0, "external": [],
                              "strange": folder of strange_worker.py, or "", "restarts": {name in RestartPolicy: value},
                              "interpreter": what runs fake children, or ""}
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from shmserve.children import HTTP, child_command
from shmserve.config import Config
from shmserve.health import RestartPolicy
from shmserve.progress import Reporter
from shmserve.supervisor import Supervisor

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))
STRANGE_WORKER = str(Path(__file__).with_name("strange_worker.py"))


def main() -> int:
    options = json.loads(sys.argv[1])
    strange = options["strange"]
    for name, value in options["restarts"].items():
        setattr(RestartPolicy, name, value)

    def command(role: str, control: str) -> list[str]:
        if strange and role == HTTP:
            return child_command(role, control)
        if strange:
            return [sys.executable, STRANGE_WORKER, strange, "--control", control]
        return [
            options.get("interpreter") or sys.executable,
            FAKE_CHILD,
            role,
            options["modes"].get(role, ""),
            "--control",
            control,
        ]

    def prepare(config: Config, progress: object) -> Config:
        assert callable(progress)
        progress("preparing", None)
        time.sleep(options["prepare_s"])
        if strange:
            from shmserve.models import DEFAULT_MODEL  # heavy, and most tests do without
            from shmserve.models import prepare as prepare_model

            model = prepare_model(DEFAULT_MODEL)
            named = replace(config.model, folder=str(model.folder), served_name=model.name)
            return replace(config, model=named)
        return config

    supervisor = Supervisor(
        Config.from_builtins(options["config"]),
        prepare=prepare,
        reporter=Reporter(sys.stderr),
        environ=os.environ,
        command=command,
        external=frozenset(options["external"]),
    )
    try:
        return supervisor.run()
    except (RuntimeError, OSError, ValueError) as error:
        print(f"shmserve: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
