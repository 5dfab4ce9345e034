"""Speculation changes how many steps an answer takes, and nothing else: whatever is guessed, and whatever happens meanwhile."""

import time
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.boards import Phase
from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.submit_slots import SubmitKind
from shmserve.worker import speculation
from shmserve.worker.batch import StepOutput
from shmserve.worker.ngram import NgramIndex
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.verification import kept_of, places_of

EOS = 1
FIRST_LETTER = 3


class CopyingModel:
    """A model that mostly goes on as the text did `PERIOD` tokens ago. It reads every earlier token from its KV cache, so what it
    says is wrong as soon as a slot holds what does not belong there."""

    PERIOD = 5

    def __init__(self, info: RunnerInfo) -> None:
        self.size = info.block_size
        self.kv = np.full(info.num_blocks * info.block_size, -7, np.int32)
        self.num_steps = 0
        self.num_wide = 0

    def run(self, batch, sampling) -> StepOutput:
        self.num_steps += 1
        places = places_of(batch)
        self.kv[batch.kv_slots] = batch.token_ids
        owner = np.repeat(np.arange(batch.num_seqs), np.diff(batch.cu_seqlens))
        tokens, logprobs, top = [], [], {}
        for place, at in enumerate(places.token_rows.tolist()):
            row, position = int(places.rows[place]), int(batch.positions[at])
            table = batch.block_table[owner[at]]
            before = np.arange(position + 1)
            text = self.kv[table[before // self.size] * self.size + before % self.size]
            ahead = 0 if places.ahead is None else int(places.ahead[place])
            assert (
                int(sampling.num_prompt[row]) + int(sampling.position[row]) + ahead == position + 1
            )
            token, logprob = self.token(text, int(sampling.seed[row]))
            banned = sampling.bans(row, ahead)
            if banned is not None and token in banned:
                token = FIRST_LETTER
            tokens.append(token)
            logprobs.append(logprob)
            num_top = int(sampling.num_logprobs[row])
            if num_top > 0 and token >= 0:
                ids = np.arange(num_top, dtype=np.int32) + token + position
                top[place] = (ids, np.full(num_top, logprob, np.float32))
        kept = kept_of(
            batch, places, np.array(tokens, np.int32), np.array(logprobs, np.float32), top
        )
        self.num_wide += kept.counts is not None and int(kept.counts.max()) > 1
        return StepOutput(
            kept.token_ids, time.monotonic_ns(), kept.counts, kept.logprobs, kept.top, kept.failed
        )

    def token(self, text, seed: int) -> tuple[int, float]:
        assert (text >= 0).all(), "a slot that nobody wrote"
        chance = crc32(text.tobytes(), seed)
        token = int(text[-self.PERIOD]) if len(text) >= self.PERIOD else FIRST_LETTER
        if chance % 6 == 0:
            token = FIRST_LETTER + chance // 7 % 4
        elif chance % 97 == 1:
            token = EOS
        elif chance % 211 == 2:
            token = -1  # logits that are no numbers
        return token, -float(chance % 1000) / 1000


def model_of(rig) -> CopyingModel:
    model = CopyingModel(rig.runner.info)
    rig._run = model.run
    return model


def answers(rig) -> dict[int, tuple]:
    """Of each request what its client sees, but times and the place of the first token."""
    front = rig.front
    found = {}
    for req_id, end in front.finished.items():
        tops = {index: ids for (owner, index), ids in front.top.items() if owner == req_id}
        marks = (end.finish, end.keep_bytes, end.matched_token, end.matched_stop)
        counts = (end.completion_tokens, end.prompt_tokens, req_id in front.last_is_stop)
        found[req_id] = (front.tokens[req_id], tops, marks, counts, front.messages.get(req_id))
    return found


class Oracle:
    """Guesses what will come, and is wrong at some places. It stands in for the index of n-grams, whose guesses are right too seldom."""

    def __init__(self, texts: list[list[int]], wrong_one_in: int) -> None:
        self.texts, self.wrong_one_in = texts, wrong_one_in

    def __call__(self, index: NgramIndex, room: int) -> list[int]:
        known = index._tokens
        text = next((t for t in self.texts if t[: len(known)] == known), [])
        coming = [*text[len(known) :], *known][: max(0, min(room, index.most))]
        return [
            28 - token if crc32(bytes([len(known), at])) % self.wrong_one_in == 0 else token
            for at, token in enumerate(coming)
        ]


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(3, 6), min_size=1, max_size=20).map(tuple),
            "max_tokens": st.integers(1, 30),
            "min_tokens": st.sampled_from([0, 0, 8]),
            "num_speculative_tokens": st.sampled_from([0, 1, 3, 7, 15, 15]),
            "stop": st.sampled_from([(), (), (b"ab",), (b"dd", b"cab"), (b"abcdabcd",)]),
            "stop_token_ids": st.sampled_from([(), (), (5,), (3, 4)]),
            "num_logprobs": st.sampled_from([-1, -1, 0, 2]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.0, 0.5]),
            "priority": st.integers(0, 1),
        }
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "abort", "pause", "resume", "under", "flush"]), st.integers(0, 5), st.integers(0, 4)),
    max_size=20,
)  # fmt: skip


def plain_answers(new_rig, requests) -> dict[int, tuple]:
    """One after the other, without speculation."""
    rig = new_rig(num_blocks=40, max_model_len=64)
    try:
        model_of(rig)
        for req_id, params in enumerate(requests, 1):
            rig.front.submit(req_id, **{**params, "num_speculative_tokens": 0, "seed": 3})
            rig.run_dry()
        return answers(rig)
    finally:
        rig.close()


@settings(
    max_examples=settings.default.max_examples * 6 // 5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    requests=REQUESTS,
    events=EVENTS,
    wrong_one_in=st.sampled_from([0, 1, 2, 5, 1000]),
    num_blocks=st.sampled_from([17, 20, 40, 100]),
    budget=st.sampled_from([4, 9, 32]),
)
def test_answers_are_those_of_plain_decoding(
    new_rig, requests, events, wrong_one_in, num_blocks, budget
):
    """`wrong_one_in` 0: the index of n-grams guesses; else every so many guesses are wrong."""
    plain = plain_answers(new_rig, requests)
    texts = [[*params["prompt"], *plain[i][0]] for i, params in enumerate(requests, 1)]
    rig = new_rig(num_blocks=num_blocks, max_model_len=64, max_num_batched_tokens=budget)
    aborted = set()
    with pytest.MonkeyPatch.context() as patch:
        if wrong_one_in:
            oracle = Oracle(texts, wrong_one_in)
            patch.setattr(NgramIndex, "guess", lambda index, room: oracle(index, room))
        try:
            model_of(rig)
            unsent = list(enumerate(requests, 1))

            def submit() -> None:
                if unsent:
                    req_id, params = unsent.pop(0)
                    rig.front.submit(req_id, **{**params, "seed": 3})

            def heed(kind: str, number: int) -> None:
                sent = rig.front.submitted
                if kind == "submit" or not sent:
                    return submit()
                req_id = sent[number % len(sent)]
                if kind in ("abort", "under"):
                    rig.front.control(SubmitKind.ABORT, req_id)
                    aborted.add(req_id)
                elif kind == "flush":
                    rig.scheduler.flush_cache()
                else:
                    rig.front.control(SubmitKind[kind.upper()], req_id)
                return None

            submit()
            for kind, number, num_steps in events:
                if kind == "under":
                    rig.under_forward = lambda number=number: heed("under", number)
                else:
                    heed(kind, number)
                for _ in range(num_steps):
                    rig.step()
                    rig.front.read()
            rig.under_forward = None
            while unsent:
                submit()
            for req_id in rig.front.submitted:
                rig.front.control(SubmitKind.RESUME, req_id)
            rig.run_dry()
            rig.assert_idle()
            found = answers(rig)
            board = rig.board
            assert board["num_accepted_tokens"] <= board["num_draft_tokens"]
        finally:
            rig.close()
    assert found.keys() == plain.keys()
    for req_id, answer in found.items():
        if req_id in aborted and answer[2][0] == FinishReason.ABORT:
            assert plain[req_id][0][: len(answer[0])] == answer[0]
        else:
            assert answer == plain[req_id]


# -- what it saves, and what it counts -----------------------------------------------------------------------------------------


LOOP = (3, 4, 5, 6, 7) * 3


def test_a_text_that_repeats_takes_fewer_steps_and_the_board_counts_the_guesses(rig):
    r = rig(max_model_len=64)
    model = model_of(r)
    model.token = lambda text, seed: (int(text[-5]), 0.0)
    r.front.submit(1, prompt=LOOP, max_tokens=40, num_speculative_tokens=7)
    r.step()
    r.step()
    assert r.board["phase"] == Phase.DECODE  # its tokens are several, and none is a prompt's
    r.run_dry()
    assert r.front.tokens[1] == [*LOOP, *LOOP, *LOOP][:40]
    # 1 token of the prompt's step, then guesses of 3, 6, 7, 7, ... and of the last step as many as are still wanted
    assert model.num_steps == 1 + 1 + 1 + -(-(40 - 1 - 4 - 7) // 8)
    assert r.board["num_draft_tokens"] == r.board["num_accepted_tokens"] == 40 - model.num_steps
    assert r.board["generation_tokens"] == 40


def test_tokens_of_one_step_share_its_time_and_stand_in_order(rig):
    r = rig(max_model_len=64)
    model = model_of(r)
    model.token = lambda text, seed: (int(text[-5]), 0.0)
    r.front.submit(1, prompt=LOOP, max_tokens=20, num_speculative_tokens=15)
    r.run_dry()
    times = r.front.times_ns[1]
    assert times == [r.made[1, index][1] for index in range(20)]
    assert len(set(times)) == model.num_steps < 6
    assert r.front.finished[1].completion_tokens == 20


def test_wrong_guesses_are_counted_and_never_accepted(rig):
    r = rig(max_model_len=64)
    model = model_of(r)
    model.token = lambda text, seed: (FIRST_LETTER + len(text) // 2 % 4 * (len(text) % 2 + 1), 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "guess", lambda index, room: [28] * min(room, 3))
        r.front.submit(1, prompt=LOOP, max_tokens=12, num_speculative_tokens=7)
        r.run_dry()
    assert model.num_steps == 12
    assert r.board["num_accepted_tokens"] == 0
    assert r.board["num_draft_tokens"] == 3 * 8 + 2 + 1  # the last tokens leave no room for three


@pytest.mark.parametrize(
    "params",
    [{"num_speculative_tokens": 0}, {"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.1},
     {"bad_words": ((1, 2),)}],
)  # fmt: skip
def test_who_does_not_ask_or_has_penalties_or_bad_words_never_guesses(rig, params):
    r = rig(max_model_len=64)
    model = model_of(r)
    model.token = lambda text, seed: (int(text[-5]), 0.0)
    r.front.submit(1, **{"prompt": LOOP, "max_tokens": 9, "num_speculative_tokens": 7, **params})
    r.run_dry()
    assert model.num_steps == 9 and r.board["num_draft_tokens"] == 0


def test_a_runner_that_cannot_verify_is_given_no_guesses(rig):
    r = rig(script={5: [[3, 4, 5]] * 8}, max_model_len=64)
    assert r.runner.info.max_guesses == 0
    r.front.submit(1, prompt=LOOP, seed=5, max_tokens=12, num_speculative_tokens=7)
    r.run_dry()
    assert r.front.tokens[1] == [3, 4, 5] * 4
    assert r.board["num_draft_tokens"] == 0


# -- the room that guesses take ------------------------------------------------------------------------------------------------


class Bench:
    """A scheduler whose sequences all stand before their first decoding step, in a loop of five tokens."""

    def __init__(
        self, num_seqs, *, budget=64, num_blocks=64, max_guesses=64, max_tokens=40, asked=7
    ):
        info = RunnerInfo("fake", 1000, 128, num_blocks, 4, max_guesses=max_guesses)
        self.scheduler = Scheduler(info, max_num_seqs=8, max_num_batched_tokens=128, eos_ids=())
        self.sequences = []
        for number in range(num_seqs):
            params = SamplingParams(max_tokens=max_tokens, num_speculative_tokens=asked)
            prompt = np.array([number * 10 + at % 5 for at in range(15)], np.int32)
            self.sequences.append(Sequence(number, 0, params, prompt, number, 1))
            self.scheduler.add(self.sequences[-1])
        while any(s.row < 0 or s.is_prefilling for s in self.sequences):
            self.step()
        self.scheduler.max_num_batched_tokens = budget

    def schedule(self):
        batch, _ = self.scheduler.schedule(1, 1)
        self.scheduler.check()
        return batch

    def step(self):
        """Every sequence goes on with its loop; guesses are verified by that."""
        batch = self.schedule()
        self.scheduler.advance(batch, 1)
        columns = self.scheduler.columns
        drafts = np.zeros(len(batch.sample_seqs)) if batch.num_drafts is None else batch.num_drafts
        for index, num_drafts in zip(batch.sample_seqs, drafts, strict=True):
            row = int(batch.rows[index])
            for _ in range(1 + int(num_drafts)):
                at = int(columns.num_tokens[row])
                columns.token_ids[row, at] = columns.token_ids[row, at - 5]
                columns.num_tokens[row] += 1
            columns.num_computed[row] = columns.num_tokens[row] - 1
        self.scheduler.check()
        return batch


def test_a_batch_with_guesses_computes_them_behind_the_last_token():
    bench = Bench(2)
    first, second = bench.sequences
    bench.scheduler.columns.token_ids[first.row, 16:30] = 77  # of whoever had the row before
    batch = bench.schedule()
    assert batch.num_drafts.tolist() == [3, 3] and batch.num_guessed == 6
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert batch.positions.tolist() == [15, 16, 17, 18] * 2
    assert batch.kv_lens.tolist() == [19, 19] and batch.sample_seqs.tolist() == [0, 1]
    assert not batch.is_decode
    assert batch.kv_slots[1] // 4 == first.blocks[4] and len(second.blocks) == 5
    assert bench.scheduler.columns.token_ids[first.row, 16] == 77, "a guess is no token"


def test_guesses_end_before_the_last_token_that_is_wanted():
    bench = Bench(1, max_tokens=3)  # one is there: a guess and what follows it are the others
    assert bench.schedule().num_drafts.tolist() == [1]
    assert Bench(1, max_tokens=2).schedule().num_drafts is None


def test_a_step_has_no_more_guesses_than_half_of_what_its_budget_leaves_and_the_runner_takes():
    assert Bench(4, budget=16).schedule().num_drafts.tolist() == [3, 3, 0, 0]
    assert Bench(4, max_guesses=4).schedule().num_drafts.tolist() == [3, 1, 0, 0]
    assert Bench(1, asked=2).schedule().num_drafts.tolist() == [2]
    assert Bench(1, asked=10**9, budget=128).sequences[0].guesser.most == 15


def test_a_prompt_goes_on_beside_guesses():
    bench = Bench(4, budget=16)
    newcomer = Sequence(9, 0, SamplingParams(max_tokens=2), np.arange(50, 80, dtype=np.int32), 9, 1)
    bench.scheduler.add(newcomer)
    batch = bench.schedule()
    assert np.diff(batch.cu_seqlens).tolist() == [4, 4, 1, 1, 6]
    assert batch.sample_seqs.tolist() == [0, 1, 2, 3] and batch.num_drafts.tolist() == [3, 3, 0, 0]


def test_a_guess_takes_one_block_while_more_are_free_than_sequences_run_and_none_after_that():
    for num_free, num_guessed, num_blocks in ((2, 3, 7), (50, 7, 8)):
        bench = Bench(1)
        (sequence,) = bench.sequences
        for _ in range(2):
            bench.step()  # guesses of 3, and of 4: 6 would have taken two blocks
        assert bench.scheduler.columns.num_tokens[sequence.row] == 16 + 4 + 5
        assert len(sequence.blocks) == 6
        bench.scheduler.blocks.allocate(bench.scheduler.blocks.num_free - num_free)
        batch, _ = bench.scheduler.schedule(1, 1)  # the token itself takes one of the free
        assert batch.num_tokens == 1 + num_guessed and len(sequence.blocks) == num_blocks


def test_what_was_learnt_survives_a_preemption():
    bench = Bench(1)
    (sequence,) = bench.sequences
    bench.step()
    guesser = sequence.guesser
    bench.scheduler._preempt(sequence)
    while sequence.row < 0 or sequence.is_prefilling:
        bench.step()
    assert sequence.guesser is guesser
    batch = bench.schedule()
    assert guesser.num_tokens == bench.scheduler.columns.num_tokens[sequence.row]
    assert batch.num_drafts.tolist() == [6]


def test_a_long_prompt_is_learnt_in_parts_of_one_sequence_a_step(monkeypatch):
    monkeypatch.setattr(speculation, "LEARNT_AT_ONCE", 8)
    bench = Bench(2)
    learnt, drafts = [], []
    for _ in range(6):
        batch = bench.step()
        learnt.append([sequence.guesser.num_tokens for sequence in bench.sequences])
        drafts.append(None if batch.num_drafts is None else batch.num_drafts.tolist())
    assert learnt[:3] == [[8, 0], [16, 0], [18, 8]]
    assert drafts[:3] == [None, None, [3, 0]]
    assert any(num_drafts[1] for num_drafts in drafts[3:]), "the second follows"


def test_a_guess_is_judged_by_its_own_step_though_a_preemption_follows():
    """The token that comes of computing it all again was no guess."""
    bench = Bench(1)
    (sequence,) = bench.sequences
    scheduler, row = bench.scheduler, sequence.row
    batch = bench.schedule()
    assert batch.num_drafts.tolist() == [3]
    scheduler.advance(batch, 1)
    scheduler.columns.token_ids[row, scheduler.columns.num_tokens[row]] = 99  # not what was guessed
    scheduler.columns.num_tokens[row] += 1
    scheduler._preempt(sequence)
    while sequence.row < 0 or sequence.is_prefilling:
        bench.step()
    bench.schedule()
    guesser = sequence.guesser
    assert (guesser.num_verified, guesser.num_drafts, guesser.num_accepted) == (1, 3, 0)


def test_rejected_guesses_leave_nothing_to_be_found():
    """Of a block that was filled by guesses none of which was kept, the cache knows nothing."""
    bench = Bench(1)
    (sequence,) = bench.sequences
    scheduler, row = bench.scheduler, sequence.row
    for _ in range(2):
        batch = bench.schedule()
        assert batch.num_drafts[0] > 0
        scheduler.advance(batch, 1)
        at = int(scheduler.columns.num_tokens[row])
        scheduler.columns.token_ids[row, at] = 99  # not what was guessed
        scheduler.columns.num_tokens[row] += 1
        assert scheduler.columns.num_computed[row] == at
        scheduler.check()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NgramIndex, "learn", lambda *args: None)
            sequence.guesser.follow([99])
        sequence.guesser.guess = lambda room: [1, 2, 3]
    assert scheduler.columns.num_indexed[row] == 16
    scheduler.remove(sequence)
    scheduler.check()
    known = [*range(0, 5)] * 3 + [0, 99]
    cache = scheduler.tables.cache
    assert len(cache.match(b"", np.array([*known, 1, 2, 3], np.int32).tobytes())) == 4
