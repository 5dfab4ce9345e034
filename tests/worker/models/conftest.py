"""Checkpoints that the tests of this folder share, each made once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # toys.py
    sys.path.insert(0, HERE)

from toys import FAMILIES, Toy, make_toy  # noqa: E402


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Toy]:
    """`toy(name)`: the checkpoint of a family, made when it is first asked for."""
    made: dict[str, Toy] = {}

    def give(name: str) -> Toy:
        if name not in made:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            made[name] = make_toy(folder, FAMILIES[name])
        return made[name]

    return give
