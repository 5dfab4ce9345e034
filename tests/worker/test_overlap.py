"""Steps in flight: the tokens of a run without overlap, and nothing given back under a flight."""

from collections import deque

import numpy as np
import pytest

from shmserve.request import SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker.batch import StepOutput
from shmserve.worker.commit import Committer
from shmserve.worker.overlap import Overlap, OverlappingRunner
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions

EOS, BLOCK = 1, 4
LETTERS = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = TokenBytes.from_list([b"<unk>", b"<eos>", b"<pad>", *LETTERS])


class LateDevice:
    """Computes a step only when it is collected, in order, from a KV cache of tokens: each token depends on all before it."""

    def __init__(self, num_blocks=17) -> None:
        self.info = RunnerInfo("late", 29, 40, num_blocks, BLOCK)
        self.kv = np.zeros(num_blocks * BLOCK, np.int64)
        self.flights = deque()
        self.outputs = []
        self.needs_host: set[int] = set()

    def can_carry(self, rows, sampling):
        return not self.needs_host & set(rows.tolist())

    def launch(self, batch, sampling, carried=None):
        assert len(self.flights) < 2
        self.flights.append((batch, None if carried is None else carried.copy()))

    def collect(self):
        batch, carried = self.flights.popleft()
        ids = batch.token_ids.copy()
        if carried is not None:
            assert len(carried) == batch.num_seqs
            is_carried = carried >= 0
            assert (np.diff(batch.cu_seqlens)[is_carried] == 1).all()
            ids[batch.cu_seqlens[:-1][is_carried]] = self.outputs[-1][carried[is_carried]]
        self.kv[batch.kv_slots] = ids
        tokens = []
        for seq in batch.sample_seqs.tolist():
            at = np.arange(batch.kv_lens[seq])
            seen = self.kv[batch.block_table[seq, at // BLOCK] * BLOCK + at % BLOCK]
            value = int((seen * (at + 1) ** 2).sum() * 2654435761 >> 7)
            tokens.append(EOS if value % 13 == 0 else 3 + value % 26)
        self.outputs.append(np.array(tokens, np.int32))
        return StepOutput(self.outputs[-1][:, None], time_ns=1000 + len(self.outputs))


class Loop:
    """What the engine does with a step, and no more."""

    def __init__(self, is_overlapped, **options) -> None:
        self.device = LateDevice(**options)
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "eos_ids": (EOS,)}
        self.scheduler = Scheduler(self.device.info, **limits)
        self.committer = Committer(self.scheduler, StopConditions(VOCABULARY, (0, 1, 2)))
        self.overlap = Overlap(self.device, self.scheduler)
        self.is_overlapped = is_overlapped
        self.tokens: dict[int, list[int]] = {}
        self.step_count = 0

    def add(self, req_id, prompt, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        prompt_ids = np.array(prompt, np.int32)
        sequence = Sequence(req_id, 0, params, prompt_ids, arrival_order=req_id, received_ns=1)
        self.scheduler.add(sequence)
        self.tokens[req_id] = []
        return sequence

    def leave(self, sequence):
        if self.overlap.holds(sequence):
            self.overlap.end(sequence)
        else:
            self.scheduler.remove(sequence)

    def step(self) -> bool:
        if not self.overlap.is_flying:
            batch, _ = self.scheduler.schedule(self.step_count + 1, 1)
            if batch is None:
                return False
            self.step_count += 1
            self.overlap.launch(batch)
        if self.is_overlapped and self.overlap.follow(self.step_count + 1) is not None:
            self.step_count += 1
        batch, output = self.overlap.collect()
        self.scheduler.advance(batch, output.time_ns, output.failed)
        committed = self.committer.commit(batch, output, 5000)
        for record in committed.records:
            self.tokens[int(record["req_id"])].append(int(record["token_ids"][0]))
        for sequence, _ in committed.endings:
            self.leave(sequence)
        for sequence in self.overlap.landed():
            self.scheduler.remove(sequence)
        self.scheduler.check()
        return True

    def run(self, most=500):
        for _ in range(most):
            if not self.step():
                assert self.scheduler.blocks.num_used == 0 and not self.scheduler.running
                return
        raise AssertionError("never idle")


def both(scenario, **options):
    loops = [Loop(is_overlapped, **options) for is_overlapped in (False, True)]
    for loop in loops:
        scenario(loop)
        loop.run()
    assert loops[0].overlap.num_followed == 0
    assert loops[0].tokens == loops[1].tokens
    return loops[1]


def fill(loop, count=9):
    for req_id in range(1, count + 1):
        loop.add(req_id, [3 + (7 * req_id + i) % 26 for i in range(1 + req_id)], 5 + 2 * req_id)


def test_the_protocol_is_told_by_its_methods():
    assert isinstance(LateDevice(), OverlappingRunner)


@pytest.mark.parametrize("num_blocks", [41, 17, 9], ids=["ample", "tight", "preempting"])
def test_overlap_gives_the_same_tokens(num_blocks):
    loop = both(fill, num_blocks=num_blocks)
    assert loop.overlap.num_followed > 0
    assert any(len(tokens) > 8 for tokens in loop.tokens.values())
    assert (loop.scheduler.num_preempted > 0) == (num_blocks == 9)


def test_a_block_that_becomes_superfluous_under_a_flight_may_be_given_out_at_once():
    """Equal sequences make equal blocks, of which one is kept; with hardly any blocks left, the other is taken for the next token."""
    taken: list[int] = []

    def scenario(loop):
        release = loop.scheduler.blocks.release

        def note(blocks):
            if loop.overlap.is_flying and len(blocks) == 1:
                taken.extend(blocks)
            release(blocks)

        loop.scheduler.blocks.release = note
        for req_id in range(1, 5):
            loop.add(req_id, [3, 4, 5], 30)

    loop = both(scenario, num_blocks=12)
    assert taken and loop.overlap.num_followed > 0
    assert len({tuple(tokens) for tokens in loop.tokens.values()}) == 1


def fill_with_long_prompts(loop):
    """Of three times the budget of a step, beside short ones; some share most of their tokens."""
    for req_id in range(1, 10):
        length = 30 if req_id % 3 == 0 else 2 + req_id
        loop.add(req_id, [3 + (req_id // 6 + 5 * i) % 26 for i in range(length)], 3 + req_id)
        if req_id % 4 == 0:
            loop.step()


@pytest.mark.parametrize("num_blocks", [81, 26, 11], ids=["ample", "tight", "preempting"])
def test_chunks_follow_one_another_beside_rows_that_decode(num_blocks):
    ahead: list[tuple[bool, int, int]] = []  # what was launched ahead of a step in flight
    launch = LateDevice.launch

    def note(device, batch, sampling, carried=None):
        if carried is not None:
            num_chunks = int((carried < 0).sum())
            ahead.append((batch.is_decode, num_chunks, len(batch.sample_seqs)))
        launch(device, batch, sampling, carried)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateDevice, "launch", note)
        loop = both(fill_with_long_prompts, num_blocks=num_blocks)
    assert all(is_decode == (num_chunks == 0) for is_decode, num_chunks, _ in ahead)
    assert any(num_chunks and num_sampled for _, num_chunks, num_sampled in ahead)
    assert (loop.scheduler.num_preempted > 0) == (num_blocks == 11)


def test_a_prompt_alone_is_computed_chunk_behind_chunk_with_none_waited_for():
    loop = Loop(True)
    sequence = loop.add(1, [3 + i % 26 for i in range(35)], 2)
    for num_computed in (16, 32, 35):
        loop.step()
        assert loop.scheduler.columns.num_computed[sequence.row] == num_computed
        assert loop.overlap.is_flying
    assert len(loop.tokens[1]) == 1
    loop.run()
    assert len(loop.tokens[1]) == 2


def test_who_ends_under_its_chunk_keeps_its_blocks_until_the_last_one_has_landed():
    loop = Loop(True)
    loop.add(1, [8, 9], 20)
    long = loop.add(2, [3 + i % 26 for i in range(36)], 4)
    loop.step()
    assert loop.overlap.is_flying and loop.overlap.holds(long)
    loop.overlap.end(long)
    held = list(long.blocks)
    assert all(loop.scheduler.blocks.ref_count[block] for block in held)
    loop.step()
    assert long.row == -1 and not loop.scheduler.prefilling and loop.tokens[2] == []
    loop.run()
    assert len(loop.tokens[1]) > 4


def test_a_prompt_that_is_scored_is_not_followed():
    loop = Loop(True)
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=0)
    ids = np.arange(35, dtype=np.int32) % 26 + 3
    loop.scheduler.add(Sequence(1, 0, params, ids, arrival_order=1, received_ns=1))
    loop.tokens[1] = []
    batch, _ = loop.scheduler.schedule(1, 1)
    loop.overlap.launch(batch)
    assert batch.prompt_parts and loop.overlap.follow(2) is None


def test_the_chunk_that_ends_a_prompt_is_not_followed_where_a_grammar_says_what_comes():
    """Its mask is that of a step launched with nothing in flight: nobody has filled one for what is launched ahead."""
    loop = Loop(True)
    sequence = loop.add(1, [3 + i % 26 for i in range(35)], 2)
    sequence.grammar = object()
    num_followed = []
    for _ in range(2):
        loop.step()
        num_followed.append(loop.overlap.num_followed)
    assert num_followed == [1, 1] and loop.scheduler.columns.num_computed[sequence.row] == 32
    assert not loop.overlap.is_flying and loop.tokens[1] == []
    sequence.grammar = None  # from here on it would be asked
    loop.run()
    assert len(loop.tokens[1]) == 2


def decoding(num_steps=2):
    """A loop with one step in flight, of two sequences."""
    loop = Loop(True)
    sequences = [loop.add(1, [3, 4, 5], 12), loop.add(2, [8, 9], 12)]
    for _ in range(num_steps):
        loop.step()
    assert loop.overlap.is_flying and all(map(loop.overlap.holds, sequences))
    return loop, sequences


def test_row_and_blocks_of_who_ends_in_flight_come_back_after_it():
    loop, (first, _) = decoding()
    before, held = len(loop.tokens[1]), list(first.blocks)
    loop.overlap.end(first)
    assert first.row >= 0 and all(loop.scheduler.blocks.ref_count[b] for b in held)
    assert loop.overlap.landed() == []
    loop.step()  # nobody follows who has ended; its flight lands
    assert first.row == -1 and len(loop.tokens[1]) == before, "what came was dropped"
    loop.run()
    assert len(loop.tokens[2]) > 2


def test_a_newcomer_is_admitted_at_the_next_step():
    loop, _ = decoding()
    late = loop.add(3, [10, 11, 12], 4)
    loop.step()
    assert not loop.overlap.is_flying, "nothing is launched ahead of it"
    loop.step()
    assert late.row >= 0


def test_who_needs_its_token_first_is_not_followed():
    loop, (first, _) = decoding()
    loop.device.needs_host = {first.row}
    loop.step()
    before = loop.overlap.num_followed
    for _ in range(3):
        loop.step()
        assert not loop.overlap.is_flying
    assert loop.overlap.num_followed == before


def test_a_paused_sequence_is_left_out_and_comes_back_when_it_goes_on():
    def scenario(loop):
        first = loop.add(1, [3, 4, 5], 12)
        loop.add(2, [8, 9], 12)
        loop.step()
        loop.step()
        loop.scheduler.set_paused(first, True)
        for _ in range(3):
            loop.step()
        if first.row >= 0:
            assert not loop.overlap.holds(first)
        loop.scheduler.set_paused(first, False)

    both(scenario)
