"""The engine with steps launched ahead: what clients get is what they get without, and who leaves does so at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.request import FinishReason
from shmserve.wire.submit_slots import SubmitKind


def follows(r) -> int:
    return r.engine._overlap.num_followed


def submit_many(r):
    """Greedy and drawn, stops, biases (not carried), a length of one, more than there are rows."""
    for req_id in range(1, 10):
        extra = {"stop": (b"a", b"q")} if req_id % 4 == 0 else {}
        if req_id == 5:
            extra["logit_bias"] = ((7, 3.0),)
        r.fronts[req_id % 2].submit(
            req_id,
            prompt=tuple(3 + (req_id * k) % 26 for k in range(req_id)),
            max_tokens=1 + 4 * (req_id % 5),
            **extra,
        )


def outcome(fronts):
    return [
        (dict(front.tokens), {k: v.finish for k, v in front.finished.items()}) for front in fronts
    ]


@pytest.mark.parametrize(
    ("num_blocks", "budget"),
    [(65, 32), (13, 32), (65, 6), (10, 6)],
    ids=["ample", "preempting", "ample, in chunks", "preempting, in chunks"],
)
def test_clients_get_the_same_with_steps_ahead_and_without(rig, num_blocks, budget):
    outcomes = []
    for is_overlapped in (False, True):
        limits = {"num_blocks": num_blocks, "max_num_batched_tokens": budget}
        r = rig(num_http=2, **limits, is_overlapped=is_overlapped)
        submit_many(r)
        r.run_dry()
        r.assert_idle()
        outcomes.append(outcome(r.fronts))
        assert (follows(r) > 0) == is_overlapped
        assert (r.scheduler.num_preempted > 0) == (num_blocks < 65)
    assert outcomes[0] == outcomes[1]
    assert sum(len(finished) for _, finished in outcomes[0]) == 9


@pytest.fixture
def decoding(rig):
    """Requests 1 and 2, two tokens each, and a third on its way."""
    r = rig(is_overlapped=True)
    r.front.submit(1, max_tokens=50, ignore_eos=True)
    r.front.submit(2, max_tokens=50, ignore_eos=True)
    r.step()
    r.step()
    assert r.engine._overlap.is_flying
    r.front.read()
    return r


def test_who_is_aborted_in_flight_is_answered_in_that_step_and_gets_no_further_token(decoding):
    r = decoding
    r.front.control(SubmitKind.ABORT, 1)
    r.step()
    r.front.read()
    assert r.front.finished[1].finish == FinishReason.ABORT and len(r.front.tokens[1]) == 2
    assert len(r.front.tokens[2]) == 3
    assert len(r.scheduler.running) == 1, "its flight has landed: nobody followed it"
    r.front.control(SubmitKind.ABORT, 2)
    r.run_dry()
    r.assert_idle()


def test_an_abort_under_the_forward_pass_frees_when_the_step_ahead_has_landed(decoding):
    r = decoding
    r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 1)
    r.step()
    r.front.read()
    assert r.front.finished[1].finish == FinishReason.ABORT and len(r.front.tokens[1]) == 2
    assert len(r.scheduler.running) == 2, "the step ahead computes it still"
    r.step()
    assert len(r.scheduler.running) == 1
    r.front.control(SubmitKind.ABORT, 2)
    r.run_dry()
    r.assert_idle()


def test_the_id_of_one_that_is_still_in_flight_can_be_used_again(decoding):
    r = decoding
    r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 1)
    r.step()
    r.front.read()
    first = dict(r.front.finished)
    del r.front.finished[1], r.front.started[1], r.front.tokens[1]
    r.front.submit(1, max_tokens=3)
    r.front.control(SubmitKind.ABORT, 2)
    r.run_dry()
    assert first[1].finish == FinishReason.ABORT
    assert r.front.finished[1].completion_tokens == len(r.front.tokens[1]) > 0
    r.assert_idle()


def test_a_front_end_that_leaves_with_a_step_in_flight_takes_its_sequences_along(rig):
    r = rig(num_http=2, is_overlapped=True)
    for req_id in (1, 2):
        r.fronts[req_id - 1].submit(req_id, max_tokens=9, ignore_eos=True)
    r.step()
    r.step()
    assert r.engine._overlap.is_flying
    r.engine.close_channel(1)
    for _ in range(20):
        r.step()
        r.front.read()
    assert r.front.finished[1].completion_tokens == 9
    r.assert_idle()


def test_a_paused_request_keeps_what_was_in_flight_and_no_more(decoding):
    r = decoding
    r.front.control(SubmitKind.PAUSE, 1)
    for _ in range(5):
        r.step()
    r.front.read()
    assert len(r.front.tokens[1]) == 3 and len(r.front.tokens[2]) == 7
    r.front.control(SubmitKind.RESUME, 1)
    r.step()  # the one in flight, which it is not in, is the last without it
    r.step()
    r.front.read()
    assert len(r.front.tokens[1]) == 4
    for req_id in (1, 2):
        r.front.control(SubmitKind.ABORT, req_id)
    r.run_dry()
    r.assert_idle()


def test_a_cache_that_is_flushed_with_a_step_in_flight_changes_no_token(rig):
    outcomes = []
    for is_overlapped in (False, True):
        r = rig(is_overlapped=is_overlapped)
        for req_id in (1, 2):
            r.front.submit(req_id, prompt=(5,) * 9, max_tokens=20, seed=4, ignore_eos=True)
        r.step()
        r.step()
        r.front.control(SubmitKind.FLUSH_CACHE, 77)
        r.run_dry()
        r.assert_idle()
        outcomes.append({req_id: r.front.tokens[req_id] for req_id in (1, 2)})
    assert outcomes[0] == outcomes[1] and len(outcomes[0][1]) == 20


def test_drop_policy_ends_requests_in_flight(rig):
    r = rig(is_overlapped=True, token_slots=8, token_policy="drop")
    for req_id in (1, 2, 3):
        r.front.submit(req_id, max_tokens=40, ignore_eos=True)
    for _ in range(12):
        r.step()
    r.run_dry()
    assert FinishReason.ERROR in {record.finish for record in r.front.finished.values()}
    assert set(r.front.finished) == {1, 2, 3}
    r.assert_idle()


ACTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20), st.integers(1, 12)),
    st.tuples(st.sampled_from(["abort", "pause", "resume", "abort under"]), st.integers(0, 9)),
    st.just(("flush",)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


def act(r, kind, *args):
    """Does one thing; the ids of what it aborts."""
    if kind == "submit":
        length, most = args
        req_id = len(r.front.submitted) + 1
        # Few different prompts: blocks are shared, and become superfluous.
        prompt = tuple(3 + (length % 3 + i) % 26 for i in range(length))
        r.front.submit(req_id, prompt=prompt, max_tokens=most, seed=length % 3)
    elif kind == "step":
        for _ in range(args[0]):
            r.step()
            r.front.read()
    elif kind == "flush":
        r.num_flushed = getattr(r, "num_flushed", 0) + 1
        r.front.control(SubmitKind.FLUSH_CACHE, (1 << 40) + r.num_flushed)
    elif args[0] < len(r.front.submitted):
        req_id = r.front.submitted[args[0]]
        if kind == "abort under":
            r.under_forward = lambda: r.front.control(SubmitKind.ABORT, req_id)
        else:
            r.front.control(SubmitKind[kind.upper()], req_id)
        if kind.startswith("abort"):
            return {req_id}
    return set()


@settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
@given(
    acts=st.lists(ACTS, max_size=40),
    num_blocks=st.integers(12, 24),
    budget=st.sampled_from([5, 7, 32]),
)
def test_whatever_happens_who_is_not_aborted_gets_the_same(new_rig, acts, num_blocks, budget):
    """Both rigs hold the laws of scheduler and wire at every step; which step an abort meets may differ between them."""
    tokens = []
    for is_overlapped in (False, True):
        limits = {"num_blocks": num_blocks, "max_num_batched_tokens": budget}
        r = new_rig(**limits, submit_slots=128, is_overlapped=is_overlapped)
        try:
            aborted: set[int] = set()
            for kind, *args in acts:
                aborted |= act(r, kind, *args)
            for req_id in r.front.submitted:
                r.front.control(SubmitKind.RESUME, req_id)
            r.run_dry()
            r.assert_idle()
            assert r.engine._overlap.landed() == []
            tokens.append({k: v for k, v in r.front.tokens.items() if k not in aborted})
        finally:
            r.close()
    assert tokens[0] == tokens[1]
