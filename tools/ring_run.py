"""One measurement of one transport: two forked processes, the producer's clocks and the consumer's.

Owns: the pacing, the hand-shake between the two, and the check that the last step arrived as it was sent. Never: reduces or
prints. The processes are forked from a parent with one thread; both have every transport's ends and use only their own.

    parent     starts both, waits for the consumer's figures, then for the producer's CPU
    consumer   "go" once it listens; "warm" once the warm-up has arrived; "all" with the last value: to the producer, which
               sends nothing measured before it, so neither side's warm-up, start or end is in a figure
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from bench_common import Row
from ring_transports import Transport

NUM_TABLES = 64
FINISH_AT_END = 3
LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Drive:
    """How the producer drives a transport."""

    mode: str
    num_steps: int
    num_warmup: int
    step_ns: int  # 0: no pause


def tables(batch: int) -> list[Any]:
    """Token ids as a sampler leaves them, a few batches taken in turn."""
    draw = np.random.default_rng(batch)
    return [draw.integers(0, 128_000, batch, dtype=np.int32) for _ in range(NUM_TABLES)]


def produce(transport: Transport, drive: Drive, control: Connection, core: int) -> None:
    """The producer process: warm-up, a pause until the consumer has it all, then the measured steps."""
    os.sched_setaffinity(0, {core})
    batches = tables(transport.batch)
    send = transport.sender()

    def steps(first: int, count: int) -> None:
        due_ns = time.monotonic_ns()
        last = drive.num_warmup + drive.num_steps - 1
        for step in range(first, first + count):
            if drive.step_ns:
                due_ns += drive.step_ns
                time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            finish = FINISH_AT_END if step == last else 0
            send(batches[step % NUM_TABLES], step, finish, time.monotonic_ns())

    control.recv()  # the consumer listens
    steps(0, drive.num_warmup)
    control.recv()  # the consumer has it all
    cpu_ns = time.process_time_ns()
    steps(drive.num_warmup, drive.num_steps)
    control.recv()  # all of it has arrived: the work of this side's threads is over too
    control.send(time.process_time_ns() - cpu_ns)


class Measure:
    """What the consumer has received, and what its clocks said."""

    def __init__(self, transport: Transport, drive: Drive, producer: Connection) -> None:
        self._producer = producer
        self._warm_records = drive.num_warmup * transport.batch
        self._all_records = self._warm_records + drive.num_steps * transport.batch
        self._num_records = 0
        self._cpu_ns = 0
        self._first_ns = 0
        self._latencies_ns: list[int] = []
        self.end_ns = 0
        self.cpu_ns = 0
        self.last: Any = None
        self.done = asyncio.get_running_loop().create_future()

    def take(self, num_records: int, times_ns: Sequence[int], values: Any) -> None:
        now_ns = time.monotonic_ns()
        if self._num_records == self._warm_records:
            self._first_ns = times_ns[0]
        self._num_records += num_records
        self._latencies_ns += [now_ns - time_ns for time_ns in times_ns]
        if self._num_records == self._warm_records:
            self._latencies_ns.clear()
            self._cpu_ns = time.process_time_ns()
            self._producer.send("warm")
        elif self._num_records == self._all_records:
            self.cpu_ns = time.process_time_ns() - self._cpu_ns
            self.end_ns = now_ns
            self.last = values
            self._producer.send("all")
            self.done.set_result(None)

    def figures(self) -> Row:
        return {
            "consumer_cpu_ns": self.cpu_ns,
            "wall_ns": self.end_ns - self._first_ns,
            "latencies_ns": self._latencies_ns,
        }


def consume(
    transport: Transport, drive: Drive, producer: Connection, result: Connection, core: int
) -> None:
    """The consumer process. It ends in an error if the last step's values are not those that were sent."""
    os.sched_setaffinity(0, {core})

    async def run() -> Measure:
        measure = Measure(transport, drive, producer)
        await transport.listen(measure.take)
        producer.send("go")
        await measure.done
        return measure

    measure = asyncio.run(run())
    batch, last = transport.batch, drive.num_warmup + drive.num_steps - 1
    req_id, token_id, time_ns, index, finish = (
        column[-batch:] for column in transport.columns_of(measure.last)
    )
    assert req_id == transport.req_ids.tolist(), "request ids changed on the way"
    assert token_id == tables(batch)[last % NUM_TABLES].tolist(), "token ids changed on the way"
    assert index == [last] * batch and finish == [FINISH_AT_END] * batch, "not the last step"
    assert len(set(time_ns)) == 1 and 0 < time_ns[0] <= measure.end_ns, "times changed on the way"
    result.send(measure.figures())
    # A reader thread or a receiving task may be waiting for more; nothing of this process is needed any longer.
    result.close()
    os._exit(0)


def await_message(source: Connection, processes: Sequence[BaseProcess], name: str) -> Any:
    """The next message; ends the bench if one of the processes has failed, or if none comes in time."""
    deadline = time.monotonic() + LIMIT_S
    while not source.poll(0):
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{name}: a process failed, its error stands above")
        if time.monotonic() > deadline:
            raise SystemExit(f"{name}: nothing came within {LIMIT_S} s")
        running = [process.sentinel for process in processes if process.exitcode is None]
        wait([source, *running], 1.0)
    return source.recv()


def run_once(transport: Transport, drive: Drive, cores: tuple[int, int]) -> Row:
    """Two processes, one measurement."""
    context = multiprocessing.get_context("fork")
    producer_end, parent_of_producer = context.Pipe()
    from_consumer, consumer_end = context.Pipe(duplex=False)
    # The consumer talks to the producer through the other end of the producer's pipe; so does the parent, at the end.
    producer = context.Process(target=produce, args=(transport, drive, producer_end, cores[1]))
    consumer = context.Process(
        target=consume, args=(transport, drive, parent_of_producer, consumer_end, cores[0])
    )
    consumer.start()
    producer.start()
    try:
        figures: Row = await_message(from_consumer, (consumer, producer), transport.name)
        figures["producer_cpu_ns"] = await_message(parent_of_producer, (producer,), transport.name)
    finally:
        for process in (producer, consumer):
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        for end in (producer_end, parent_of_producer, from_consumer, consumer_end):
            end.close()
    return figures
