"""Models and ranks that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # together.py
    sys.path.insert(0, HERE)

from together import SIZES, Together  # noqa: E402


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`toy(...)`: a random llama whose config.json has these changes."""

    def make(**changes: Any) -> Any:
        folder = tmp_path_factory.mktemp("toy") / "model"
        return checkpoints.prepared(checkpoints.write_toy(folder, scale=0.15, **SIZES | changes))

    return make


@pytest.fixture
def together() -> Iterator[Callable[..., Together]]:
    """Ranks that are ended with the test: together(num_ranks, make)."""
    made: list[Together] = []

    def start(*args: Any) -> Together:
        made.append(Together(*args))
        return made[-1]

    yield start
    for each in made:
        each.close()
