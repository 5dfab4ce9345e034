"""A step's tokens become records and endings: the same ones, whichever path a sequence takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.request import FinishReason, SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.wire.logprobs import TOP_DTYPE
from shmserve.wire.tokens import FLAG_LAST_IS_STOP, TOKENS_DTYPE, TokenKind
from shmserve.worker.batch import StepOutput
from shmserve.worker.columns import STOP_COLUMNS
from shmserve.worker.commit import Committer
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import Ending, StopConditions

EOS = 1
BYTES = TokenBytes.from_list([b"<unk>", b"<eos>", *(bytes([b]) for b in range(97, 123))])


class Desk:
    """A scheduler whose sequences have computed their prompts, and the committer of the tokens that the test deals."""

    def __init__(self, *params: SamplingParams, num_prompt=3, most_tokens=8):
        info = RunnerInfo("fake", len(BYTES), 64, 200, 4, most_tokens)
        self.scheduler = Scheduler(
            info, max_num_seqs=len(params), max_num_batched_tokens=256, eos_ids=(EOS,)
        )
        self.committer = Committer(self.scheduler, StopConditions(BYTES, (0, 1)))
        self.sequences = []
        for n, each in enumerate(params):
            prompt = np.full(num_prompt, 5, np.int32)
            self.sequences.append(Sequence(n + 1, n % 2, each, prompt, n, 1))
            self.scheduler.add(self.sequences[-1])
        self.step = 0
        self.now_ns = 0

    def deal(self, *tokens: list[int], under_forward=lambda: None, **output):
        """One step that gives each running sequence its list of tokens."""
        self.step += 1
        self.now_ns += 1_000_000
        batch, _ = self.scheduler.schedule(self.step, self.now_ns)
        under_forward()
        assert len(batch.sample_seqs) == len(tokens)
        width = max(map(len, tokens))
        ids = np.array([t + [0] * (width - len(t)) for t in tokens], np.int32)
        if width > 1 or "counts" in output:
            output["counts"] = np.array([len(t) for t in tokens], np.int32)
        self.scheduler.advance(batch, self.now_ns)
        committed = self.committer.commit(
            batch, StepOutput(ids, self.now_ns, **output), self.now_ns + 7_000
        )
        self.scheduler.check()
        return committed


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, **changes})


def records_of(unit: bytes):
    """The TOKENS slots of a unit, which holds nothing else."""
    return np.frombuffer(unit, TOKENS_DTYPE)


def kept(sequence: Sequence, desk: Desk) -> list[int]:
    columns = desk.scheduler.columns
    return columns.token_ids[sequence.row, 3 : columns.num_tokens[sequence.row]].tolist()


def test_plain_tokens_go_out_as_columns():
    desk = Desk(params(), params(), params())
    desk.deal([4], [5], [6])
    done = desk.deal([7], [8], [9])
    records = done.records
    assert records["req_id"].tolist() == [1, 2, 3]
    assert records["index"].tolist() == [1, 1, 1]
    assert records["token_ids"][:, 0].tolist() == [7, 8, 9]
    assert set(records["kind"].tolist()) == {TokenKind.TOKENS}
    assert set(records["count"].tolist()) == {1}
    assert set(records["time_ns"].tolist()) == {desk.now_ns}
    assert records["dt_us"][:, 0].tolist() == [7, 7, 7]  # the publish delay
    assert records["step"].tolist() == [2, 2, 2]
    assert not records["flags"].any()
    assert done.channels.tolist() == [0, 1, 0]
    assert (done.units, done.endings, done.num_tokens) == ([], [], 3)
    assert [kept(s, desk) for s in desk.sequences] == [[4, 7], [5, 8], [6, 9]]
    assert desk.scheduler.sampling.position[:3].tolist() == [2, 2, 2]


def test_itl_is_counted_between_tokens_of_one_sequence():
    desk = Desk(params(), params(stop=(b"zz",)))
    assert desk.deal([4], [4]).itl_ns == []
    assert desk.deal([4], [4]).itl_ns == [(1_000_000, 2)]
    desk.now_ns += 5_000_000
    assert desk.deal([4], [4]).itl_ns == [(6_000_000, 2)]


def test_eos_at_the_first_token_is_a_record_and_an_ending():
    """Case B9: it counts, and is marked as having no text."""
    desk = Desk(params(), params())
    done = desk.deal([EOS], [4])
    assert done.records["flags"].tolist() == [FLAG_LAST_IS_STOP, 0]
    assert done.records["index"].tolist() == [0, 0]
    assert done.endings == [(desk.sequences[0], Ending(FinishReason.STOP_TOKEN, matched_token=EOS))]


def test_length_ends_at_max_tokens_and_at_the_context():
    desk = Desk(params(max_tokens=2), params(max_tokens=1000), num_prompt=61)
    assert not desk.deal([4], [4]).endings
    done = desk.deal([4], [4])
    assert done.endings == [(desk.sequences[0], Ending(FinishReason.LENGTH))]
    desk.scheduler.remove(desk.sequences[0])
    assert desk.deal([4]).endings == [(desk.sequences[1], Ending(FinishReason.LENGTH))]  # 64 of 64


def test_several_tokens_are_judged_position_by_position():
    """What stands behind the ending is dropped, whatever it is."""
    desk = Desk(params(), params(stop=(b"cd",)), params(max_tokens=2), params())
    done = desk.deal([9, EOS, 9], [3, 4, 5, 6], [8, 8, 8], [7, 7])
    assert [kept(s, desk) for s in desk.sequences] == [[9, EOS], [3, 4, 5], [8, 8], [7, 7]]
    assert done.endings == [
        (desk.sequences[0], Ending(FinishReason.STOP_TOKEN, matched_token=EOS)),
        (desk.sequences[1], Ending(FinishReason.STOP_STRING, matched_stop=0, keep_bytes=1)),
        (desk.sequences[2], Ending(FinishReason.LENGTH)),
    ]
    assert len(done.records) == 0
    assert done.num_tokens == 9
    units = {req_id: records_of(unit) for _, req_id, unit in done.units}
    assert {req_id: unit["count"].tolist() for req_id, unit in units.items()} == {
        1: [2],
        2: [3],
        3: [2],
        4: [2],
    }
    assert units[1]["flags"].tolist() == [FLAG_LAST_IS_STOP]
    assert units[2]["flags"].tolist() == [0]
    assert [channel for channel, _, _ in done.units] == [0, 1, 0, 1]


@pytest.mark.parametrize("split", [[4], [1, 1, 1, 1], [2, 2], [1, 3]])
@pytest.mark.parametrize(
    ("changes", "count", "ending"),
    [
        (
            {"stop": (b"bc", b"b")},
            2,
            Ending(FinishReason.STOP_STRING, matched_stop=1, keep_bytes=1),
        ),
        ({"stop_token_ids": (4,)}, 3, Ending(FinishReason.STOP_TOKEN, matched_token=4)),
        ({"max_tokens": 3}, 3, Ending(FinishReason.LENGTH)),
        (
            {"max_tokens": 3, "stop_token_ids": (4,)},
            3,
            Ending(FinishReason.STOP_TOKEN, matched_token=4),
        ),
        ({"max_tokens": 3, "stop": (b"d",)}, 3, Ending(FinishReason.LENGTH)),
        (
            {"min_tokens": 4, "stop": (b"b", b"d"), "stop_token_ids": (4,)},
            4,
            Ending(FinishReason.STOP_STRING, matched_stop=1, keep_bytes=3),
        ),
    ],
)
def test_how_tokens_are_dealt_into_steps_changes_no_ending(split, changes, count, ending):
    """Cases B4 and B5: "abcd" in one step, or over several."""
    tokens = [2, 3, 4, 5]
    desk = Desk(params(**changes))
    for size in split:
        part, tokens = tokens[:size], tokens[size:]
        done = desk.deal(part, counts=None)
        if done.endings:
            break
    assert done.endings == [(desk.sequences[0], ending)]
    assert kept(desk.sequences[0], desk) == [2, 3, 4, 5][:count]


def test_more_than_a_slot_of_tokens_takes_more_slots():
    desk = Desk(params(stop_token_ids=(12,)), most_tokens=11)
    ((_, _, unit),) = desk.deal([*range(2, 13)]).units
    records = records_of(unit)
    assert records["index"].tolist() == [0, 8]
    assert records["count"].tolist() == [8, 3]
    assert records["flags"].tolist() == [0, FLAG_LAST_IS_STOP]
    ids = [i for r in records for i in r["token_ids"][: r["count"]].tolist()]
    assert ids == [*range(2, 13)]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_more_stop_ids_than_columns_are_all_heeded(ignore_eos):
    ids = tuple(range(10, 11 + STOP_COLUMNS))
    for token in ids:
        desk = Desk(params(stop_token_ids=ids, ignore_eos=ignore_eos))
        assert not desk.deal([4]).endings
        ((_, ending),) = desk.deal([token]).endings
        assert ending == Ending(FinishReason.STOP_TOKEN, matched_token=token)


def test_ignore_eos_goes_on_behind_it():
    desk = Desk(params(ignore_eos=True, max_tokens=2))
    assert not desk.deal([EOS]).endings
    assert desk.deal([EOS]).endings[0][1].reason is FinishReason.LENGTH


def test_min_tokens_holds_the_end_back_on_the_fast_path():
    desk = Desk(params(min_tokens=2, stop_token_ids=(4,)))
    done = desk.deal([4])
    assert not done.endings and not done.records["flags"].any()
    assert desk.deal([4]).endings[0][1].reason is FinishReason.STOP_TOKEN


def test_include_stop_keeps_the_stop_string():
    desk = Desk(params(stop=(b"b",), include_stop=True))
    assert desk.deal([2, 3, 4]).endings[0][1].keep_bytes == 2


def test_aborted_under_the_forward_pass_gets_no_token():
    desk = Desk(params(), params(stop=(b"x",)), params())
    desk.deal([4], [4], [4])
    columns = desk.scheduler.columns

    def abort():
        columns.is_aborted[[s.row for s in desk.sequences[:2]]] = True

    done = desk.deal([EOS], [EOS], [6], under_forward=abort)
    assert done.records["req_id"].tolist() == [3]
    assert (done.units, done.endings, done.num_tokens) == ([], [], 1)
    assert done.itl_ns == [(1_000_000, 1)]
    assert [kept(s, desk) for s in desk.sequences] == [[4], [4], [4, 6]]


def test_a_row_whose_logits_failed_ends_with_an_error_and_the_others_go_on():
    desk = Desk(params(), params(), params(stop=(b"x",)))
    desk.deal([4], [4], [4])
    done = desk.deal([EOS], [7], [7], failed=(0, 2))
    assert done.endings == [
        (desk.sequences[0], Ending(FinishReason.ERROR)),
        (desk.sequences[2], Ending(FinishReason.ERROR)),
    ]
    assert done.records["token_ids"][:, 0].tolist() == [7]
    assert done.itl_ns == [(1_000_000, 1)]  # a failed row made no token
    assert [kept(s, desk) for s in desk.sequences] == [[4], [4, 7], [4]]


def test_a_failed_row_that_was_aborted_is_not_ended_twice():
    desk = Desk(params())
    desk.deal([4])
    columns = desk.scheduler.columns
    done = desk.deal(
        [4], failed=(0,), under_forward=lambda: columns.is_aborted.__setitem__(0, True)
    )
    assert not done.endings


def test_logprobs_and_top_logprobs_stand_where_the_picture_says():
    desk = Desk(params(num_logprobs=0), params(num_logprobs=13))
    top_ids = np.arange(13, dtype=np.int32)[None, :]
    top = {1: (top_ids, -top_ids.astype(np.float32))}
    done = desk.deal([4], [5], logprobs=np.array([[-0.5], [-0.25]], np.float32), top=top)
    assert done.records["req_id"].tolist() == [1]
    assert done.records["logprobs"][0, 0] == -0.5
    ((channel, req_id, unit),) = done.units
    assert (channel, req_id) == (1, 2)
    slots = [unit[at : at + 128] for at in range(0, len(unit), 128)]
    assert [slot[20] for slot in slots] == [TokenKind.TOP_LOGPROBS] * 2 + [TokenKind.TOKENS]
    tops = np.frombuffer(b"".join(slots[:2]), TOP_DTYPE)
    assert tops["index"].tolist() == [0, 0]
    assert tops["count"].tolist() == [12, 1]
    assert [*tops["token_ids"][0], tops["token_ids"][1, 0]] == list(range(13))
    assert tops["logprobs"][1, 0] == -12.0
    last = np.frombuffer(slots[2], TOKENS_DTYPE)[0]
    assert (last["index"], last["token_ids"][0], last["logprobs"][0]) == (0, 5, -0.25)


def test_top_logprobs_of_several_tokens_keep_their_positions():
    desk = Desk(params(num_logprobs=2))
    ids = np.arange(20, dtype=np.int32).reshape(10, 2)
    done = desk.deal(
        [*range(2, 12)],
        logprobs=np.zeros((1, 10), np.float32),
        top={0: (ids, np.zeros((10, 2), np.float32))},
    )
    ((_, _, unit),) = done.units
    kinds = [unit[at + 20] for at in range(0, len(unit), 128)]
    assert kinds == [TokenKind.TOP_LOGPROBS] * 8 + [TokenKind.TOKENS] + [
        TokenKind.TOP_LOGPROBS
    ] * 2 + [TokenKind.TOKENS]
    tops = [r for r in np.frombuffer(unit, TOP_DTYPE) if r["kind"] == TokenKind.TOP_LOGPROBS]
    assert [int(r["index"]) for r in tops] == list(range(10))
    assert [r["token_ids"][:2].tolist() for r in tops] == ids.tolist()


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), min_size=1, max_size=6),
    st.data(),
)
def test_both_paths_agree(steps, data):
    """The same tokens to a plain sequence and to one that is judged token by token: the same tokens kept, the same ending.

    A stop string that never matches puts a sequence on the slow path; the plain one gets its tokens one a step.
    """
    changes = {
        "max_tokens": data.draw(st.integers(1, 20)),
        "min_tokens": data.draw(st.integers(0, 6)),
        "stop_token_ids": tuple(data.draw(st.lists(st.integers(2, 12), max_size=2))),
        "ignore_eos": data.draw(st.booleans()),
    }
    results = []
    for is_slow in (False, True):
        desk = Desk(params(**changes, stop=(b"~",) if is_slow else ()))
        ended = []
        for tokens in steps if is_slow else [[t] for step in steps for t in step]:
            ended = [ending for _, ending in desk.deal(tokens).endings]
            if ended:
                break
        results.append((kept(desk.sequences[0], desk), ended))
    assert results[0] == results[1]


# -- records that go on ----------------------------------------------------------------------------------------------------

KINDS = [
    params(),
    params(max_tokens=7),
    params(ignore_eos=True),
    params(stop_token_ids=(6,), min_tokens=4),
    params(stop=(b"zz",)),
    params(num_logprobs=2),
]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    steps=st.lists(
        st.tuples(
            st.lists(st.sampled_from([EOS, 4, 5, 6, 27]), min_size=5, max_size=5),
            st.sampled_from(["plain", "plain", "plain", "logprobs", "counts", "failed", "aborted"]),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_records_that_go_on_are_those_of_a_committer_that_remembers_nothing(kinds, steps):
    ours, theirs = Desk(*kinds), Desk(*kinds)
    for tokens, how in steps:
        seen = []
        for desk in (ours, theirs):
            alive = len(desk.scheduler.running) or len(desk.scheduler.waiting)
            if not alive:
                return
            output = {}
            if how == "logprobs":
                output["logprobs"] = -np.arange(1, alive + 1, dtype=np.float32)[:, None]
            elif how == "counts":
                output["counts"] = None
            elif how == "failed":
                output["failed"] = (0,)
            if desk is theirs:
                desk.committer._decode_records = None

            def abort(desk=desk, how=how):
                if how == "aborted":
                    desk.scheduler.columns.is_aborted[desk.scheduler.running[-1].row] = True

            done = desk.deal(*([t] for t in tokens[:alive]), under_forward=abort, **output)
            names = [n for n in TOKENS_DTYPE.names if n != "logprobs" or how == "logprobs"]
            ended = {sequence.req_id: ending for sequence, ending in done.endings}
            columns, rows = desk.scheduler.columns, [s.row for s in desk.scheduler.running]
            seen.append(
                (
                    {name: done.records[name].tolist() for name in names},
                    done.channels.tolist(),
                    done.units,
                    ended,
                    done.num_tokens,
                    sorted(done.itl_ns),
                    columns.num_tokens[rows].tolist(),
                    columns.token_ids[rows].tolist(),
                    columns.last_time_ns[rows].tolist(),
                    desk.scheduler.sampling.position[rows].tolist(),
                )
            )
            gone = [sequence for sequence, _ in done.endings]
            gone += [s for s in desk.scheduler.running if columns.is_aborted[s.row]]
            for sequence in dict.fromkeys(gone):
                desk.scheduler.remove(sequence)
        assert seen[0] == seen[1]


def test_records_go_on_while_nobody_comes_or_goes():
    desk = Desk(params(), params(stop=(b"zz",)))
    desk.deal([4], [5])
    desk.deal([4], [5])
    first = desk.committer._decode_records
    for _ in range(5):
        desk.deal([4], [5])
    assert desk.committer._decode_records is first is not None
