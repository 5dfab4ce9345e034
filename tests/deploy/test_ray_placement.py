"""deploy/ray: two nodes on loopback, and the service is back when a server, an actor or a node is gone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)]

CLUSTER = Path(__file__).with_name("ray_cluster.py")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "ray"


def test_two_nodes_serve_and_a_lost_one_is_replaced_and_forgotten(default_model, tmp_path):
    smg = shutil.which(str(Path(sys.executable).parent / "smg"))
    if smg is None or importlib.util.find_spec("ray") is None:
        pytest.skip("smg or ray is not installed: pip install '.[router,ray]'")
    environ = dict(os.environ) | {"PYTHONPATH": f"{DEPLOY}:{CLUSTER.parents[2]}"}
    environ |= {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, str(CLUSTER), str(tmp_path), smg],
        env=environ,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    stages = {each["stage"]: each for each in told}
    assert list(stages) == [
        "placed",
        "asked",
        "server killed",
        "actor killed",
        "node lost",
        "drained",
    ]
    assert all(each["status"] == 200 for each in told if each["stage"] == "asked")
    assert stages["actor killed"]["is_new"] is True
    assert stages["node lost"]["meanwhile"] == 200, "the other node did not serve"
    assert stages["node lost"]["old_answers"] == 0, "the server of the lost node still runs"
    assert stages["drained"] == {"stage": "drained", "codes": [0, 0]}
