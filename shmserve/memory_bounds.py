"""How much memory an instance may take, as a sum of counts times sizes: what `shmserve start --print-limits` prints.

Owns: the formula, and the sizes in it, which were measured and rounded up (`tools/bench_overload.py` holds processes to the sum).
Never: enforces a bound: each stands where its queue is, and is named here by its flag. Only what grows with load is counted for the two
processes: interpreter, libraries, tokenizer and tables are what a process takes when it is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shmserve.boards import SUPERVISOR_BOARD, WORKER_BOARD, http_board
from shmserve.config import MOST_ROUTING_BLOCKS, Config, WorkerConfig
from shmserve.rings.board_table import board_bytes
from shmserve.rings.layout import HEADER_BYTES
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKEN_SLOT_BYTES

KIB: Final = 1 << 10
MIB: Final = 1 << 20

CONNECTION_BYTES: Final = 24 * KIB
"""An open connection that asks for nothing: its transport, parser, task, timers (measured: 3 KiB)."""
TLS_BYTES: Final = 320 * KIB
"""The same under TLS: asyncio keeps a read buffer of 256 KiB for each, and OpenSSL its own."""
READ_BUFFER_BYTES: Final = 192 * KIB
"""What aiohttp reads ahead of a body (twice 64 KiB, and one more read), or the head that is being parsed."""
BODY_FACTOR: Final = 16
"""A body with what is made of it. Token ids are the worst: four characters of JSON become an int and two references of 44 bytes."""
PLACE_BYTES: Final = 96 * KIB
"""A sequence in the front end: handler, response, formats, stop strings and its row of the table (measured: 14 KiB while it waits)."""
ANSWER_BYTES_PER_TOKEN: Final = 256
"""Ids and text of an answer that is not streamed, until it is sent, and its JSON."""
LOGPROBS_BYTES_PER_TOKEN: Final = 20 * (28 + 24 + 56 + 8) + 512
"""The same with 20 logprobs for each token: a pair of them is an int, a float and a tuple."""
SEQUENCE_BYTES: Final = 16 * KIB
"""A sequence in the worker, without its tokens."""
BLOCK_BYTES: Final = 1 * KIB
"""What is known of a KV block: its place in the free list, its tokens, its node in the prefix cache."""
INDEXED_BLOCK_BYTES: Final = 256
"""A block of a prompt in the index of who was sent it (measured: 134)."""
IDLE_GROWTH_BYTES: Final = 48 * MIB
"""What a process grows by though nothing is kept: arenas of the allocator, caches of libraries, one request being parsed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`count` things of `size` bytes each; `process` is "http", "worker" or "shm"."""

    process: str
    what: str
    count: int
    size: int

    @property
    def total(self) -> int:
        return self.count * self.size


def bounds_of(
    config: Config, max_model_len: int, *, kv_bytes: int, num_kv_blocks: int
) -> list[Bound]:
    """Every bound of one instance, over all its processes. `kv_bytes` is of one worker's cache, as far as it is this host's memory."""
    num_http, num_workers = config.num_http, config.num_workers
    http, rings, worker = config.http, config.rings, config.worker
    pairs = num_http * num_workers
    run_slots = worker.run_slots * num_workers
    places = num_http * (run_slots + http.max_queued_requests)
    connections = num_http * http.max_concurrent_connections
    boards = (
        board_bytes(http_board(rings.table_size, num_workers)) * num_http
        + board_bytes(WORKER_BOARD) * num_workers
    )
    return [
        Bound("shm", "submit rings (--submit-ring-slots)", pairs, HEADER_BYTES + rings.submit_slots * SUBMIT_SLOT_BYTES),
        Bound("shm", "token rings (--token-ring-slots)", pairs, HEADER_BYTES + rings.token_slots * TOKEN_SLOT_BYTES),
        Bound("shm", "boards", 1, boards + board_bytes(SUPERVISOR_BOARD)),
        Bound("http", "what any load costs once", num_http, IDLE_GROWTH_BYTES),
        Bound("http", "connections (--max-concurrent-connections)", connections, CONNECTION_BYTES),
        Bound("http", "TLS of connections", connections if http.ssl_certfile else 0, TLS_BYTES),
        Bound("http", "heads and bodies being read", connections, READ_BUFFER_BYTES),
        Bound("http", f"bodies, times {BODY_FACTOR} for what is made of them (--max-bodies-bytes)", num_http, BODY_FACTOR * http.bodies_bytes),
        Bound("http", "sequences in (--max-num-seqs + --max-queued-requests)", places, PLACE_BYTES),
        Bound("http", "table (--ring-table-size)", num_http, rings.table_size * 64),
        Bound("http", "prompts whose worker is remembered", num_http * MOST_ROUTING_BLOCKS if num_workers > 1 else 0, INDEXED_BLOCK_BYTES),
        Bound("http", "their prompts, as ids and as a record", places, 8 * max_model_len),
        Bound("http", "their answers, not streamed (--max-model-len)", places, ANSWER_BYTES_PER_TOKEN * max_model_len),
        Bound("http", "frames of slow clients (--slow-client-bytes)", places, 4 * http.slow_client_bytes),
        Bound("worker", "what any load costs once", num_workers * worker.tensor_parallel, IDLE_GROWTH_BYTES),
        Bound("worker", "sequences (--max-num-seqs + --max-queued-requests)", places, SEQUENCE_BYTES),
        Bound("worker", "their tokens (--max-model-len)", places, 12 * max_model_len),
        Bound("worker", "rows (--max-num-seqs)", worker.max_num_seqs * num_workers, 4 * (max_model_len + 1) + 4 * (max_model_len // worker.block_size + 1) + 4 * KIB),
        Bound("worker", "tokens beside a full ring (--coalesce-tokens)", pairs, rings.coalesce_tokens * TOKEN_SLOT_BYTES),
        Bound("worker", "last records beside a full ring", pairs * rings.table_size, 8 * TOKEN_SLOT_BYTES),
        Bound("worker", "KV cache (--kv-cache-bytes)", num_workers, kv_bytes),
        Bound("worker", "what is known of its blocks", num_workers * num_kv_blocks, BLOCK_BYTES),
        Bound("worker", "steps on their way to other ranks (--tensor-parallel)", num_workers if worker.tensor_parallel > 1 else 0, step_bytes(worker, max_model_len)),
    ]  # fmt: skip


def step_bytes(worker: WorkerConfig, max_model_len: int) -> int:
    """Memory in which a worker hands its steps to other ranks (worker/parallel/steps.py): four of the largest."""
    tokens = max(worker.max_num_batched_tokens, worker.max_num_seqs)
    tokens += 0 if worker.chunked_prefill else max_model_len
    blocks = -(-max_model_len // worker.block_size)
    return 4 * 4 * (16 + 3 * tokens + (8 + blocks) * worker.max_num_seqs)


def logprobs_bound(config: Config, max_model_len: int) -> Bound:
    """What comes on top where every request asks for 20 logprobs of every token and is not streamed."""
    places = config.num_http * (
        config.worker.run_slots * config.num_workers + config.http.max_queued_requests
    )
    what = "with 20 logprobs each, not streamed"
    return Bound("http", what, places, LOGPROBS_BYTES_PER_TOKEN * max_model_len)


def total_of(bounds: Sequence[Bound], process: str = "") -> int:
    return sum(bound.total for bound in bounds if process in ("", bound.process))


TITLES: Final = {
    "shm": "shared memory, reserved at the start",
    "http": "front ends, beyond what they take when they are ready",
    "worker": "workers, beyond their weights and what they take when they are ready",
}


def table(bounds: Sequence[Bound], on_top: Sequence[Bound] = ()) -> str:
    """The bounds for people, with the sums; `on_top` are not in them."""
    lines = []
    for process, title in TITLES.items():
        lines.append(f"{title}: {_mib(total_of(bounds, process))}")
        lines += [_line(bound) for bound in bounds if bound.process == process]
    lines.append(f"all of it: {_mib(total_of(bounds))}")
    if on_top:
        lines.append("on top, and only where it is asked for:")
        lines += [_line(bound) for bound in on_top]
    return "\n".join(lines)


def _line(bound: Bound) -> str:
    return f"  {_mib(bound.total):>14}  {bound.count:>10,} x {bound.size:>13,} B  {bound.what}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
