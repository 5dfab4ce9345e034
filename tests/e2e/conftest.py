"""The real model behind a real server, once for all tests of this folder; and the simulated one for clients that need speed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.models import PreparedModel

HTTP_TESTS = str(Path(__file__).resolve().parents[1] / "http")
if HTTP_TESTS not in sys.path:
    sys.path.insert(0, HTTP_TESTS)

from serving import Server, Wire  # noqa: E402


def _serve(folders: pytest.TempPathFactory, name: str, *flags: str) -> Iterator[Server]:
    server = Server(folders.mktemp(name), f"test-e2e-{os.getpid()}-{name}", *flags)
    try:
        yield server.wait_ready(patience_s=120.0)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def real(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "real", "--max-num-seqs=8")


@pytest.fixture(scope="session")
def simulated(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from _serve(tmp_path_factory, "simulated", "--runner=simulated", "--step-ms=2")


@pytest.fixture
def short(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A simulated server of a small context: who asks for no limit gets a short answer."""
    flags = ("--runner=simulated", "--step-ms=0.5", "--max-model-len=256")
    yield from _serve(tmp_path_factory, "short", *flags)


@pytest.fixture
def mortal(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A simulated server of the test's own, slow enough to be killed in the middle of an answer."""
    yield from _serve(tmp_path_factory, "mortal", "--runner=simulated", "--step-ms=20")


@pytest.fixture
def force() -> Callable[[int], dict[str, object]]:
    """force(id): the fields that make a server give this token at every step."""
    return lambda token_id: {"temperature": 0, "logit_bias": {str(token_id): 100}}


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """wire(server): a bare connection, closed at the end of the test."""
    wires: list[Wire] = []

    def connect(server: Server) -> Wire:
        wires.append(Wire(server.port))
        return wires[-1]

    yield connect
    for each in wires:
        each.close()
