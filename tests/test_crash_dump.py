"""The dump's file and its keeper: whole or not there, ours alone, five of them, and never in the supervisor's way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve import crash_dump
from shmserve.boards import WORKER_BOARD, http_board
from shmserve.crash_dump import CrashRecorder, DumpError, Outcome, dumps_in, read_dump, write_dump
from shmserve.dump_output import to_text
from shmserve.recording import Death, Recording, take
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.wire.finish import pack_message
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKEN_SLOT_BYTES

DEATH = Death("worker", 0, 4711, "killed by SIGKILL")
_numbers = itertools.count()


class Segments:
    """What a dying child has: a channel with something in it, and the boards of both sides."""

    def __init__(self) -> None:
        self.instance = f"testcrash{os.getpid()}-{next(_numbers)}"
        shapes = RingShape(SUBMIT_SLOT_BYTES, 4), RingShape(TOKEN_SLOT_BYTES, 16)
        self.channel = Channel.create(self.instance, 1, 0, 0, *shapes)
        self.boards = [
            Board.create(Board.name(self.instance, 1, role, 0), spec, 1)
            for role, spec in (("worker", WORKER_BOARD), ("http", http_board(4)))
        ]
        self.boards[0]["step"] = 12
        self.boards[1].rosters["requests"].enter(2, 0x102, 0, 5, 6, 7)
        self.tokens = self.channel.tokens.producer()
        for n in range(20):
            if n == 16:
                consumer = self.channel.tokens.consumer()
                consumer.poll()
                consumer.release(16)
            assert self.tokens.try_write(pack_message(n + 1, f"record {n}", time_ns=n + 1), 1)

    @property
    def rings(self) -> list[str]:
        return [self.channel.submit.segment.name, self.channel.tokens.segment.name]

    @property
    def board_names(self) -> list[str]:
        return [board.segment.name for board in self.boards]

    def remove_names(self) -> None:
        self.channel.unlink()
        for board in self.boards:
            board.segment.unlink()

    def close(self) -> None:
        self.remove_names()
        self.channel.close()
        for board in self.boards:
            board.close()


@pytest.fixture
def segments() -> Iterator[Segments]:
    made = Segments()
    yield made
    made.close()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[..., CrashRecorder]]:
    """recorder(folder="dumps", with_contents=False): one that is closed at the end."""
    made: list[CrashRecorder] = []

    def create(folder: str = "dumps", with_contents: bool = False) -> CrashRecorder:
        made.append(
            CrashRecorder(
                str(tmp_path / folder),
                "anything",
                model="m",
                model_folder="/models/m",
                with_contents=with_contents,
            )
        )
        return made[-1]

    yield create
    for each in made:
        each.close()


def wait_for(recorder: CrashRecorder, count: int = 1) -> list[Outcome]:
    found: list[Outcome] = []
    while len(found) < count:
        ready, _, _ = select.select([recorder.done.fd], [], [], 30)
        assert ready, "nothing was written"
        found += recorder.outcomes()
    return found


def record(recorder: CrashRecorder, segments: Segments) -> None:
    recorder.record(DEATH, segments.rings, segments.board_names)


def test_dump_holds_what_the_segments_held_when_their_names_are_gone(
    segments: Segments, recorder: Callable[..., CrashRecorder]
) -> None:
    whole = take(segments.instance)
    keeper = recorder()
    record(keeper, segments)
    segments.remove_names()
    (outcome,) = wait_for(keeper)
    assert (outcome.death, outcome.error) == (DEATH, "")
    read = read_dump(outcome.path)
    assert [ring.slots for ring in read.rings] == [ring.slots for ring in whole.rings]
    assert [ring.words for ring in read.rings] == [ring.words for ring in whole.rings]
    assert read.boards[0].words["step"] == 12
    assert [row["req_id"] for row in read.boards[1].requests] == [0x102]
    assert (read.death, read.model, read.model_folder) == (DEATH, "m", "/models/m")
    assert read.rings[1].first == 4 and read.rings[1].num_slots == 16  # it has gone round


def test_dump_is_readable_by_its_owner_only(
    segments: Segments, recorder: Callable[..., CrashRecorder]
) -> None:
    mask = os.umask(0)
    try:
        keeper = recorder()
        record(keeper, segments)
        (outcome,) = wait_for(keeper)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(outcome.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(outcome.path)).st_mode) == 0o700


@pytest.mark.parametrize("with_contents", [False, True])
def test_what_clients_sent_is_written_only_where_it_may_be_logged(
    segments: Segments, recorder: Callable[..., CrashRecorder], with_contents: bool
) -> None:
    slot = bytearray(SUBMIT_SLOT_BYTES)
    slot[8], slot[3000:3006] = 1, b"secret"
    assert segments.channel.submit.producer().try_write(bytes(slot), 1)
    keeper = recorder(with_contents=with_contents)
    record(keeper, segments)
    (outcome,) = wait_for(keeper)
    read = read_dump(outcome.path)
    assert (b"secret" in read.rings[0].slots) is with_contents
    assert read.has_contents is with_contents
    assert read.rings[0].num_slots == 1


def test_the_newest_five_are_kept_and_half_files_go(
    segments: Segments, recorder: Callable[..., CrashRecorder], tmp_path: Path
) -> None:
    keeper = recorder()
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "of-a-killed-one.dump.partial").touch()
    (tmp_path / "dumps" / "notes.txt").touch()
    paths = []
    for _ in range(7):
        record(keeper, segments)
        paths += [outcome.path for outcome in wait_for(keeper)]
        time.sleep(0.002)  # names go by the ms
    assert dumps_in(str(tmp_path / "dumps")) == paths[2:]
    assert len(os.listdir(tmp_path / "dumps")) == 6  # and the notes, which are not ours


def test_full_disk_is_one_line_and_leaves_no_half_file(
    segments: Segments,
    recorder: Callable[..., CrashRecorder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keeper = recorder()
    monkeypatch.setattr("shmserve.crash_dump.os.replace", fail)
    record(keeper, segments)
    (outcome,) = wait_for(keeper)
    assert outcome.path == ""
    assert outcome.error.endswith("No space left on device") and "\n" not in outcome.error
    assert os.listdir(tmp_path / "dumps") == []
    monkeypatch.undo()
    record(keeper, segments)
    assert wait_for(keeper)[0].path


def test_folder_that_cannot_be_made_is_one_line(
    segments: Segments, recorder: Callable[..., CrashRecorder], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    keeper = recorder("file/dumps")
    record(keeper, segments)
    (outcome,) = wait_for(keeper)
    assert outcome.error.startswith(f"cannot make {tmp_path}/file/dumps: Not a directory")


def test_segment_that_is_gone_is_an_outcome_and_no_exception(
    segments: Segments, recorder: Callable[..., CrashRecorder]
) -> None:
    keeper = recorder()
    segments.remove_names()
    record(keeper, segments)
    (outcome,) = wait_for(keeper)
    assert "No such file" in outcome.error


def test_disk_that_does_not_answer_costs_the_dumps_of_later_deaths_and_nothing_else(
    segments: Segments, recorder: Callable[..., CrashRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, num_begun = threading.Event(), threading.Semaphore(0)

    def write(path: str, recording: Recording) -> None:
        num_begun.release()
        assert answers.wait(30)
        write_dump(path, recording)

    monkeypatch.setattr(crash_dump, "write_dump", write)
    keeper = recorder()
    record(keeper, segments)
    assert num_begun.acquire(timeout=30)
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(crash_dump.MOST_WAITING):
        record(keeper, segments)
        time.sleep(0.002)
    assert keeper.num_waiting == crash_dump.MOST_WAITING
    record(keeper, segments)
    (lost,) = wait_for(keeper)
    assert lost.error == "the disk has not taken the former ones"
    answers.set()
    written = wait_for(keeper, crash_dump.MOST_WAITING + 1)
    assert all(outcome.path for outcome in written)
    assert len(os.listdir("/proc/self/fd")) <= num_fds  # what was mapped for them is not any more


def test_end_waits_for_the_dump_that_is_being_written(
    segments: Segments, recorder: Callable[..., CrashRecorder]
) -> None:
    keeper = recorder()
    record(keeper, segments)
    (outcome,) = keeper.close()
    assert keeper.close() == []
    assert read_dump(outcome.path).death == DEATH


@pytest.fixture
def dump_file(segments: Segments, tmp_path: Path) -> Path:
    path = tmp_path / "one.dump"
    write_dump(str(path), take(segments.instance))
    return path


def test_file_that_is_cut_anywhere_is_refused_by_name(dump_file: Path) -> None:
    whole = dump_file.read_bytes()
    cut = dump_file.with_name("cut.dump")
    for size in (0, 7, 15, 16, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(DumpError, match=str(cut)):
            read_dump(str(cut))


@pytest.mark.parametrize(
    "content",
    [b"", b"no dump at all, but a text", b"SHMDUMP1" + b"\xff" * 8, b"SHMDUMP2" + bytes(8)],
)
def test_file_of_another_kind_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(DumpError, match=str(path)):
        read_dump(str(path))
    with pytest.raises(DumpError, match="cannot read"):
        read_dump(str(tmp_path / "nobody"))


@pytest.mark.parametrize(
    ("truth", "lie"),
    [
        (b'"first":4', b'"first":9'),
        (b'"write_cursor":20', b'"write_cursor":99'),
        (b'"write_cursor":20', b'"write_curser":20'),
        (b'"slot_size":128', b'"slot_size":129'),
        (b'"capacity":16', b'"capacity":"a'),
    ],
)
def test_file_whose_head_lies_about_its_rings_is_refused(
    dump_file: Path, truth: bytes, lie: bytes
) -> None:
    whole = dump_file.read_bytes()
    assert truth in whole
    dump_file.write_bytes(whole.replace(truth, lie))
    with pytest.raises(DumpError, match="damaged"):
        read_dump(str(dump_file))


def test_no_byte_of_a_file_can_be_changed_into_a_crash(dump_file: Path) -> None:
    whole = bytearray(dump_file.read_bytes())
    rng = random.Random(3)
    for _ in range(200):
        at, value = rng.randrange(len(whole)), rng.randrange(256)
        before, whole[at] = whole[at], value
        dump_file.write_bytes(whole)
        with contextlib.suppress(DumpError):
            to_text(read_dump(str(dump_file)), 4)
        whole[at] = before
