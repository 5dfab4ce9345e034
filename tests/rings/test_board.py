"""Boards: what one process shows, as the others read it."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.rings import layout as L
from shmserve.rings.board import Board, BoardReader, HistogramReading
from shmserve.rings.board_table import BoardSpec
from shmserve.rings.channel import Ring, RingShape
from shmserve.rings.observe import RingView
from shmserve.rings.segment import SegmentError

ROSTER = ("key", "bytes")
SPEC = BoardSpec(words=("heartbeat_ns", "steps"), histograms={"step_us": (10, 100), "one": (1,)})


@pytest.fixture
def board(instance):
    board = Board.create(Board.name(instance, 4, "worker", 2), SPEC, epoch=4)
    yield board
    board.segment.unlink()
    board.close()


@pytest.fixture
def reader(board):
    reader = BoardReader.attach(board.segment.name)
    yield reader
    reader.close()


def test_name_says_instance_epoch_role_and_index(board, instance):
    assert board.segment.name == f"/shmserve.{instance}.4.worker2.board"


def test_new_board_has_the_golden_header_bytes(board):
    header = bytes(board.segment.mapping[:128])
    assert header[:8] == b"SHMBORD1"
    version, epoch, num_words, table_bytes = struct.unpack_from("<QQQQ", header, 8)
    assert (version, epoch) == (1, 4)
    assert num_words * 8 == board.segment.num_bytes
    table = json.loads(board.segment.mapping[128 : 128 + table_bytes])
    first = table["words"]["heartbeat_ns"]
    assert first * 8 % 128 == 0 and first * 8 >= 128 + table_bytes
    assert table == {
        "words": {"heartbeat_ns": first, "steps": first + 1},
        "histograms": {"step_us": [first + 2, [10, 100]], "one": [first + 7, [1]]},
    }
    assert num_words == first + 2 + 5 + 4


def test_no_two_names_share_a_cell(board):
    index = {name: board.cell(name) for name in SPEC.words}
    assert len(set(index.values())) == 2
    board["heartbeat_ns"], board["steps"] = 2**64 - 1, 2**63
    for histogram in board.histograms.values():
        histogram.observe_one(5)
    assert (board["heartbeat_ns"], board["steps"]) == (2**64 - 1, 2**63)


def test_reader_sees_each_word_as_it_was_last_stored(board, reader):
    assert reader.words() == {"heartbeat_ns": 0, "steps": 0}
    board["heartbeat_ns"] = 2**64 - 1
    board.add("steps")
    board.add("steps", 41)
    assert reader.words() == {"heartbeat_ns": 2**64 - 1, "steps": 42}
    assert reader["steps"] == reader.get("steps") == board.words[board.cell("steps")] == 42
    assert reader.epoch == 4


def test_word_that_a_board_does_not_have_reads_as_the_default(reader):
    assert reader.get("kv_usage", 7) == 7
    assert reader.get("kv_usage") == 0
    with pytest.raises(KeyError):
        reader["kv_usage"]


def test_histogram_puts_a_value_on_a_bound_below_it(board, reader):
    board.histograms["step_us"].observe(np.array([0, 9, 10, 11, 100, 101, 10**6]))
    assert reader.histograms()["step_us"] == HistogramReading(
        bounds=(10, 100), counts=(3, 2, 2), count=7, sum=0 + 9 + 10 + 11 + 100 + 101 + 10**6
    )


def test_histogram_adds_up_over_batches_and_single_values(board, reader):
    histogram = board.histograms["step_us"]
    for _ in range(3):
        histogram.observe(np.array([5, 50]))
        histogram.observe_one(500)
    histogram.observe(np.array([], np.int64))
    reading = reader.histograms()["step_us"]
    assert reading.counts == (3, 3, 3)
    assert reading.count == sum(reading.counts) == 9
    assert reading.sum == 3 * 555
    assert reader.histograms()["one"].count == 0


def test_negative_values_are_counted_and_never_make_the_sum_wrap(board, reader):
    board.histograms["one"].observe(np.array([-5]))
    assert reader.histograms()["one"] == HistogramReading((1,), (1, 0), 1, 0)


def test_reader_cannot_write(reader):
    with pytest.raises(TypeError):
        reader.segment.words()[20] = 1


def test_board_is_written_by_the_child_that_was_given_it(board, reader, act):
    actor = act("write_board", board.segment.name, board.segment.fd, pass_fds=[board.segment.fd])
    assert actor.hear() == '"written"'
    assert reader["steps"] == 9
    assert reader.histograms()["step_us"].counts == (2, 1, 1)
    actor.kill()
    actor.wait()
    assert reader["steps"] == 9  # what it showed last outlives it


def test_ring_is_no_board_and_a_board_is_no_ring(instance, board):
    ring = Ring.create(f"/shmserve.{instance}.4.0-0.tokens", RingShape(8, 8), 4)
    try:
        with pytest.raises(SegmentError, match="is not a board"):
            BoardReader.attach(ring.segment.name)
        with pytest.raises(SegmentError, match="less than a ring's header"):
            RingView(board.segment.name)
    finally:
        ring.segment.unlink()
        ring.close()


def test_unfinished_board_cannot_be_attached(board):
    board.words[L.W_MAGIC] = 0
    with pytest.raises(SegmentError, match="is not a board of version 1"):
        BoardReader.attach(board.segment.name)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=settings.default.max_examples // 2,
)
@given(
    damage=st.lists(st.tuples(st.integers(128, 700), st.integers(0, 255)), min_size=1, max_size=5),
    size=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
)
def test_a_board_whose_writer_wrote_anywhere_is_refused_or_read(board, num_fds, damage, size):
    """Its readers are other processes, which must outlive it."""
    before = num_fds()
    whole = bytes(board.segment.mapping)
    for at, value in damage:
        board.segment.mapping[at % len(whole)] = value
    if size is not None:
        board.words[4] = size
    try:
        reader = BoardReader.attach(board.segment.name)
    except SegmentError as error:
        assert "table" in str(error) or "not a board" in str(error)
    else:
        assert reader.words() and reader.histograms() is not None
        reader.close()
    finally:
        board.segment.mapping[:] = whole
    assert num_fds() == before


def test_board_that_is_not_there_is_one_clear_error(instance):
    with pytest.raises(SegmentError, match=r"cannot open shared memory .*No such file"):
        BoardReader.attach(Board.name(instance, 9, "http", 0))


def test_board_with_thousands_of_cells_finds_each_of_them(instance):
    spec = BoardSpec(tuple(f"w{i}" for i in range(3000)), {"h": tuple(range(500))})
    board = Board.create(Board.name(instance, 1, "http", 0), spec, 1)
    reader = BoardReader.attach(board.segment.name)
    for i in range(3000):
        board[f"w{i}"] = i
    board.histograms["h"].observe(np.arange(501))
    assert reader.words() == {f"w{i}": i for i in range(3000)}
    assert reader.histograms()["h"].counts == (1,) * 501
    board.segment.unlink()
    reader.close()
    board.close()


@pytest.fixture
def roster_board(instance):
    spec = BoardSpec(("w",), {"h": (1,)}, {"slow": (3, ROSTER), "none": (0, ROSTER)})
    board = Board.create(Board.name(instance, 1, "http", 0), spec, 1)
    yield board
    board.segment.unlink()
    board.close()


@pytest.fixture
def roster_reader(roster_board):
    reader = BoardReader.attach(roster_board.segment.name)
    yield reader
    reader.close()


def test_roster_shows_the_rows_that_are_there_and_no_others(roster_board, roster_reader):
    slow = roster_board.rosters["slow"]
    assert roster_reader.roster("slow") == []
    slow.enter(0, 7, 100)
    slow.enter(2, 2**64 - 1, 2**63)
    assert roster_reader.roster("slow") == [
        {"key": 7, "bytes": 100},
        {"key": 2**64 - 1, "bytes": 2**63},
    ]
    slow.leave(0)
    slow.enter(2, 9, 1)
    assert roster_reader.roster("slow") == [{"key": 9, "bytes": 1}]
    slow.clear()
    assert roster_reader.roster("slow") == []
    roster_board["w"] = 5
    roster_board.histograms["h"].observe_one(0)
    assert roster_reader.roster("slow") == []  # their cells are not its own


def test_row_that_a_roster_does_not_have_is_not_shown_and_harms_nobody(roster_board, roster_reader):
    before = bytes(roster_board.segment.mapping)
    for name in ("slow", "none"):
        roster = roster_board.rosters[name]
        roster.enter(roster.num_rows, 1, 2)
        roster.leave(roster.num_rows)
    assert bytes(roster_board.segment.mapping) == before
    assert roster_reader.roster("none") == roster_reader.roster("no such roster") == []


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_row_that_changes_under_its_reader_is_whole_or_left_out(
    roster_board, roster_reader, moment
):
    """Its loads are: the key, the row, the key again."""
    roster_board.rosters["slow"].enter(0, 7, 100)
    words, num_loads = roster_reader._words, 0

    class Changing:
        def __getitem__(self, index):
            nonlocal num_loads
            value = words[index]
            if num_loads == moment:
                roster_board.rosters["slow"].enter(0, 8, 200)
            num_loads += 1
            return value

    roster_reader._words = Changing()
    old, new = [{"key": 7, "bytes": 100}], [{"key": 8, "bytes": 200}]
    assert roster_reader.roster("slow") in ((old,) if moment == 2 else ([], new))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=settings.default.max_examples // 2,
)
@given(
    damage=st.lists(st.tuples(st.integers(128, 400), st.integers(0, 255)), min_size=1, max_size=5)
)
def test_a_damaged_roster_is_refused_or_read(roster_board, damage):
    whole = bytes(roster_board.segment.mapping)
    for at, value in damage:
        roster_board.segment.mapping[at] = value
    try:
        reader = BoardReader.attach(roster_board.segment.name)
    except SegmentError as error:
        assert "table" in str(error)
    else:
        assert isinstance(reader.roster("slow"), list)
        reader.close()
    finally:
        roster_board.segment.mapping[:] = whole
