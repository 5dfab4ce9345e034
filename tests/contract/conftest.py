"""One keyed server, small enough to be filled, for what routers rely on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.models import PreparedModel

HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent / "http")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from keyed import FLAGS, Keyed  # noqa: E402


@pytest.fixture(scope="module")
def behind(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    """The server behind the router that is not there."""
    server = Keyed(tmp_path_factory.mktemp("contract"), f"test-contract-{os.getpid()}", *FLAGS)
    try:
        yield server.wait_ready()
    finally:
        server.stop()
