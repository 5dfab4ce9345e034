"""`shmserve top` without a server: rates and quantiles of two looks, segments that come and go, and screens of any size."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shmserve.boards import SUPERVISOR_BOARD, WORKER_BOARD, Phase, http_board
from shmserve.rings.board import Board, HistogramReading
from shmserve.rings.channel import Channel, RingShape
from shmserve.top import ProcessRow, Report, RingRow, quantile, report
from shmserve.top_screen import render
from shmserve.watch import EndedError, Look, Watch
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKEN_SLOT_BYTES

_numbers = itertools.count()
SHAPES = RingShape(SUBMIT_SLOT_BYTES, 8), RingShape(TOKEN_SLOT_BYTES, 64)


class Instance:
    """Boards and one channel at a time, written by hand."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"testtop{os.getpid()}-{next(_numbers)}"
        self.boards: dict[str, Board] = {}
        for role, spec in (
            ("supervisor", SUPERVISOR_BOARD),
            ("worker", WORKER_BOARD),
            ("http", http_board(4)),
        ):
            self.boards[role] = Board.create(Board.name(self.name, 1, role, 0), spec, 1)
            self.boards[role]["heartbeat_ns"] = time.monotonic_ns()
        self.channel = Channel.create(self.name, 1, 0, 0, *SHAPES)

    def new_life(self, epoch: int) -> None:
        """The worker died, and its successor is there."""
        self.channel.unlink()
        self.channel.close()
        self.channel = Channel.create(self.name, epoch, 0, 0, *SHAPES)
        old = self.boards["worker"]
        old.segment.unlink()
        old.close()
        name = Board.name(self.name, epoch, "worker", 0)
        self.boards["worker"] = Board.create(name, WORKER_BOARD, epoch)

    def unlink(self) -> None:
        self.channel.unlink()
        for board in self.boards.values():
            board.segment.unlink()

    def close(self) -> None:
        self.unlink()
        self.channel.close()
        for board in self.boards.values():
            board.close()


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance()
    yield made
    made.close()


@pytest.fixture
def watch(instance: Instance) -> Iterator[Watch]:
    made = Watch(instance.name)
    yield made
    made.close()


def seconds_later(look: Look, before: Look, seconds: float) -> Look:
    return replace(look, at_ns=before.at_ns + int(seconds * 1e9))


def row_of(made: Report, role: str) -> ProcessRow:
    return next(row for row in made.processes if row.role == role)


def test_rates_are_differences_over_the_interval(instance: Instance, watch: Watch) -> None:
    worker, tokens = instance.boards["worker"], instance.channel.tokens.producer()
    worker["step"] = 100
    tokens.try_write(bytes(TOKEN_SLOT_BYTES * 5), 5)
    before = watch.look()
    worker["step"] = 350
    tokens.try_write(bytes(TOKEN_SLOT_BYTES * 20), 20)
    tokens.count(20, 7)
    made = report(instance.name, before, seconds_later(watch.look(), before, 2.0))
    assert row_of(made, "worker").per_s["step"] == 125
    ring = next(ring for ring in made.rings if ring.kind == "tokens")
    assert (ring.per_s, ring.depth, ring.high_water, ring.coalesced) == (10, 25, 25, 7)
    assert ring.has_producer and not ring.has_consumer
    assert made.seconds == 2.0


def test_single_look_has_no_rates_and_latencies_since_the_start(
    instance: Instance, watch: Watch
) -> None:
    instance.boards["worker"]["step"] = 100
    instance.boards["http"].histograms["hop_pop_us"].observe(np.full(10, 75))
    made = report(instance.name, None, watch.look())
    assert row_of(made, "worker").per_s["step"] == 0
    row = next(row for row in made.latencies if row.name == "hop_pop_us")
    assert row.interval == row.total
    assert (row.total.count, row.total.mean_us) == (10, 75)


def test_latencies_are_of_the_interval_and_beside_them_of_all_time(
    instance: Instance, watch: Watch
) -> None:
    histogram = instance.boards["http"].histograms["hop_pop_us"]
    histogram.observe(np.full(1000, 90_000))
    before = watch.look()
    histogram.observe(np.full(50, 60))
    made = report(instance.name, before, seconds_later(watch.look(), before, 1.0))
    row = next(row for row in made.latencies if row.name == "hop_pop_us")
    assert (row.per_s, row.interval.count, row.interval.mean_us) == (50, 50, 60)
    assert 50 < row.interval.p50_us <= 100
    assert row.total.count == 1050 and row.total.p50_us > 50_000


def test_a_quantile_above_every_bucket_is_shown_as_more_than_the_last_bound(
    instance: Instance, watch: Watch
) -> None:
    instance.boards["http"].histograms["hop_pop_us"].observe(np.full(10, 5_800_000))
    made = report(instance.name, None, watch.look())
    row = next(row for row in made.latencies if row.name == "hop_pop_us")
    assert row.total.p50_us == row.total.p99_us == row.total.most_us == 1_000_000
    lines = [" ".join(line.split()) for line in screen(made, 100, 40).splitlines()]
    assert any("popped > 1.0 s > 1.0 s 5.8 s" in line for line in lines), lines


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((0, 0, 0), 0.5, 0.0),
        ((10, 0, 0), 0.5, 5.0),
        ((10, 10, 0), 0.5, 10.0),
        ((10, 10, 0), 0.75, 55.0),
        ((0, 0, 5), 0.5, 100.0),  # above the last bound: it is at least that
        ((99, 0, 1), 0.99, 10.0),
    ],
)
def test_quantile_lies_within_its_bucket(
    counts: tuple[int, ...], share: float, value: float
) -> None:
    reading = HistogramReading((10, 100), counts, sum(counts), 0)
    assert quantile(reading, share) == pytest.approx(value)


def test_successors_rings_appear_and_start_at_zero(instance: Instance, watch: Watch) -> None:
    instance.channel.tokens.producer().try_write(bytes(TOKEN_SLOT_BYTES * 60), 60)
    instance.boards["worker"]["step"] = 9000
    before = watch.look()
    instance.new_life(epoch=2)
    instance.channel.tokens.producer().try_write(bytes(TOKEN_SLOT_BYTES * 3), 3)
    instance.boards["worker"]["step"] = 4
    made = report(instance.name, before, seconds_later(watch.look(), before, 1.0))
    assert {ring.epoch for ring in made.rings} == {2}
    assert row_of(made, "worker").per_s["step"] == 4
    assert [ring.per_s for ring in made.rings if ring.kind == "tokens"] == [3]


def test_process_without_a_heartbeat_is_silent_and_a_new_one_is_not(
    instance: Instance, watch: Watch
) -> None:
    instance.boards["http"]["heartbeat_ns"] = time.monotonic_ns() - 3_200_000_000
    instance.boards["worker"]["heartbeat_ns"] = 0
    made = report(instance.name, None, watch.look())
    silent = row_of(made, "http")
    assert silent.is_silent and silent.heartbeat_age_s >= 3.2
    assert not row_of(made, "worker").is_silent
    assert f"silent for {silent.heartbeat_age_s:.1f} s" in screen(made, 80, 24)


def test_end_of_an_instance_is_told_and_nothing_stays_attached(
    instance: Instance, watch: Watch
) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    watch.look()
    instance.unlink()
    with pytest.raises(EndedError, match="has ended"):
        watch.look()
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_an_instance_that_is_restarted_between_two_looks_is_followed(
    instance: Instance, watch: Watch
) -> None:
    """Its segments have the names that those before it had."""
    instance.boards["worker"]["step"] = 9000
    watch.look()
    instance.unlink()
    successor = Instance(instance.name)
    try:
        successor.boards["worker"]["step"] = 4
        boards = watch.look().boards.values()
        assert [board.words["step"] for board in boards if board.role == "worker"] == [4]
    finally:
        successor.close()


def test_rings_that_nobody_owns_are_those_of_a_killed_instance(
    instance: Instance, watch: Watch
) -> None:
    """Their owner byte is free, as after a kill -9 of all processes."""
    watch.look()
    for segment in (
        instance.channel.submit.segment,
        instance.channel.tokens.segment,
        *(board.segment for board in instance.boards.values()),
    ):
        path = Path(f"/dev/shm{segment.name}")
        content = path.read_bytes()
        path.unlink()  # the one that we hold
        path.write_bytes(content)
    watch.close()
    try:
        with pytest.raises(EndedError, match="was killed; its rings are left"):
            watch.look()
    finally:
        for board in instance.boards.values():
            os.unlink(f"/dev/shm{board.segment.name}")
        for ring in (instance.channel.submit, instance.channel.tokens):
            os.unlink(f"/dev/shm{ring.segment.name}")


# --- screens


def screen(made: Report, width: int, height: int, ascii_only: bool = False) -> str:
    """What a terminal of this size would show; its lines are as long and as many as they are drawn."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    console = Console(
        width=width,
        height=height,
        file=file,
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(render(made, console), end="")
    return captured.get()


@pytest.fixture
def busy(instance: Instance, watch: Watch) -> Report:
    """A report with something in every part."""
    worker, http = instance.boards["worker"], instance.boards["http"]
    worker["phase"], worker["max_num_seqs"], worker["kv_blocks_total"] = Phase.DECODE, 256, 100
    http["phase"] = Phase.IDLE
    for board in instance.boards.values():
        board["heartbeat_ns"] = time.monotonic_ns() + 1_000_000_000  # of the second look
    before = watch.look()
    worker["step"], worker["running"], worker["waiting"], worker["kv_blocks_used"] = (
        223,
        256,
        31,
        95,
    )
    worker["generation_tokens"] = 57_000
    worker.histograms["step_us"].observe(np.full(223, 4_480))
    http["tokens"], http["connections"], http["in_flight"], http["num_refused"] = (
        57_000,
        300,
        287,
        7,
    )
    for name in ("hop_publish_us", "hop_pop_us", "hop_frame_us", "hop_write_us", "itl_wire_us"):
        http.histograms[name].observe(np.full(57_000, 60))
    for row in range(9):
        key = time.monotonic_ns() - 2_000_000_000
        http.rosters["slow_clients"].enter(row, key, 0xABC0 + row, 70_000 - row, 512)
    ends = [instance.channel.tokens.consumer(), instance.channel.submit.consumer()]
    ends += [instance.channel.tokens.producer(), instance.channel.submit.producer()]
    ends[2].try_write(bytes(TOKEN_SLOT_BYTES * 56), 56)
    return report(instance.name, before, seconds_later(watch.look(), before, 1.0))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 24), (200, 60)])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_screen_fits_the_terminal_and_shows_every_part(
    busy: Report, size: tuple[int, int], ascii_only: bool
) -> None:
    width, height = size
    lines = screen(busy, width, height, ascii_only).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for part in (
        "worker 0 decode",
        "223 steps/s",
        "run 256/256 wait 31 kv 95%",
        "http 0   serving",
        "57k tok/s",
        "0-0 tokens",
        "56/64",
        "ITL wire",
        "slowest clients",
        "000000000000abc0",
        "68 KiB",
    ):
        assert part in text, text
    assert "no writer" not in text and "no reader" not in text
    assert ("█" in text) is not ascii_only
    assert text.isascii() is ascii_only


def _many(made: Report, num_rings: int, num_processes: int) -> Report:
    ring = made.rings[0]
    http = row_of(made, "http")
    rings: list[RingRow] = [
        replace(ring, http=i, depth=i % 8, capacity=8, high_water=i % 8) for i in range(num_rings)
    ]
    processes = [replace(http, index=i, is_silent=i == 40) for i in range(num_processes)]
    return replace(made, rings=tuple(rings), processes=(made.processes[0], *processes))


def test_more_rings_and_processes_than_there_is_room_for_show_the_deepest_and_the_ill(
    busy: Report,
) -> None:
    made = _many(busy, 64, 64)
    lines = screen(made, 80, 24).splitlines()
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert "/64" in text  # how many there are
    assert "http 40" in text and "silent" in text
    assert "7/8" in text and "0/8" not in text
    assert "processes not shown" in text


def test_ring_whose_ends_are_gone_says_so(instance: Instance, watch: Watch) -> None:
    tokens = instance.channel.tokens.producer()
    tokens.try_write(bytes(TOKEN_SLOT_BYTES * 56), 56)
    lines = screen(report(instance.name, None, watch.look()), 80, 24).splitlines()
    (line,) = [line for line in lines if "0-0 tokens" in line]
    assert "no reader" in line and "56/64" in line
    assert any("0-0 submit nobody" in line for line in lines)


def test_smallest_and_emptiest_screens_are_drawn(instance: Instance, watch: Watch) -> None:
    made = report(instance.name, None, watch.look())
    for size in ((20, 5), (1, 1), (80, 24)):
        assert screen(made, *size)
    empty = replace(made, processes=(), rings=(), latencies=(), slow_clients=())
    assert "no supervisor" in screen(empty, 80, 24)


def test_report_is_json(busy: Report) -> None:
    shown = json.loads(json.dumps(asdict(busy)))
    assert shown["rings"][0]["capacity"] in (8, 64)
    assert shown["slow_clients"][0]["num_bytes"] == 70_000
    assert {row["name"] for row in shown["latencies"]} >= {"hop_pop_us", "ttft_us"}
