"""Sequences whose time is over: ended by the worker, in the queue and while they run, and nobody else with them."""

from types import SimpleNamespace

import numpy as np
import pytest

from shmserve.config import WorkerConfig
from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.finish import KEEP_ALL
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SubmitKind
from shmserve.worker.deadlines import Deadlines

NEVER_NS = 1 << 60


def submit(front, req_id, *, deadline_ns=0, arrival_ns=0, **params):
    params = {"max_tokens": 30, "ignore_eos": True} | params
    request = Submit(
        req_id,
        np.array([3, 4, 5], np.int32),
        SamplingParams(**params),
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
    )
    assert front.submit_ring.try_write(*pack_submit(request))


def bounded(rig, **config):
    """A Rig whose engine has these timeouts, and a clock for them that the test moves."""
    r = rig(max_num_seqs=1)
    r.engine._deadlines = Deadlines(WorkerConfig(**config))
    return r


@pytest.fixture
def clock(monkeypatch):
    """What time it is for the engine."""
    clock = SimpleNamespace(now_ns=1_000_000_000)
    monkeypatch.setattr("shmserve.worker.engine.time.monotonic_ns", lambda: clock.now_ns)
    monkeypatch.setattr("shmserve.worker.deadlines.time.monotonic_ns", lambda: clock.now_ns)
    return clock


def test_who_runs_is_ended_with_what_it_has_and_the_next_begins(rig, clock):
    r = bounded(rig)
    submit(r.front, 1, deadline_ns=clock.now_ns + 50)
    submit(r.front, 2, max_tokens=2)
    for _ in range(3):
        r.step()
    clock.now_ns += 50
    r.run_dry()
    record = r.front.finished[1]
    assert (record.finish, record.completion_tokens) == (FinishReason.TIMEOUT, 3)
    assert record.scheduled_ns and record.keep_bytes == KEEP_ALL
    assert r.front.tokens[1] == r.expected(1, 3)
    assert r.front.finished[2].finish == FinishReason.LENGTH
    assert (r.board["num_timed_out"], r.board["num_finished"]) == (1, 2)
    r.assert_idle()


def test_who_waits_is_ended_unrun_and_the_others_are_untouched(rig, clock):
    r = bounded(rig)
    submit(r.front, 1)
    submit(r.front, 2, deadline_ns=clock.now_ns + 50)
    submit(r.front, 3, deadline_ns=NEVER_NS)
    r.step()
    clock.now_ns += 50
    r.step()
    r.front.read()
    record = r.front.finished[2]
    assert (record.finish, record.scheduled_ns) == (FinishReason.TIMEOUT, 0)
    assert 2 not in r.front.started
    r.run_dry()
    assert [r.front.finished[i].finish for i in (1, 3)] == [FinishReason.LENGTH] * 2
    assert len(r.front.tokens[1]) == 30
    r.assert_idle()


def test_the_operators_bounds_count_from_the_arrival_and_from_the_start(rig, clock):
    r = bounded(rig, waiting_timeout_s=1e-6, running_timeout_s=2e-6)
    begin = clock.now_ns
    submit(r.front, 1, arrival_ns=begin)
    submit(r.front, 2, arrival_ns=begin - 500)
    r.step()
    clock.now_ns = begin + 499
    r.step()
    r.front.read()
    assert not r.front.finished
    clock.now_ns = begin + 500
    r.step()
    r.front.read()
    assert list(r.front.finished) == [2], "it had waited before it came here"
    clock.now_ns = begin + 1_999  # the bound on waiting is nothing to who runs
    r.step()
    clock.now_ns = begin + 2_000
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.TIMEOUT
    assert len(r.front.tokens[1]) == 4
    r.assert_idle()


def test_a_preempted_sequence_runs_on_the_clock_it_had(rig, clock):
    r = bounded(rig, waiting_timeout_s=1e-6)
    submit(r.front, 1)
    r.step()
    sequence = r.engine._by_id[1]
    r.scheduler._preempt(sequence)
    clock.now_ns += 10_000
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.LENGTH


def test_who_nobody_computes_is_ended_too_and_an_idle_worker_wakes_for_it(rig, clock):
    r = bounded(rig)
    submit(r.front, 1, deadline_ns=clock.now_ns + 5_000_000)
    r.step()
    r.front.control(SubmitKind.PAUSE, 1)
    assert not r.step()  # nothing to compute
    assert r.engine.wait_ms() == 5
    clock.now_ns += 4_500_000
    assert r.engine.wait_ms() == 1, "not 0: it would spin until then"
    clock.now_ns += 1_500_000
    assert r.engine.wait_ms() == 0
    assert not r.step()
    r.front.read()
    assert r.front.finished[1].finish == FinishReason.TIMEOUT, (
        "answered though nothing was computed"
    )
    assert r.engine.wait_ms() is None
    r.assert_idle()


def test_who_ended_is_remembered_by_nobody(rig, clock):
    r = bounded(rig, running_timeout_s=100.0)
    for req_id in range(1, 300):
        submit(r.front, req_id, deadline_ns=NEVER_NS, max_tokens=1)
        r.run_dry()
    assert r.engine._deadlines.num_bounded == 0 and not r.engine._deadlines._heap._heap


def test_the_one_in_flight_is_ended_at_the_step_boundary(rig, clock):
    r = rig(max_num_seqs=2, is_overlapped=True)
    submit(r.front, 1, deadline_ns=clock.now_ns + 50)
    submit(r.front, 2)
    for _ in range(4):
        r.step()
    assert r.engine._overlap.is_flying
    clock.now_ns += 50
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.TIMEOUT
    assert r.front.finished[2].finish == FinishReason.LENGTH
    assert r.front.tokens[1] == r.expected(1, len(r.front.tokens[1]))
    r.assert_idle()


def test_a_deadline_that_a_front_end_cannot_have_meant_is_no_wait_that_the_kernel_refuses(rig):
    """poll() takes an int of milliseconds: more would end the worker, and everybody's requests with it."""
    r = rig()
    submit(r.front, 1, deadline_ns=2**64 - 1)
    r.step()
    wait_ms = r.engine.wait_ms()
    assert 0 < wait_ms < 2**31
    r.run_dry()
