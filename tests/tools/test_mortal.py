"""What `mortal.start` starts ends with whoever started it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import mortal
import pytest

STARTER = """
import signal, sys
import mortal
if sys.argv[1] == "without setpriv":
    which = mortal.shutil.which
    mortal.shutil.which = lambda name: None if name == "setpriv" else which(name)
child = mortal.start([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("way", ["as here", "without setpriv"])
def test_a_process_ends_with_the_one_that_started_it_however_that_is_killed(way: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, way],
        env=os.environ | {"PYTHONPATH": str(Path(mortal.__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        child = os.pidfd_open(int(starter.stdout.readline()))
        try:
            assert select.select([child], [], [], 0.2)[0] == []  # it stays while its starter does
            starter.kill()
            ended = select.select([child], [], [], 30)[0]
            if not ended:
                signal.pidfd_send_signal(child, signal.SIGKILL)
            assert ended, "the child outlived its starter"
        finally:
            os.close(child)


def test_a_program_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        mortal.start(["/no/such/program"])
