"""The worker's step without a model: an engine on a simulated runner, a forked process that drains its ring, and a peer's encode.

Owns: the rig, the CPU clocks, and what a peer would send. Never: reduces or prints.

    step_us          CPU of the main thread in `Engine.step`, ring publish included, the runner's sleep left out
    runner_us        of it, the time in which the simulated runner was awake to draw its tokens
    encode_us        msgpack encode of the same outputs as ready objects, one per sequence
    build_encode_us  the objects made, and encoded: what a peer's step pays for its outputs alone, and our step is judged by

Blocks of steps and of encodes take turns in the same thread, at the same pace, so caches and clock are the same for both; the
sleep's own CPU is measured by blocks of sleeps alone and taken off both.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from bench_common import Row, median

from shmserve.boards import WORKER_BOARD
from shmserve.config import RingConfig
from shmserve.request import SamplingParams
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.token_bytes import TokenBytes
from shmserve.wire.submit import Submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TokenKind
from shmserve.worker.batch import Batch, StepOutput
from shmserve.worker.engine import Engine
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.simulated_runner import SimulatedRunner
from shmserve.worker.stopping import StopConditions

VOCABULARY = TokenBytes.from_list(
    [b"<eos>", *(bytes([a, b]) for a in range(97, 123) for b in range(97, 123))]
)
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
LIVES = 3
"""How often an old cache was filled anew."""


class Output(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence's part of a step, with the fields that a peer's engine process sends to its front end."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[float] | None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    engine_index: int
    outputs: list[Output]
    timestamp: float


@dataclass(frozen=True, slots=True)
class Pace:
    """`step_ms` 0: one step after the other. `is_old`: the prefix cache is full of what others left, and has been for long."""

    name: str
    step_ms: float
    num_steps: int
    num_passes: int
    is_old: bool = False


class TimedRunner(SimulatedRunner):
    """Knows how long it was awake, by the cheap clock."""

    def __init__(self, step_ms: float, num_seqs: int) -> None:
        self.awake_ns = 0
        self._step_s = step_ms / 1000
        super().__init__(
            VOCABULARY,
            (0,),
            0,
            step_ms=step_ms or 1e-3,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=1 + num_seqs * (MAX_MODEL_LEN // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            wait_until=self._sleep,
        )

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        self.awake_ns -= time.monotonic_ns()
        output = super().run(batch, sampling)
        self.awake_ns += time.monotonic_ns()
        return output

    def _sleep(self, due_ns: int) -> None:
        """A plain sleep of the step's time, exactly as `measure` calibrates and as it paces the encodes."""
        if self._step_s:
            self.awake_ns += time.monotonic_ns()
            time.sleep(self._step_s)
            self.awake_ns -= time.monotonic_ns()


def drain(channel: Channel, until: Connection) -> None:
    """The front end's process: takes what is announced and gives it back, then says how many tokens there were."""
    consumer = channel.tokens.consumer()
    poll = select.poll()
    poll.register(channel.tokens.data.fd, select.POLLIN)
    poll.register(until.fileno(), select.POLLIN)
    num_tokens, is_over = 0, False
    while not is_over:
        is_over = any(fd == until.fileno() for fd, _ in poll.poll())
        consumer.poll()
        while consumer.owed:
            view = consumer.view(consumer.owed)
            slots = np.frombuffer(view, np.uint8).reshape(-1, TOKEN_SLOT_BYTES)
            kinds, counts = (
                slots[:, 20],
                slots[:, 21],
            )  # several tokens in one where the ring was full
            num_tokens += int(counts[kinds == TokenKind.TOKENS].sum())
            consumer.release(len(slots))
            del slots, kinds, counts, view
    until.send(num_tokens)


class Rig:
    """An engine with `batch` sequences that decode for ever, as far as a measurement goes."""

    def __init__(self, engine: Engine, runner: TimedRunner, batch: int) -> None:
        self.engine, self.runner, self.batch = engine, runner, batch
        draw = np.random.default_rng(batch)
        for number in range(batch):
            prompt = draw.integers(1, len(VOCABULARY), 16 + number % BLOCK_SIZE, dtype=np.int32)
            params = SamplingParams(
                max_tokens=MAX_MODEL_LEN - 64, seed=number, ignore_eos=True, temperature=1.0
            )
            engine.submit(Submit((1 << 48) + number, prompt, params), 0)
        while engine.scheduler.waiting or any(s.is_prefilling for s in engine.scheduler.running):
            engine.step()

    def age(self) -> None:
        """All blocks that nobody holds are cached, and each has been given up and taken again a few times."""
        blocks = self.engine.scheduler.tables.blocks
        numbers = np.arange(BLOCK_SIZE, dtype=np.int32)
        for life in range(LIVES):
            taken = blocks.allocate(blocks.num_free)
            for block in taken:
                blocks.cache.insert(b"%d" % life, (numbers + block).tobytes(), block)
            # One by one, as sequences end; all at once would leave the cache as it was when it was new.
            for block in taken:
                blocks.release([block])
            for block in range(len(taken)):
                (again,) = blocks.allocate(1)
                blocks.cache.insert(b"%d again" % life, (numbers + block).tobytes(), again)
                blocks.release([again])


@contextmanager
def rig(batch: int, step_ms: float) -> Iterator[Rig]:
    """A Rig and its consumer. Raises RuntimeError at the end if the consumer did not get each token once."""
    instance = f"bench-{os.getpid()}-scheduler"
    board = Board.create(Board.name(instance, 1, "worker", 0), WORKER_BOARD, 1)
    submit, tokens = RingShape(SUBMIT_SLOT_BYTES, 64), RingShape(TOKEN_SLOT_BYTES, 8192)
    channel = Channel.create(instance, 1, 0, 0, submit, tokens)
    ours, theirs = multiprocessing.Pipe()
    consumer = multiprocessing.get_context("fork").Process(target=drain, args=(channel, theirs))
    consumer.start()
    try:
        runner = TimedRunner(step_ms, batch)
        scheduler = Scheduler(
            runner.info, max_num_seqs=batch, max_num_batched_tokens=2048, eos_ids=(0,)
        )
        conditions = StopConditions(VOCABULARY, (0,))
        engine = Engine(runner, scheduler, conditions, RingConfig(), board)
        workers = Channel.from_fds(instance, 1, 0, 0, [os.dup(fd) for fd in channel.fds()])
        engine.open_channel(workers)
        gc.collect()
        gc.disable()  # as the worker does once it is ready
        yield Rig(engine, runner, batch)
        give_up_at = time.monotonic() + 10
        # Where the consumer fell behind, records wait for credits.
        while workers.tokens.credits.fd in engine.poll_fds() and time.monotonic() < give_up_at:
            time.sleep(0.001)
            engine.channels.flush()
        engine.show_idle()
        num_made = board["generation_tokens"]
        ours.send("over")
        num_read = ours.recv() if ours.poll(10) else -1
        engine.close_channel(0)
        if num_read != num_made:
            raise RuntimeError(f"{num_made} tokens were made, {num_read} came through the ring")
    finally:
        gc.enable()
        consumer.terminate()
        consumer.join()
        channel.unlink()
        channel.close()
        board.segment.unlink()
        board.close()


def build(names: list[str], token_ids: list[int], now_s: float) -> Outputs:
    parts = [Output(name, [token]) for name, token in zip(names, token_ids, strict=True)]
    return Outputs(0, parts, now_s)


def measure(batch: int, pace: Pace) -> Row:
    """Medians over the passes; in each, blocks of steps, of encodes and of sleeps alone take turns."""
    encode = msgspec.msgpack.Encoder().encode
    names = [f"cmpl-{number:032x}-0" for number in range(batch)]
    ids = np.random.default_rng(0).integers(0, 128_000, (64, batch)).tolist()
    ready = [build(names, row, 1.5) for row in ids]

    def sleep(_: int = 0) -> None:
        if pace.step_ms:
            time.sleep(pace.step_ms / 1000)

    def encode_one(number: int) -> None:
        sleep()
        encode(ready[number % 64])

    def build_and_encode_one(number: int) -> None:
        sleep()
        encode(build(names, ids[number % 64], 1.5))

    passes: list[Row] = []
    with rig(batch, pace.step_ms) as r:
        if pace.is_old:
            r.age()

        def step_one(_: int) -> None:
            r.engine.step()

        for number in range(20):
            step_one(number)
        for _ in range(pace.num_passes):
            sleep_us = cpu_us_each(sleep, pace.num_steps)
            awake_ns = r.runner.awake_ns
            step_us = cpu_us_each(step_one, pace.num_steps) - sleep_us
            runner_us = (r.runner.awake_ns - awake_ns) / 1000 / pace.num_steps
            encode_us = cpu_us_each(encode_one, pace.num_steps) - sleep_us
            both_us = cpu_us_each(build_and_encode_one, pace.num_steps) - sleep_us
            passes.append(
                {
                    "step_us": step_us,
                    "runner_us": runner_us,
                    "encode_us": encode_us,
                    "build_encode_us": both_us,
                    "encode_ratio": step_us / encode_us,
                    "build_encode_ratio": step_us / both_us,
                }
            )
    return {key: median([figures[key] for figures in passes]) for key in passes[0]}


def cpu_us_each(work: Callable[[int], None], count: int) -> float:
    """CPU of this thread by call. One reading of its clock may cost 0.1 ms: there are two for all calls."""
    begin = time.thread_time_ns()
    for number in range(count):
        work(number)
    return (time.thread_time_ns() - begin) / 1000 / count
