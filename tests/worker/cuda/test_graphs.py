"""Buckets, the order of recording, and which step is replayed."""

import gc
import itertools
import weakref
from contextlib import contextmanager

import pytest
import torch

from shmserve.worker.cuda.graphs import (
    BUCKETS,
    WARM_UP_RUNS,
    CudaCapture,
    NoCapture,
    StepGraphs,
    buckets_for,
)


def test_there_are_24_buckets_and_none_wastes_half_its_rows():
    assert len(BUCKETS) == 24 and BUCKETS[0] == 1 and BUCKETS[-1] == 256
    assert all(low + 1 > high / 2 for low, high in itertools.pairwise(BUCKETS))


@pytest.mark.parametrize(
    ("most", "last", "count"), [(1, 1, 1), (3, 4, 3), (12, 12, 5), (60, 64, 12), (256, 256, 24)]
)
def test_buckets_cover_the_most_sequences_and_no_more(most, last, count):
    assert (buckets_for(most)[-1], len(buckets_for(most))) == (last, count)


def test_more_sequences_than_the_largest_bucket_have_none():
    graphs = StepGraphs(NoCapture(), buckets_for(300), lambda bucket: None)
    graphs.record_all()
    assert graphs.bucket_of(256) == 256 and graphs.bucket_of(257) is None


def test_the_largest_is_recorded_first_and_warmed_before_it_is_recorded():
    calls: list[tuple[str, int]] = []

    class Capture:
        def record(self, work):
            calls.append(("record", 0))
            work()
            return work

    shares: list[float] = []
    graphs = StepGraphs(Capture(), (1, 4, 2), lambda bucket: calls.append(("step", bucket)))
    assert graphs.bucket_of(1) is None, "nothing is recorded yet"
    graphs.record_all(shares.append)
    expected = []
    for bucket in (4, 2, 1):
        expected += [("step", bucket)] * WARM_UP_RUNS + [("record", 0), ("step", bucket)]
    assert calls == expected and shares == [1 / 3, 2 / 3, 1.0] and graphs.num_recorded == 3
    calls.clear()
    graphs.replay(graphs.bucket_of(3))
    assert calls == [("step", 4)]


class Pools:
    """torch's law: into a pool whose graphs are all gone nothing is recorded any more."""

    def __init__(self, monkeypatch) -> None:
        self.graphs: list[weakref.ref] = []
        self.modes: list[str] = []
        for name, value in {
            "graph_pool_handle": lambda: "the pool",
            "CUDAGraph": Graph,
            "synchronize": lambda: None,
            "graph": self.recording,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def recording(self, graph, pool, capture_error_mode):
        assert pool == "the pool"
        gc.collect()
        assert not self.graphs or any(each() for each in self.graphs), "use_count > 0"
        self.graphs.append(weakref.ref(graph))
        self.modes.append(capture_error_mode)
        yield


class Graph:
    def replay(self) -> None:
        """Nothing was recorded."""


def test_a_pool_can_be_recorded_into_when_nobody_replays_any_more_what_it_has(monkeypatch):
    pools = Pools(monkeypatch)
    capture = CudaCapture()
    for _ in range(3):
        capture.record(lambda: None)()
    assert all(each() for each in pools.graphs) and pools.modes == ["global"] * 3
    del capture
    gc.collect()
    assert not any(each() for each in pools.graphs), "they go with it"
