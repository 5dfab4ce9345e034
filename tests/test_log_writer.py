from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from shmserve.log_writer import Lines, LogWriter, install


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError as error:
            assert error.errno == 9  # a test closed it


def read_until(fd: int, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        data += os.read(fd, 65_536)
    return data


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_lines_come_whole_and_in_order_from_many_threads(pipe) -> None:
    writer = LogWriter(pipe[1])

    def say(who: int) -> None:
        for i in range(200):
            writer.write(f"{who} {i}\n")

    threads = [threading.Thread(target=say, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    data = b""
    while data.count(b"\n") < 800:
        data += os.read(pipe[0], 65_536)
    for thread in threads:
        thread.join()
    lines = [line.split() for line in data.decode().splitlines()]
    for who in range(4):
        assert [i for w, i in lines if w == str(who)] == [str(i) for i in range(200)]
    assert writer.flush(20) and writer.num_lost == 0


def test_a_stalled_reader_costs_lines_and_never_the_writer(pipe) -> None:
    """Ten times the bound is written at once, to a pipe that nobody reads."""
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    writer = LogWriter(pipe[1], most_bytes=10_000)
    line = "x" * 99 + "\n"
    for _ in range(
        1000
    ):  # a write that waited would hang here, and the test's timeout would end it
        writer.write(line)
    assert writer.num_bytes <= 10_000
    assert 800 < writer.num_lost < 1000
    assert not writer.flush(0.01)
    lost = writer.num_lost
    data = read_until(pipe[0], b"nobody took them\n")
    until(lambda: not writer.num_bytes)
    writer.write("the end\n")
    data += read_until(pipe[0], b"the end\n")
    lines = data.decode().splitlines()
    assert lines.count("x" * 99) == 1000 - lost
    assert f"shmserve: {lost} lines of the log were lost here: nobody took them" in lines
    assert writer.num_lost == lost


def test_a_reader_that_is_gone_is_counted_and_ends_nothing(pipe) -> None:
    os.close(pipe[0])
    writer = LogWriter(pipe[1])  # Python ignores SIGPIPE
    writer.write("one\ntwo\n")
    assert writer.flush(20)
    assert writer.num_lost == 2


def test_text_lines_are_what_people_are_used_to() -> None:
    at = time.mktime((2026, 11, 30, 9, 50, 30, 0, 0, -1)) + 0.1234
    assert Lines("http[0]", "text").time_of(at) == "2026-11-30 09:50:30,123"


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    root.handlers[:] = before[0]
    root.setLevel(before[1])


def test_json_lines_are_json_whatever_is_said(pipe, root_log) -> None:
    writer = install("worker[3]", "info", "json", pipe[1])
    log = logging.getLogger("shmserve.test")
    log.debug("not this")
    log.info('a "quoted"\nline %d \ud800', 7)
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("it failed")
    assert writer.flush(20)
    first, second = (json.loads(line) for line in os.read(pipe[0], 65_536).splitlines())
    assert first["message"].startswith('a "quoted"\nline 7')
    assert (first["level"], first["process"], first["logger"]) == (
        "info",
        "worker[3]",
        "shmserve.test",
    )
    assert second["message"] == "it failed"
    assert second["exception"].endswith("ValueError: a\nb")


def test_text_lines_carry_their_traceback(pipe, root_log) -> None:
    writer = install("http[0]", "warning", "text", pipe[1])
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("x").error("it failed", exc_info=True)
    assert writer.flush(20)
    data = os.read(pipe[0], 65_536).decode()
    assert " ERROR http[0] it failed\nTraceback" in data
    assert data.endswith("ValueError: why\n")


def test_a_descriptor_that_somebody_made_non_blocking_loses_nothing(pipe) -> None:
    """It is of the open file, which we share with whoever started us."""
    os.set_blocking(pipe[1], False)
    writer = LogWriter(pipe[1])
    lines = [f"{number} {'x' * 1000}\n" for number in range(300)]  # more than a pipe takes
    for line in lines:
        writer.write(line)
    data = read_until(pipe[0], lines[-1].encode())
    assert data == "".join(lines).encode()
    assert writer.flush(20) and writer.num_lost == 0
