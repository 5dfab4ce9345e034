"""One recorded step for each batch bucket, replayed instead of launched kernel by kernel.

Owns: the buckets, the order of recording, and the replays. Never: knows what a step computes. How a step is recorded is a
protocol: `CudaCapture` makes CUDA graphs out of one memory pool, `NoCapture` runs the step as it is, tests count.

Laws
  - A recorded step reads and writes the buffers that it was recorded with, at the same addresses for ever: its work takes
    no argument but the bucket, and whoever owns the buffers never makes them anew (buffers.py).
  - The largest bucket is recorded first, so that the smaller ones live in the memory that it took.

Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

BUCKETS = (1, 2, 4, 8, 12, 16, *range(24, 65, 8), *range(80, 257, 16))
WARM_UP_RUNS = 2
"""Runs of a step before it is recorded: kernels are compiled and libraries take their workspace in them."""

Work = Callable[[], None]


class Capture(Protocol):
    """Records work that was run before, and gives back what repeats it."""

    def record(self, work: Work) -> Work: ...


class NoCapture:
    """For devices without graphs: a replay is the work itself."""

    def record(self, work: Work) -> Work:
        return work


class CudaCapture:
    """CUDA graphs that share one memory pool. `others_run`: threads of libraries ask for the state of the GPU meanwhile, as NCCL's watchdog
    does, which is no reason for the record to fail.

    All that it has recorded lives as long as it does. torch records nothing more into a pool whose graphs are all gone (an internal
    assertion fails), and a graph that goes takes along cuBLAS's workspace of the stream that all of them were recorded in.
    """

    def __init__(self, others_run: bool = False) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._error_mode = "thread_local" if others_run else "global"
        self._recorded: list[torch.cuda.CUDAGraph] = []

    def record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._error_mode):
            work()
        torch.cuda.synchronize()
        self._recorded.append(graph)
        replay: Work = graph.replay
        return replay


def buckets_for(max_num_seqs: int) -> tuple[int, ...]:
    """The buckets that batches of up to `max_num_seqs` rows fall into; larger ones than the largest have none."""
    below = [bucket for bucket in BUCKETS if bucket < max_num_seqs]
    covering = [bucket for bucket in BUCKETS if bucket >= max_num_seqs][:1]
    return tuple(below + covering)


class StepGraphs:
    """The recorded steps. `step(bucket)` computes one step of `bucket` rows from static buffers into static buffers.

    `prepare(bucket)` is called before its first run: for what a step needs and must not record.
    """

    def __init__(
        self,
        capture: Capture,
        buckets: tuple[int, ...],
        step: Callable[[int], None],
        prepare: Callable[[int], None] = lambda bucket: None,
    ) -> None:
        self._capture = capture
        self._buckets = tuple(sorted(buckets))
        self._step = step
        self._prepare = prepare
        self._replays: dict[int, Work] = {}

    @property
    def num_recorded(self) -> int:
        return len(self._replays)

    def record_all(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Run and record each bucket, the largest first."""
        for done, bucket in enumerate(reversed(self._buckets), 1):

            def work(bucket: int = bucket) -> None:
                self._step(bucket)

            self._prepare(bucket)
            for _ in range(WARM_UP_RUNS):
                work()
            self._replays[bucket] = self._capture.record(work)
            progress(done / len(self._buckets))

    def bucket_of(self, num_rows: int) -> int | None:
        """The smallest recorded bucket that holds `num_rows`, None if there is none: then the step runs unrecorded."""
        return next((b for b in self._buckets if b >= num_rows and b in self._replays), None)

    def replay(self, bucket: int) -> None:
        self._replays[bucket]()
