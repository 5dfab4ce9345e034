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

from dataclasses import replace
from enum import IntEnum
from typing import Final

from shmserve.rings.board_table import BoardSpec

HEARTBEAT_S: Final = 0.25
"""A front end that has something to do stores its heartbeat, and its gauges, this often."""

IDLE_HEARTBEAT_S: Final = 0.5
"""Everybody else: what an idle server uses of a core is its heartbeats."""


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
LENGTH_BOUNDS: Final = _steps_from(1, 200_000)  # tokens of a prompt, or of a completion

WORKER_BOARD: Final = BoardSpec(
    words=(
        "heartbeat_ns",
        "pid",
        "phase",
        "phase_since_ns",
        "loading_permille",  # gauge, 0 to 1000
        "step",
        "slowest_step_ns",
        "expected_step_ns",  # gauge: what the step that runs may take, by what its like has taken (step_times.py)
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
        "num_timed_out",  # by a deadline or a timeout, waiting or running; they count as finished, too
        "num_preempted",
        "num_bad_records",  # of the front ends, that cannot be
        "prompt_tokens",
        "generation_tokens",
        "prefix_query_tokens",
        "prefix_hit_tokens",
        "num_draft_tokens",  # guessed; and of them right
        "num_accepted_tokens",
        "log_bytes",  # gauge: of lines that stderr has not taken yet; and how many lines it never got
        "num_log_lines_lost",
    ),
    histograms={"step_us": STEP_BOUNDS_US, "itl_engine_us": ITL_BOUNDS_US},
)

REFUSALS: Final = (
    "queue_full",
    "tokens",
    "evicted",
    "connections",
    "body",
    "bodies",
    "table",
    "submit_ring",
    "draining",
    "loading",
    "no_worker",
    "waiting_timeout",
    "deadline",
)
"""Why a front end answered a request without computing it.

queue_full       run slots and queue were taken (--max-queued-requests)
tokens           too many prompt tokens waited (--max-queued-tokens)
evicted          it waited, and one of a better priority took its place
connections      one connection too many (--max-concurrent-connections)
body             its body was too large (--max-body-bytes)
bodies           the bodies of all requests were (--max-bodies-bytes)
table            the request table had no place (--ring-table-size)
submit_ring      the worker did not take requests fast enough (--submit-policy)
draining         the server was about to end
loading          no worker had its model yet
no_worker        no worker lived
waiting_timeout  it had waited for --waiting-timeout
deadline         its own deadline came while it waited
"""

ENDINGS: Final = ("stop", "length", "abort", "error", "timeout")
"""How a completion ended.

stop     a stop string, a stop token or EOS, or the end of its grammar
length   it had max_tokens, or the context was full
abort    its client left, or somebody aborted it by id
error    the worker could not go on, or died
timeout  its own deadline or --running-timeout came
"""

REQUEST_COLUMNS: Final = (
    "req_id",
    "worker",
    "arrival_ns",
    "submitted_ns",
    "prompt_tokens",
    "eviction_rank",
)
"""Every request in flight, from before its SUBMIT until its FINISH was handled. A request of n completions has n rows. `eviction_rank` is
0 for one that stays, else 1 + its priority - the best priority that there is: the greater, the sooner it goes for a better one."""

WORKER_COLUMNS: Final = ("key", "in_flight")
"""What a front end has in flight to each worker: row j is worker j, its key j + 1."""

MOST_SLOW_SHOWN: Final = 16
SLOW_COLUMNS: Final = ("since_ns", "req_id", "num_bytes", "text_bytes")
"""The slowest clients as of the last look at them, the deepest backlog first. `req_id` is 0 for an answer that is no stream;
`text_bytes` are those of `num_bytes` that wait in front of the transport."""

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
        "num_refused",  # the sum of these:
        *(f"num_refused_{reason}" for reason in REFUSALS),
        "waiting_tokens",  # gauge: prompt tokens of requests that are not started
        "places",  # gauge: sequences of all requests that are in, from the verdict on them
        "worst_waiting",  # gauge: the greatest eviction_rank
        "routing_blocks",  # gauge: blocks of prompts of which is known who was sent them
        "num_routed_by_prefix",  # to whom was sent the most of its prompt; and to another, since that one was too busy
        "num_routed_by_load",
        "body_bytes",  # gauge: of requests that are being read or answered
        "num_denied",  # by key, Host or Origin
        "num_bad_records",  # of the workers, that cannot be
        "num_aborted",
        "num_errors",
        "num_slow_clients",  # streams and answers that ended because their client was too slow
        "num_congestions",  # how often a client did not take what was written
        "num_client_coalesced_tokens",  # tokens that waited for one, and came as one event
        "num_clients_paused",  # sequences paused because their client did not read (block)
        "num_clients_dropped",  # streams cut because their client did not read (drop)
        "clients_congested",  # gauges: clients that have not taken what was written to them
        "client_backlog_bytes",  # what waits for all of them, kernel included; the greatest of one
        "client_backlog_high_water_bytes",
        "frames",
        "tokens",
        "mailbox_bytes",  # gauges: what waits for slow clients, and its greatest
        "mailbox_high_water_bytes",
        "loop_lag_ns",  # gauge: how late the last heartbeat was
        "debug_listeners",  # gauge: clients of /debug/stream, and samples that they were too slow for
        "num_debug_skipped",
        *(f"num_ended_{reason}" for reason in ENDINGS),  # completions, by how they ended
        "log_bytes",  # as of a worker
        "num_log_lines_lost",
        "spans_waiting",  # gauge: to be sent to the collector of traces; and what became of the others
        "num_spans_sent",
        "num_spans_dropped",
        "num_spans_failed",
        "io_uring",  # gauge: 1 while the tokens of a step are sent in one call (http/step_send.py)
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
        "prefill_us": REQUEST_BOUNDS_US,  # per completion: first scheduled -> prompt computed
        "decode_us": REQUEST_BOUNDS_US,  # first token -> end
        "tpot_us": ITL_BOUNDS_US,  # the same, by the tokens after the first
        "abort_us": ITL_BOUNDS_US,  # ABORT decided -> its FINISH handled
        "prompt_length": LENGTH_BOUNDS,  # tokens
        "completion_length": LENGTH_BOUNDS,
    },
    rosters={
        "slow_clients": (MOST_SLOW_SHOWN, SLOW_COLUMNS),
        "requests": (0, REQUEST_COLUMNS),
        "workers": (0, WORKER_COLUMNS),
    },
)


def http_board(table_size: int, num_workers: int = 1) -> BoardSpec:
    """A front end's board with room for the requests of its whole table (row n is place n), and for each worker."""
    rosters = {
        **HTTP_BOARD.rosters,
        "requests": (table_size, REQUEST_COLUMNS),
        "workers": (num_workers, WORKER_COLUMNS),
    }
    return replace(HTTP_BOARD, rosters=rosters)


DEATH_CAUSES: Final = ("exit", "failed", "signal", "stopped", "hung", "protocol")
"""Why a child is gone.

exit      it ended of its own accord, without a word
failed    it said why before it ended
signal    killed by a signal that was not the supervisor's: an operator, the OOM killer, its own fault (SIGSEGV)
stopped   killed by the supervisor: stopped for longer than --hang-timeout
hung      killed by the supervisor: no heartbeat, or one step, or loading, for too long
protocol  killed by the supervisor: a ring or a control link of it could not be believed any more
"""

WORKER_GAUGES: Final = frozenset(
    (
        "heartbeat_ns", "pid", "phase", "phase_since_ns", "loading_permille", "step", "slowest_step_ns", "expected_step_ns",
        "running", "waiting", "paused", "kv_blocks_total", "kv_blocks_used", "max_num_seqs", "max_model_len", "log_bytes",
    )
)  # fmt: skip
HTTP_GAUGES: Final = frozenset(
    (
        "heartbeat_ns", "pid", "phase", "phase_since_ns", "in_flight", "waiting", "connections", "waiting_tokens", "body_bytes",
        "clients_congested", "client_backlog_bytes", "client_backlog_high_water_bytes", "mailbox_bytes",
        "mailbox_high_water_bytes", "loop_lag_ns", "debug_listeners", "log_bytes", "spans_waiting", "places",
        "worst_waiting", "routing_blocks", "io_uring",
    )
)  # fmt: skip
"""Words that say how it is; all others only grow while their process lives."""


def counters_of(role: str) -> tuple[str, ...]:
    """The words of a child's board that only grow."""
    spec, gauges = {"worker": (WORKER_BOARD, WORKER_GAUGES), "http": (HTTP_BOARD, HTTP_GAUGES)}[
        role
    ]
    return tuple(word for word in spec.words if word not in gauges)


SUPERVISOR_BOARD: Final = BoardSpec(
    words=(
        "heartbeat_ns",
        "pid",
        "worker_restarts",
        "http_restarts",
        *(f"{role}_restarts_{cause}" for role in ("worker", "http") for cause in DEATH_CAUSES),
        "draining",
        "num_crash_dumps",  # of processes that died while they served: written, and not
        "num_crash_dumps_lost",
        "crash_dumps_waiting",  # gauge: to be written
        "ledger_version",  # odd while what follows changes (ledger.py): what children that are gone had counted
        *(f"past_{role}_{word}" for role in ("worker", "http") for word in counters_of(role)),
    ),
    histograms={
        f"past_{role}_{name}": bounds
        for role, spec in (("worker", WORKER_BOARD), ("http", HTTP_BOARD))
        for name, bounds in spec.histograms.items()
    },
)
