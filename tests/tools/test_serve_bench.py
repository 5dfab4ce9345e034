"""The load generator by its old name."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_serve.py"


@pytest.mark.slow
def test_the_old_name_is_the_command_with_its_options_and_its_exit_code():
    argv = [sys.executable, str(TOOL), "--url", "http://127.0.0.1:9", "--rate", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd="/", timeout=50)
    assert done.returncode == 1
    assert done.stderr == (
        "shmserve: error: nobody answers on http://127.0.0.1:9: Connection refused\n"
    )
