"""Two simulated instances behind smg, of the version that the extra `router` pins. Skipped where it is not installed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.models import PreparedModel

TOOLS = str(Path(__file__).resolve().parents[3] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)

from router_fleet import KINDS, Fleet, fleet  # noqa: E402

FLAGS = ("--step-ms=20", "--max-num-seqs=40", "--queue-full-status=429", "--drain-timeout=60")
SMALL = ("--step-ms=5", "--max-num-seqs=2", "--max-queued-requests=2")


@pytest.fixture(scope="session")
def smg() -> str:
    found = shutil.which(str(Path(sys.executable).parent / "smg")) or shutil.which("smg")
    if found is None:
        pytest.skip("smg is not installed: pip install '.[router]'")
    return found


@pytest.fixture(scope="module")
def whole(
    default_model: PreparedModel, smg: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    with fleet(KINDS["smg"], tmp_path_factory.mktemp("whole"), smg, FLAGS) as standing:
        yield standing


@pytest.fixture
def behind_smg(whole: Fleet) -> Fleet:
    """The module's fleet, healed of what the test before did to it."""
    whole.restore()
    return whole


@pytest.fixture
def small_fleet(
    default_model: PreparedModel, smg: str, tmp_path: Path
) -> Iterator[Callable[..., Fleet]]:
    """small_fleet(*flags): a fleet of the test's own, of two run slots and a queue of two on each instance."""
    standing = []

    def start(*flags: str) -> Fleet:
        standing.append(fleet(KINDS["smg"], tmp_path, smg, (*SMALL, *flags)))
        return standing[-1].__enter__()

    yield start
    for each in standing:
        each.__exit__(None, None, None)
