"""The engine between two real ends of real rings: every SUBMIT is answered once, whatever happens to it on the way."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.boards import Phase
from shmserve.request import FinishReason, SamplingParams
from shmserve.rings import layout as L
from shmserve.rings.board import BoardReader
from shmserve.wire.finish import KEEP_ALL
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, SubmitKind, digest_of_req_id, pack_control
from shmserve.wire.tokens import TokenKind

EOS = 1
POLICIES = ["coalesce", "block", "drop"]


def reasons(front) -> dict[int, FinishReason]:
    return {req_id: FinishReason(record.finish) for req_id, record in front.finished.items()}


# -- one request -----------------------------------------------------------------------------------------------------------


def test_a_request_is_started_streamed_and_finished(rig):
    r = rig()
    r.front.submit(7, prompt=(3, 4, 5, 6), max_tokens=3)
    r.run_dry()
    assert r.front.kinds == [TokenKind.READY, TokenKind.STARTED] + [TokenKind.TOKENS] * 3 + [
        TokenKind.FINISH
    ]
    assert r.front.tokens[7] == r.expected(7, 3)
    assert r.front.times_ns[7] == [r.made[7, index][1] for index in range(3)]
    started, finished = r.front.started[7], r.front.finished[7]
    assert (started.prompt_tokens, started.completion_tokens, started.finish) == (4, 0, 0)
    assert finished.finish == FinishReason.LENGTH
    assert (finished.prompt_tokens, finished.completion_tokens) == (4, 3)
    assert finished.keep_bytes == KEEP_ALL
    assert (finished.matched_token, finished.matched_stop) == (-1, -1)
    assert (
        0
        < finished.received_ns
        <= finished.admitted_ns
        <= finished.scheduled_ns
        <= finished.prefill_end_ns
        <= finished.first_token_ns
        <= finished.time_ns
    )
    assert finished.first_token_ns == r.front.times_ns[7][0]
    r.assert_idle()


def test_a_step_is_published_once(rig):
    r = rig()
    for req_id in (1, 2, 3):
        r.front.submit(req_id, max_tokens=9)
    r.step()
    words = r.front.channel.tokens.segment.words()
    for _ in range(5):
        before = words[L.W_PUBLISHES]
        r.step()
        assert words[L.W_PUBLISHES] == before + 1


def test_board_counts_what_was_done(rig):
    r = rig()
    r.front.submit(1, prompt=(3,) * 5, max_tokens=4)
    r.front.submit(2, prompt=(4,) * 6, max_tokens=9)
    r.step()
    assert (r.board["running"], r.board["waiting"], r.board["kv_blocks_used"]) == (2, 0, 4)
    assert r.board["phase"] == Phase.PREFILL
    r.step()
    assert r.board["phase"] == Phase.DECODE
    r.front.control(SubmitKind.ABORT, 2)
    r.run_dry()
    r.engine.show_idle()
    assert r.board["phase"] == Phase.IDLE
    shown = {name: r.board[name] for name in ("running", "kv_blocks_used", "num_admitted",
             "num_finished", "num_aborted", "prompt_tokens", "generation_tokens", "step")}  # fmt: skip
    assert shown == {"running": 0, "kv_blocks_used": 0, "num_admitted": 2, "num_finished": 1,
                     "num_aborted": 1, "prompt_tokens": 11, "generation_tokens": 6, "step": 4}  # fmt: skip


def test_eos_at_the_first_token(rig):
    """Case B9: it is counted, marked, and ends the request."""
    r = rig()
    r.front.submit(1, logit_bias=((EOS, 100.0),))
    r.front.submit(2, logit_bias=((EOS, 100.0),), ignore_eos=True, max_tokens=2)
    r.run_dry()
    assert r.front.tokens[1] == [EOS]
    assert r.front.last_is_stop == {1}
    assert reasons(r.front) == {1: FinishReason.STOP_TOKEN, 2: FinishReason.LENGTH}
    assert r.front.finished[1].matched_token == EOS


def test_a_stop_string_over_several_tokens_of_one_step(rig):
    r = rig(script={5: [[3, 4], [5, 6, 7, 8]]})
    r.front.submit(1, seed=5, stop=(b"zz", b"de"), max_tokens=9)
    r.run_dry()
    assert r.front.tokens[1] == [3, 4, 5, 6, 7]  # a b c d e
    assert r.front.finished[1].keep_bytes == 3
    assert r.front.finished[1].matched_stop == 1


def test_top_logprobs_stand_before_their_tokens(rig):
    r = rig()
    run = r.runner.run

    def with_top(batch, sampling):
        output = run(batch, sampling)
        top = {0: (np.arange(13, dtype=np.int32)[None, :], np.zeros((1, 13), np.float32))}
        return type(output)(
            output.token_ids, output.time_ns, logprobs=output.token_ids * 0.0, top=top
        )

    r.runner.run = with_top
    r.front.submit(1, num_logprobs=13, max_tokens=2)
    r.run_dry()
    assert r.front.top == {(1, 0): list(range(13)), (1, 1): list(range(13))}


def test_logits_that_are_not_finite_end_one_request_with_an_error(rig):
    r = rig()
    run = r.runner.run

    def with_fault(batch, sampling):
        output = run(batch, sampling)
        ids = r.scheduler.columns.req_id[batch.rows[batch.sample_seqs]].tolist()
        failed = (ids.index(2),) if 2 in ids else ()
        return type(output)(output.token_ids, output.time_ns, failed=failed)

    r.runner.run = with_fault
    for req_id in (1, 2, 3):
        r.front.submit(req_id)
    r.run_dry()
    assert reasons(r.front) == {
        1: FinishReason.LENGTH,
        2: FinishReason.ERROR,
        3: FinishReason.LENGTH,
    }
    assert "not finite" in r.front.messages[2]
    r.assert_idle()


# -- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": ()}, "at least one"),
        ({"prompt": (3, 29)}, "0 to 28"),
        ({"prompt": (-1,)}, "0 to 28"),
        ({"prompt": (3,) * 64}, "64 tokens does not fit: at most 63"),
        ({"stop_token_ids": (29,)}, "stop token ids"),
        ({"stop_token_ids": (-1,)}, "stop token ids"),
        ({"logit_bias": ((29, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((3, float("nan")),)}, "finite"),
        ({"temperature": float("inf")}, "finite"),
        ({"max_tokens": 0}, "max_tokens must be 1"),
        ({"min_tokens": 2**31}, "min_tokens"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_gets_a_message_and_an_error(rig, changes, says):
    r = rig()
    r.front.submit(1, **changes)
    r.front.submit(2)
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}
    assert says in r.front.messages[1]
    assert 1 not in r.front.started
    r.assert_idle()


def test_a_grammar_that_cannot_be_followed_is_answered_though_no_step_comes(rig):
    r = rig()
    r.front.submit(1, grammar='start: "a"')
    assert not r.step(), "the worker sleeps now: nothing runs"
    r.front.read()
    assert reasons(r.front) == {1: FinishReason.ERROR}
    assert "grammar" in r.front.messages[1]
    r.assert_idle()


def test_the_largest_numbers_are_no_fault(rig):
    r = rig()
    r.front.submit(
        1, prompt=(3,) * 63, max_tokens=2**31 - 1, min_tokens=2**31 - 1, seed=2**64 - 1,
        priority=-(2**31), top_k=2**31 - 1,
    )  # fmt: skip
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH}


def test_a_submit_that_cannot_be_read_is_refused_and_a_living_request_is_left_alone(rig):
    r = rig()
    r.front.submit(1, max_tokens=6)
    r.step()
    lie = bytearray(pack_submit(Submit(1, np.ones(2, np.int32), SamplingParams(max_tokens=4)))[0])
    lie[12:16] = b"\xff\xff\xff\xff"
    r.front.send_raw(bytes(lie))
    r.front.submit(1)  # the same id again
    lie[0] = 9
    r.front.send_raw(bytes(lie))
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH, 9: FinishReason.ERROR}
    assert len(r.front.tokens[1]) == 6


@settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.tuples(st.integers(1, 7), st.binary(max_size=300)),
            st.integers(1, 60),
        ),
        max_size=10,
    )
)
def test_no_bytes_of_a_front_end_end_the_worker(new_rig, units):
    """Noise, noise that says what it is, and among it real requests, which are all served."""
    r = new_rig()
    try:
        for number, unit in enumerate(units, 1):
            if isinstance(unit, int):
                r.front.submit(number << 32, prompt=(3,) * unit)
                continue
            kind, noise = unit if isinstance(unit, tuple) else (None, unit)
            slot = bytearray(noise.ljust(SUBMIT_SLOT_BYTES, b"\0"))
            if kind is not None:
                slot[:16] = ((number << 32) + 1).to_bytes(8, "little") + bytes(
                    [kind, 0, 1, 0, 0, 0, 0, 0]
                )
            r.front.send_raw(bytes(slot))
            r.step()
        r.run_dry()
        assert set(r.front.submitted) <= set(r.front.finished)
        ends = {r.front.finished[n].finish for n in r.front.submitted}
        may = {FinishReason.LENGTH}
        if any(isinstance(unit, tuple) and unit[0] == SubmitKind.ABORT_BY_ID for unit in units):
            may.add(FinishReason.ABORT)  # noise that says: all of them
        assert ends <= may
        r.assert_idle()
    finally:
        r.close()


# -- aborts ----------------------------------------------------------------------------------------------------------------


def test_abort_before_anything_was_computed(rig):
    r = rig()
    r.front.submit(1)
    r.front.control(SubmitKind.ABORT, 1)
    assert not r.step()
    r.front.read()
    assert reasons(r.front) == {1: FinishReason.ABORT}
    assert 1 not in r.front.started
    r.assert_idle()


def test_abort_of_a_running_request_frees_it_before_the_next_step(rig):
    r = rig()
    r.front.submit(1, max_tokens=50)
    r.step()
    r.step()
    r.front.control(SubmitKind.ABORT, 1)
    assert not r.step()
    r.assert_idle()
    r.front.read()
    assert reasons(r.front) == {1: FinishReason.ABORT}
    assert r.front.finished[1].completion_tokens == 2


def test_abort_under_the_forward_pass_frees_at_the_boundary_and_gets_no_token(rig):
    r = rig()
    r.front.submit(1, max_tokens=50)
    r.front.submit(2, max_tokens=50)
    r.step()
    used = r.scheduler.blocks.num_used

    def abort():
        r.front.control(SubmitKind.ABORT, 1)
        r.front.control(SubmitKind.ABORT, 1)  # twice: by the client, and by somebody else
        assert r.scheduler.blocks.num_used == used

    r.under_forward = abort
    r.step()
    r.front.read()
    assert reasons(r.front) == {1: FinishReason.ABORT}
    assert [len(r.front.tokens[n]) for n in (1, 2)] == [1, 2]
    assert len(r.scheduler.running) == 1
    assert r.scheduler.blocks.num_used < used


def test_abort_under_the_forward_pass_of_one_that_waits(rig):
    r = rig(max_num_seqs=1)
    r.front.submit(1, max_tokens=3)
    r.front.submit(2)
    r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 2)
    r.step()
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH, 2: FinishReason.ABORT}


def test_abort_of_the_step_that_would_have_ended_it_wins(rig):
    r = rig()
    r.front.submit(1, max_tokens=1)
    r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 1)
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.ABORT}
    assert r.front.tokens[1] == []


def test_abort_after_the_end_and_of_nobody_is_silent(rig):
    r = rig()
    r.front.submit(1)
    r.run_dry()
    r.front.control(SubmitKind.ABORT, 1)
    r.front.control(SubmitKind.ABORT, 99)
    r.front.control(SubmitKind.PAUSE, 99)
    r.run_dry()
    assert list(r.front.finished) == [1]


def test_a_row_aborted_under_a_forward_pass_is_clean_for_the_next(rig):
    r = rig(max_num_seqs=1)
    r.front.submit(1, max_tokens=50)
    r.front.submit(2, max_tokens=3)
    r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 1)
    r.step()
    r.run_dry()
    assert r.front.tokens[2] == r.expected(2, 3)


def test_submit_under_the_forward_pass_waits_for_the_next_step(rig):
    r = rig()
    r.front.submit(1, max_tokens=2)
    r.under_forward = lambda: r.front.submit(2, max_tokens=2)
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}
    assert r.front.tokens[2] == r.expected(2, 2)


# -- pauses and preemption ------------------------------------------------------------------------------------------------


def test_pause_stops_one_request_and_resume_lets_it_go_on(rig):
    r = rig()
    r.front.submit(1, max_tokens=6)
    r.front.submit(2, max_tokens=6)
    r.step()
    r.front.control(SubmitKind.PAUSE, 1)
    r.run_dry()
    assert reasons(r.front) == {2: FinishReason.LENGTH}
    assert r.board["paused"] == 1
    assert len(r.front.tokens[1]) == 1
    r.front.control(SubmitKind.RESUME, 1)
    r.run_dry()
    assert r.front.tokens[1] == r.expected(1, 6)
    assert r.board["paused"] == 0


def test_a_sequence_that_is_paused_for_two_reasons_is_counted_once_and_one_that_compiles_too(rig):
    r = rig()
    r.front.submit(1, max_tokens=6)
    r.front.submit(2, max_tokens=6)
    r.step()
    r.front.control(SubmitKind.PAUSE, 1)
    r.engine._constraints._compiling.add(2)
    r.step()
    r.engine._pauses.backlog(1)
    assert len(r.engine._pauses) == 2
    r.front.control(SubmitKind.PAUSE, 2)
    r.step()
    assert len(r.engine._pauses) == 2
    r.engine._constraints._compiling.clear()
    assert len(r.engine._pauses) == 2, "held still"
    r.front.control(SubmitKind.RESUME, 2)
    r.step()
    assert len(r.engine._pauses) == 1


def test_a_client_that_does_not_read_cannot_keep_others_out(rig):
    r = rig(max_num_seqs=1)
    r.front.submit(1, max_tokens=6)
    r.step()
    r.front.control(SubmitKind.PAUSE, 1)
    r.front.submit(2)
    r.run_dry()
    assert reasons(r.front) == {2: FinishReason.LENGTH}
    r.front.control(SubmitKind.RESUME, 1)
    r.run_dry()
    assert r.front.finished[1].num_retractions == 1
    assert r.front.tokens[1] == r.expected(1, 6)


def test_preemption_is_invisible_in_the_stream(rig):
    free = rig(num_blocks=65)
    tight = rig(num_blocks=9)
    for r in (free, tight):
        for req_id in (1, 2, 3, 4):
            r.front.submit(req_id, prompt=(3,) * 6, max_tokens=20)
        r.run_dry()
    assert free.board["num_preempted"] == 0
    assert tight.board["num_preempted"] > 3
    assert tight.front.tokens == free.front.tokens
    assert (
        sum(f.num_retractions for f in tight.front.finished.values())
        == tight.board["num_preempted"]
    )
    assert len(tight.front.started) == 4
    tight.assert_idle()


def test_engine_itl_counts_the_gap_of_a_preemption(rig):
    r = rig(num_blocks=9)
    for req_id in (1, 2, 3, 4):
        r.front.submit(req_id, prompt=(3,) * 6, max_tokens=20)
    r.run_dry()
    assert r.board["num_preempted"] > 0
    itl = BoardReader(r.board.segment).histograms()["itl_engine_us"]
    assert itl.count == 4 * 19  # a gap before every token but the first


# -- channels --------------------------------------------------------------------------------------------------------------


def test_front_ends_get_their_own_records(rig):
    r = rig(num_http=3)
    for front in r.fronts:
        for n in range(2):
            front.submit(10 * front.http + n, max_tokens=5, stop=(b"~",) if n else ())
    r.run_dry()
    for front in r.fronts:
        assert list(front.finished) == front.submitted
        assert all(front.tokens[n] == r.expected(n, 5) for n in front.submitted)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_front_end_that_is_gone_leaves_nothing_and_the_other_goes_on(rig, policy):
    r = rig(
        num_http=2,
        token_slots=4,
        token_policy=policy,
        block_deadline_s=0,
        coalesce_tokens=4,
        max_num_seqs=8,
    )
    gone, other = r.fronts
    for n in range(5):
        gone.submit(n, max_tokens=50)
    gone.control(SubmitKind.PAUSE, 0)
    other.submit(100, max_tokens=10)
    for _ in range(6):  # nobody reads `gone`: its ring is full, and more waits outside
        r.step()
        other.read()
    r.engine.close_channel(0)
    r.scheduler.check()
    assert [s.channel for s in r.scheduler.running] == [1]
    r.fronts = [other]
    r.run_dry()
    assert other.tokens[100] == r.expected(100, 10)
    r.assert_idle()
    assert r.engine.poll_fds() == [r.engine.channels.inboxes[1].data_fd]
    gone.channel.unlink()
    gone.channel.close()


def test_a_front_end_that_comes_back_gets_a_new_channel(rig):
    r = rig()
    r.front.submit(1, max_tokens=50)
    r.step()
    old = r.front
    r.engine.close_channel(0)
    r.engine.close_channel(0)
    old.channel.unlink()
    r.fronts = [r.open(0, epoch=2)]
    r.front.submit(1, max_tokens=3)  # its ids may even be the same
    r.run_dry()
    assert r.front.tokens[1] == r.expected(1, 3)
    old.channel.close()


@pytest.mark.parametrize("ring", ["submit", "tokens"])
def test_counters_that_cannot_be_end_that_channel_alone(rig, ring):
    r = rig(num_http=2, token_slots=4, max_num_seqs=8)
    liar, other = r.fronts
    for front in r.fronts:
        front.submit(front.http + 1, max_tokens=20)
    r.step()
    if ring == "submit":
        r.under_forward = lambda: liar.channel.submit.data.add(1000)
    else:
        liar.channel.tokens.credits.add(1000)
    for _ in range(30):
        r.step()
        other.read()
    assert list(other.finished) == [2]
    assert other.tokens[2] == r.expected(2, 20)
    r.assert_idle()
    assert len(r.engine.poll_fds()) == 1


# -- a ring that is full ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["coalesce", "block"])
def test_a_full_ring_loses_nothing_and_keeps_order_and_times(rig, policy):
    r = rig(token_slots=2, token_policy=policy, block_deadline_s=0, max_num_seqs=8)
    for req_id in range(1, 9):
        r.front.submit(req_id, max_tokens=20, stop=(b"~",) if req_id % 2 else ())
    for _ in range(2000):
        r.step()
        r.front.read(1)
        if len(r.front.finished) == 8:
            break
    assert len(r.front.finished) == 8
    for req_id in range(1, 9):
        assert r.front.tokens[req_id] == r.expected(req_id, 20)
        for index, got_ns in enumerate(r.front.times_ns[req_id]):
            assert 0 <= r.made[req_id, index][1] - got_ns < 1000
    assert r.front.channel.tokens.segment.words()[L.W_COALESCED] > 0
    r.assert_idle()


def test_past_coalesce_tokens_the_heaviest_are_paused_and_credits_resume_them(rig):
    r = rig(token_slots=2, coalesce_tokens=12, max_num_seqs=4)
    for req_id in range(1, 5):
        r.front.submit(req_id, max_tokens=40)
    most = 0
    for _ in range(100):
        computes = r.step()
        most = max(most, r.engine.channels.emitters[0].writer.pending_weight)
        if not computes:
            break
    assert not computes, "everybody is paused"
    assert r.board["paused"] == 4
    assert 12 < most <= 12 + 4 * 4
    assert not r.engine.has_work
    # What wakes the worker is credit: its descriptor is in the poll set, and the step that it wakes goes on computing.
    assert r.engine.channels.emitters[0].credit_fd in r.engine.poll_fds()
    r.run_dry()
    for req_id in range(1, 5):
        assert r.front.tokens[req_id] == r.expected(req_id, 40)


def test_the_step_that_credits_wake_computes_when_it_relieves(rig):
    """All are paused, and one reading empties what waits: if that step computed nothing, nothing would wake the next."""
    r = rig(token_slots=2, coalesce_tokens=1, max_num_seqs=2)
    r.front.submit(1, max_tokens=30)
    for _ in range(50):
        if not r.step():
            break
    assert r.board["paused"] == 1
    while r.engine.channels.emitters[0].is_starved or r.board["paused"]:
        assert r.front.read()
        has_computed = r.step()
        if not r.engine.channels.emitters[0].is_starved and not has_computed:
            raise AssertionError("the worker would sleep for ever")
        if len(r.front.finished) == 1:
            break
    r.run_dry()
    assert r.front.tokens[1] == r.expected(1, 30)


def test_an_ended_request_with_much_pending_does_not_shield_the_others(rig):
    """The limit is the channel's: when the heaviest cannot be paused any more, the next are."""
    r = rig(token_slots=2, coalesce_tokens=20, max_num_seqs=8)
    r.front.submit(1, max_tokens=50)
    for _ in range(60):
        if not r.step():
            break
    r.front.control(SubmitKind.ABORT, 1)
    for req_id in range(2, 9):
        r.front.submit(req_id, max_tokens=50)
    for _ in range(60):
        if not r.step():
            break
    assert r.engine.channels.emitters[0].writer.pending_weight <= 20 + 8 * 8
    r.run_dry()
    assert len(r.front.finished) == 8


def test_drop_ends_with_an_error_and_never_leaves_a_hole(rig):
    r = rig(token_slots=8, token_policy="drop", max_num_seqs=8)
    for req_id in range(1, 9):
        r.front.submit(req_id, max_tokens=30, stop=(b"~",) if req_id % 2 else ())
    for _ in range(60):
        r.step()
        r.front.read(3)
    r.run_dry()
    r.front.submit(9, max_tokens=30)
    r.run_dry()
    assert sorted(r.front.finished) == list(range(1, 10))
    ended = reasons(r.front)
    assert set(ended.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    for req_id, reason in ended.items():
        got = r.front.tokens[req_id]
        assert got == r.expected(req_id, len(got))
        if reason is FinishReason.ERROR:
            assert r.front.messages[req_id] == "the token ring was full and its policy is drop"
        else:
            assert len(got) == 30
    r.assert_idle()
    assert r.board["num_finished"] == 9


@pytest.mark.parametrize("policy", POLICIES)
def test_refusals_and_aborts_are_answered_through_a_full_ring(rig, policy):
    r = rig(token_slots=2, token_policy=policy, block_deadline_s=0)
    r.front.submit(1, max_tokens=50)
    for _ in range(4):
        r.step()
    for req_id in range(2, 9):
        r.front.submit(req_id, prompt=(3,) * 70 if req_id % 2 else (3,))
        r.front.control(SubmitKind.ABORT, req_id)
    r.front.control(SubmitKind.ABORT, 1)
    r.run_dry()
    assert sorted(r.front.finished) == list(range(1, 9))
    r.assert_idle()


# -- the rest --------------------------------------------------------------------------------------------------------------


def test_a_request_is_evicted_while_nothing_of_it_was_computed(rig):
    r = rig(num_http=2, max_num_seqs=1)
    r.front.submit(1, max_tokens=30)
    r.step()
    r.front.submit(2, max_tokens=3)
    r.front.submit(3, max_tokens=3)
    # Another front end's word counts, for whoever has not begun.
    for req_id in (1, 2, 99):
        r.fronts[1].control(SubmitKind.EVICT, req_id)
    r.run_dry()
    assert reasons(r.front) == {
        1: FinishReason.LENGTH,
        2: FinishReason.EVICTED,
        3: FinishReason.LENGTH,
    }
    assert r.front.tokens.get(2, []) == [] and len(r.front.tokens[1]) == 30
    assert r.fronts[1].finished == {}
    r.assert_idle()


def test_one_that_was_preempted_is_not_evicted(rig):
    r = rig(num_http=2, num_blocks=9, max_num_seqs=2)
    for req_id in (1, 2):
        r.front.submit(req_id, prompt=(3 + req_id,) * 6, max_tokens=20)
    for _ in range(40):
        r.step()
        if r.scheduler.num_preempted:
            break
    assert [s.req_id for s in r.scheduler.waiting] == [2]
    r.fronts[1].control(SubmitKind.EVICT, 2)
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}


def test_an_id_of_our_own_is_aborted_by_its_digest(rig):
    r = rig(num_http=2)
    for req_id in (1, 2):
        r.front.submit(req_id, max_tokens=40)
    r.step()
    for asked, req_id in ((77, 2), (78, 5)):
        digest = digest_of_req_id(req_id)
        r.fronts[1].send_raw(pack_control(SubmitKind.ABORT_BY_ID, asked, time_ns=1, digest=digest))
    r.run_dry()
    assert reasons(r.front) == {1: FinishReason.LENGTH, 2: FinishReason.ABORT}
    assert len(r.front.tokens[2]) < 3
    told = {req_id: end.matched_token for req_id, end in r.fronts[1].finished.items()}
    assert told == {77: 1, 78: 0}


def test_flush_cache_is_answered(rig):
    r = rig()
    r.front.control(SubmitKind.FLUSH_CACHE, 5)
    r.run_dry()
    assert list(r.front.finished) == [5]


def test_emission_log_tells_each_token_when_it_was_made(rig, tmp_path):
    path = tmp_path / "emission.jsonl"
    r = rig(log_path=path, script={1: [[3, 4], [5]]}, num_blocks=9)
    for req_id in (1, 2, 3):
        r.front.submit(req_id, prompt=(3,) * 6, max_tokens=12)
    r.run_dry()
    r.engine.show_idle()
    logged = {}
    for number, line in enumerate(map(json.loads, path.read_text().splitlines()), 1):
        assert line["step"] == number
        counts = line.get("counts", [1] * len(line["req_ids"]))
        for name, index, count in zip(line["req_ids"], line["indices"], counts, strict=True):
            for k in range(count):
                logged[int(name, 16), index + k] = line["time_ns"]
    told = {
        (req_id, index): ns
        for req_id, times in r.front.times_ns.items()
        for index, ns in enumerate(times)
    }
    assert logged == told
    assert r.front.tokens[1] == [3, 4, 5, EOS]


# -- the law ---------------------------------------------------------------------------------------------------------------

actions_of = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 70), st.integers(1, 12)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("pause"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("resume"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("read"), st.integers(1, 6)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=settings.default.max_examples * 6 // 5, deadline=None)
@given(
    actions=actions_of,
    policy=st.sampled_from(POLICIES),
    token_slots=st.sampled_from([2, 4, 16]),
    num_blocks=st.integers(6, 20),
    max_num_seqs=st.integers(1, 5),
    num_http=st.integers(1, 2),
    script=st.sampled_from([None, {3: [[3, 4, 5], [6]], 4: [[3], [4] * 9]}]),
    coalesce_tokens=st.sampled_from([3, 1000]),
)
def test_every_submit_is_answered_by_exactly_one_finish(
    new_rig,
    actions,
    policy,
    token_slots,
    num_blocks,
    max_num_seqs,
    num_http,
    script,
    coalesce_tokens,
):
    """Whatever the front ends ask and however late they read. (`FrontEnd` asserts order, no hole, and one end.)"""
    r = new_rig(
        num_http=num_http,
        token_slots=token_slots,
        token_policy=policy,
        block_deadline_s=0,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        script=script,
        coalesce_tokens=coalesce_tokens,
    )
    try:
        number = 0
        for action, *args in actions:
            front = r.fronts[number % num_http]
            if action == "submit":
                number += 1
                front = r.fronts[number % num_http]
                stop = ((), (b"a",), (b"~",))[number % 3]
                front.submit(
                    number,
                    prompt=(3,) * args[0],
                    max_tokens=args[1],
                    stop=stop,
                    priority=number % 2,
                )
            elif action == "step":
                for _ in range(args[0]):
                    r.step()
            elif action == "read":
                for each in r.fronts:
                    each.read(args[0])
            elif number:
                kind = SubmitKind[action.upper()]
                victim, is_under_forward = args[0] % number + 1, args[1]

                def ask(front=front, kind=kind, victim=victim):
                    front.control(kind, victim)

                if is_under_forward:
                    r.under_forward = ask
                    r.step()
                    if r.under_forward is not None:  # nothing was computed
                        r.under_forward = None
                        ask()
                else:
                    ask()
                r.step()
        for n in range(1, number + 1):
            r.fronts[0].control(SubmitKind.RESUME, n)
            r.step()
        r.run_dry()
        for front in r.fronts:
            assert sorted(front.finished) == sorted(front.submitted)
            for req_id, got in front.tokens.items():
                assert got == r.expected(req_id, len(got))
            for req_id, reason in reasons(front).items():
                if reason is FinishReason.LENGTH:
                    index = front.finished[req_id].completion_tokens
                    assert index == len(front.tokens[req_id]) > 0
        r.assert_idle()
    finally:
        r.close()
