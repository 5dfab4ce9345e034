"""What the engine shows of itself on the worker's board: the phase, the step, the gauges.

Owns: those words, and the two histograms of steps. Never: counts endings or prompts (the engine adds to those words where they
happen). A gauge is stored only if it has changed:
a store costs a look-up and a cold cache line.
Worker's main thread only.
"""

from __future__ import annotations

import time

from shmserve.boards import Phase
from shmserve.rings.board import Board
from shmserve.worker.commit import Committed
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.step_times import StepTimes

_GAUGES = (
    "running",
    "waiting",
    "paused",
    "kv_blocks_used",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "num_preempted",
    "num_admitted",
)


class Showing:
    """`board` is the worker's; `step_times` is told of every step, and says how long one may take."""

    def __init__(self, board: Board, scheduler: Scheduler, step_times: StepTimes) -> None:
        self._board = board
        self._scheduler = scheduler
        self._step_times = step_times
        self._is_prefill = False
        self._expected_ns = -1
        self._slowest_ns = board["slowest_step_ns"]
        self._gauges: tuple[int, ...] = (-1,) * len(_GAUGES)

    def begin(self, is_prefill: bool, num_tokens: int, begin_ns: int) -> None:
        """A step begins; the supervisor may see how long it may take."""
        self._is_prefill = is_prefill
        expected_ns = self._step_times.expected_ns(is_prefill, num_tokens)
        if expected_ns != self._expected_ns:
            self._board["expected_step_ns"] = self._expected_ns = expected_ns
        self._show_phase(Phase.PREFILL if is_prefill else Phase.DECODE, begin_ns)

    def end(self, step: int, begin_ns: int, committed: Committed, num_paused: int) -> None:
        """A step is over, and published."""
        board = self._board
        elapsed = time.monotonic_ns() - begin_ns
        board["step"] = step
        board.add("generation_tokens", committed.num_tokens)
        board.histograms["step_us"].observe_one(elapsed // 1000)
        for itl_ns, count in committed.itl_ns:
            board.histograms["itl_engine_us"].observe_one(itl_ns // 1000, count)
        self._step_times.took(self._is_prefill, elapsed)
        if elapsed > self._slowest_ns:
            board["slowest_step_ns"] = self._slowest_ns = elapsed
        self._show_gauges(num_paused)

    def idle(self, num_paused: int) -> None:
        """Nothing to compute: the gauges say so until the next step."""
        self._show_gauges(num_paused)
        self._show_phase(Phase.IDLE, time.monotonic_ns())

    def _show_phase(self, phase: Phase, now_ns: int) -> None:
        self._board["phase"] = phase
        self._board["phase_since_ns"] = now_ns

    def _show_gauges(self, num_paused: int) -> None:
        scheduler, tables = self._scheduler, self._scheduler.tables
        gauges = (
            len(scheduler.running),
            len(scheduler.waiting),
            num_paused,
            scheduler.blocks.num_used,
            tables.num_query_tokens,
            tables.num_hit_tokens,
            scheduler.num_preempted,
            scheduler.num_admitted,
        )
        if gauges != self._gauges:
            for name, value, former in zip(_GAUGES, gauges, self._gauges, strict=True):
                if value != former:
                    self._board[name] = value
            self._gauges = gauges
