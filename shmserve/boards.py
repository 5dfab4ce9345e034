"""What each process shows of itself: the words and histograms of the three boards, by name.

Owns: the names, and what they mean. Never: reads or writes one (`rings/board.py` does). A word with no unit suffix is a
count since the process began, or a gauge where the comment says so. One process, and for a word one thread, writes it.

    worker j      WORKER_BOARD       step loop: everything; heartbeat thread: heartbeat_ns
    front end i   HTTP_BOARD         its event loop
    supervisor    SUPERVISOR_BOARD   its loop

`phase` is a Phase. `phase_since_ns` is CLOCK_MONOTONIC and is stored anew at the beginning of every step, so its age is the
length of what runs now, not of the phase as a whole; in IDLE its age means nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from shmserve.rings.board import BoardSpec

HEARTBEAT_S: Final = 0.25
"""Every process stores its heartbeat this often."""


class Phase(IntEnum):
    """What a process is doing; the word `phase` of every board. 0 is what a new board says."""

    STARTING = 0
    LOADING = 1
    WARMING_UP = 2
    IDLE = 3
    PREFILL = 4
    DECODE = 5
    DRAINING = 6
    STOPPED = 7

    @property
    def label(self) -> str:
        """The word for people and for JSON: "warming_up"."""
        return self.name.lower()


def label_of(phase: int) -> str:
    """The label of a number read from a board; a number without a name is shown as it is."""
    try:
        return Phase(phase).label
    except ValueError:
        return f"phase {phase}"


def _steps_from(first: int, last: int) -> tuple[int, ...]:
    """Bounds 1, 2, 5 times powers of ten from `first` to `last`."""
    bounds = []
    for power in range(12):
        for digit in (1, 2, 5):
            bound = digit * 10**power
            if first <= bound <= last:
                bounds.append(bound)
    return tuple(bounds)


HOP_BOUNDS_US: Final = _steps_from(50, 1_000_000)  # one hop of a token: 50 us to 1 s
ITL_BOUNDS_US: Final = _steps_from(50, 10_000_000)
REQUEST_BOUNDS_US: Final = _steps_from(1_000, 1_000_000_000)  # queue, TTFT, whole requests
STEP_BOUNDS_US: Final = _steps_from(50, 100_000_000)

WORKER_BOARD: Final = BoardSpec(
    words=(
        "heartbeat_ns",
        "pid",
        "phase",
        "phase_since_ns",
        "loading_permille",  # gauge, 0 to 1000
        "step",
        "slowest_step_ns",
        "running",  # gauges: sequences
        "waiting",
        "paused",
        "kv_blocks_total",  # gauges: blocks that can be allocated, and that are
        "kv_blocks_used",
        "max_num_seqs",  # gauges: the limits in force
        "max_model_len",
        "num_admitted",
        "num_finished",
        "num_aborted",
        "num_preempted",
        "prompt_tokens",
        "generation_tokens",
        "prefix_query_tokens",
        "prefix_hit_tokens",
        "num_draft_tokens",  # guessed; and of them right
        "num_accepted_tokens",
        "coalesced_tokens",
    ),
    histograms={"step_us": STEP_BOUNDS_US, "itl_engine_us": ITL_BOUNDS_US},
)

HTTP_BOARD: Final = BoardSpec(
    words=(
        "heartbeat_ns",
        "pid",
        "phase",
        "phase_since_ns",
        "in_flight",  # gauges: requests submitted and not forgotten; of them not started
        "waiting",
        "connections",  # gauge
        "num_requests",
        "num_refused",
        "num_aborted",
        "num_errors",
        "num_slow_clients",  # connections closed because their client was too slow
        "frames",
        "tokens",
        "mailbox_bytes",  # gauges: what waits for slow clients, and its greatest
        "mailbox_high_water_bytes",
        "loop_lag_ns",  # gauge: how late the last heartbeat was
    ),
    histograms={
        "hop_publish_us": HOP_BOUNDS_US,  # sampled -> published
        "hop_pop_us": HOP_BOUNDS_US,  # published -> popped
        "hop_frame_us": HOP_BOUNDS_US,  # popped -> framed
        "hop_write_us": HOP_BOUNDS_US,  # framed -> written
        "queue_us": REQUEST_BOUNDS_US,
        "ttft_us": REQUEST_BOUNDS_US,
        "itl_wire_us": ITL_BOUNDS_US,
        "e2e_us": REQUEST_BOUNDS_US,
    },
)

SUPERVISOR_BOARD: Final = BoardSpec(
    words=("heartbeat_ns", "pid", "worker_restarts", "http_restarts", "draining"),
    histograms={},
)
