"""The unit in a real systemd: booted in a container, where this machine can do that."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "systemd_boot.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.getuid() != 0, reason="booting a container needs root")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Debian 12 has Python 3.11")
@pytest.mark.skipif(
    not (shutil.which("systemd-nspawn") and shutil.which("debootstrap")),
    reason="systemd-container and debootstrap are not installed",
)
def test_a_real_systemd_starts_watches_restarts_and_stops_the_unit() -> None:
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 14
    assert all(line.startswith("ok ") for line in lines)
