"""Runs a real Supervisor over fake children, or over whatever argv its options name: for tests, as a process of its own.

run_supervisor.py JSON       {"config": {...}, "modes": {"http": "", "worker": ""}, "prepare_s": 0, "external": []}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from shmserve.config import Config
from shmserve.progress import Reporter
from shmserve.supervisor import Supervisor

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


def main() -> int:
    options = json.loads(sys.argv[1])

    def command(role: str, control: str) -> list[str]:
        return [
            sys.executable,
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
