"""One simulated server for most tests of this folder, and others with flags of their own when a test asks for them."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve.boards import http_board
from shmserve.models import PreparedModel
from shmserve.rings.board import Board

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:  # serving.py, puppet.py: shared by this folder's tests and tests/e2e
    sys.path.insert(0, HERE)

from serving import Asker, Server, Wire  # noqa: E402

_numbers = itertools.count()

# <tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>
WEATHER_CALL = (
    44, 19324, 79, 4350, 46, 198, 39428, 1245, 1799, 476, 726, 79, 29624, 1002, 476, 24370,
    1799, 9583, 20721, 1799, 476, 74, 7170, 5130, 18, 17859, 198, 9617, 19324, 79, 4350, 46,
)  # fmt: skip
SCRIPTS = {
    "dabelske": [[143], [233], [5415], [82], [1025], [91], [2756]],
    "emoji": [[19556], [10813], [242], [218], [17]],
    "hello_world_world": [[19556], [905], [905]],
    "replacement_inside": [[19556], [24211], [17]],
    "replacement_last": [[486], [24211]],
    "special_inside": [[19556], [0], [905]],
    "bad_order": [[10813], [242], [242], [218]],
    "unfinished_then_plain": [[19556], [10813], [17], [905], [10813], [242], [905]],
    "dog_then_eos": [[2767], [2]],
    "one_two_three_four_at_once": [[537, 827, 1296, 1876]],
    "one_two_three_four": [[537], [827], [1296], [1876]],
    "stop_inside_limit": [[33, 34], [48124, 35, 36, 37]],
    "stop_behind_limit": [[33, 34, 35], [36, 37, 48124]],
    "separators": [[81], [321], [118], [82], [141], [223], [83], [201], [198], [84]],
    "weather_call": [[i] for i in WEATHER_CALL] + [[2]],
    "two_weather_calls": [[i] for i in (*WEATHER_CALL, 198, *WEATHER_CALL)] + [[2]],
    "twenty_at_once": [[537, 827, 1296, 1876] * 5],
}
SEEDS = {name: 1_000_000 + i for i, name in enumerate(SCRIPTS)}
# Answers told as text: the seed that brings it, and its words. A stop token ends each.
TEXTS = {
    2_000_001: 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>',
    2_000_002: '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {"city": "B"}}</tool_call>',
    2_000_003: "No tool is needed for 1 < 2.",
    2_000_004: '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
    2_000_006: " so be it.</think>\nYes.",
    2_000_005: 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
}


@pytest.fixture(scope="session")
def script_file(default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.json"
    tokenizer = default_model.tokenizer()
    scripts = {SEEDS[name]: steps for name, steps in SCRIPTS.items()}
    for seed, text in TEXTS.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        scripts[seed] = [[token_id] for token_id in ids] + [[2]]
    path.write_text(json.dumps(scripts))
    return path


class Starter:
    """Starts simulated servers, and at the end looks after them: each must end well and leave nothing."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._servers: list[Server] = []

    def __call__(self, *flags: str) -> Server:
        name = f"test-http-{os.getpid()}-{next(_numbers)}"
        server = Server(self._folders.mktemp("server"), name, "--runner=simulated", *flags)
        self._servers.append(server)
        return server.wait_ready()

    def stop(self) -> None:
        failures = []
        for server in self._servers:
            try:
                server.stop()
            except AssertionError as error:
                failures.append(error)
        assert not failures, failures


@pytest.fixture(scope="module")
def start_server(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starter]:
    """start_server(*flags): a simulated server of the module's own."""
    starter = Starter(tmp_path_factory)
    yield starter
    starter.stop()


@pytest.fixture(scope="session")
def server(
    default_model: PreparedModel, tmp_path_factory: pytest.TempPathFactory, script_file: Path
) -> Iterator[Server]:
    """The simulated server that most tests share: the scripts of the cases, and bounds small enough to meet."""
    starter = Starter(tmp_path_factory)
    yield starter(
        "--step-ms=1",
        f"--script={script_file}",
        "--max-body-bytes=4M",
        "--slow-client-bytes=16384",
        "--trust-request-chat-template",
    )
    starter.stop()


@pytest.fixture
def asker(server: Server) -> Iterator[Asker]:
    """The shared server; what a test leaves running is a fault of the server or of the test."""
    yield server
    server.wait_idle()


@pytest.fixture(scope="session")
def texts() -> dict[int, str]:
    """The texts that the shared server answers with, by the seed that asks for it."""
    return TEXTS


@pytest.fixture
def seed_of() -> Callable[[str], int]:
    """seed_of(name of a script): the seed that chooses it."""
    return SEEDS.__getitem__


@pytest.fixture
def ids_of() -> Callable[[str], list[int]]:
    """ids_of(name of a script): all its ids in one list."""
    return lambda name: [token_id for step in SCRIPTS[name] for token_id in step]


@pytest.fixture
def force() -> Callable[[int], dict[str, object]]:
    """force(id): the fields that make a server give this token at every step."""
    return lambda token_id: {"temperature": 0, "logit_bias": {str(token_id): 100}}


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    """wire(server, receive_buffer=0): a bare connection, closed at the end of the test."""
    wires: list[Wire] = []

    def connect(server: Server, receive_buffer: int = 0) -> Wire:
        wires.append(Wire(server.port, receive_buffer))
        return wires[-1]

    yield connect
    for each in wires:
        each.close()


@pytest.fixture
def board() -> Iterator[Board]:
    """A front end's board that no process looks at."""
    name = Board.name(f"test-board-{os.getpid()}", 1, "http", 0)
    made = Board.create(name, http_board(4), 1)
    yield made
    made.segment.unlink()
    made.close()


@pytest.fixture
def goes_on(asker: Asker) -> Iterator[None]:
    """After what the test has asked for, a normal request works."""
    yield
    assert len(asker.text(prompt="Hi", max_tokens=2)) > 0
