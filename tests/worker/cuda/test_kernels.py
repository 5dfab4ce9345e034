"""The kernels under triton's interpreter: runs interpreted_kernels.py in a process of its own, for triton reads TRITON_INTERPRET once,
and tells of each operation what became of its cases."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]

CASES = Path(__file__).with_name("interpreted_kernels.py")
OPERATIONS = ("embed", "norm", "rotary", "decode", "prefill", "gated_mul", "gemv", "sample")


def failures_of(report: Path) -> dict[str, list[str]]:
    """What went wrong, for each operation that had a case; a case is named test_<operation>_..."""
    outcomes: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].removeprefix("test_")
        (operation,) = [known for known in OPERATIONS if name.startswith(f"{known}_")]
        wrong = [part for part in case if part.tag in ("failure", "error", "skipped")]
        outcomes.setdefault(operation, []).extend(
            f"{name}\n{part.attrib.get('message', '')}\n{part.text or ''}" for part in wrong
        )
    return outcomes


def interpreted(report: Path, which: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "pytest", str(CASES), "-m", which, f"--junitxml={report}"]
    # NaN and infinities are what these cases are about; numpy would warn of them.
    command += ["-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "-o", "timeout=300"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return failures_of(report)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return interpreted(tmp_path_factory.mktemp("interpreted") / "report.xml", "not slow")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interpreted_kernel_agrees_with_its_reference(outcomes, operation):
    assert operation in outcomes, "none of its cases ran"
    assert not outcomes[operation], "\n\n".join(outcomes[operation])


@pytest.mark.slow
def test_every_combination_of_shapes_agrees_with_the_reference(tmp_path):
    outcomes = interpreted(tmp_path / "report.xml", "slow")
    assert set(outcomes) == {"rotary", "decode", "prefill"}
    assert not any(outcomes.values()), "\n\n".join(
        text for each in outcomes.values() for text in each
    )
