"""The scheduler under every order of arrivals, aborts, pauses and steps that chance finds, over a KV memory that tells.

Blocks and rows are so few that sequences are preempted all the time. The machine keeps its own list of each sequence's tokens;
a step writes (request, position, token) into the KV memory where the batch says, and then reads, for each sequence, all
that the batch says is there: a block given away too early, or a position computed twice or never, is seen at once.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import NeverFitsError, Scheduler
from shmserve.worker.sequence import Sequence

MAX_MODEL_LEN = 24


def token_at(req_id: int, position: int) -> int:
    """The model: a token depends on the request and the position alone."""
    return (req_id * 31 + position * 7) % 1000


class Scheduling(RuleBasedStateMachine):
    """Adds, aborts, pauses and resumes sequences, and computes steps."""

    @initialize(
        num_rows=st.integers(1, 4),
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 12),
        most_tokens=st.integers(1, 4),
    )
    def begin(self, num_rows, num_blocks, block_size, budget, most_tokens):
        self.info = RunnerInfo("fake", 1000, MAX_MODEL_LEN, num_blocks, block_size, most_tokens)
        self.scheduler = Scheduler(
            self.info, max_num_seqs=num_rows, max_num_batched_tokens=budget, eos_ids=()
        )
        self.kv = [None] * (num_blocks * block_size)
        self.tokens: dict[Sequence, list[int]] = {}
        self.last_ns: dict[Sequence, int] = {}
        self.step_number = 0

    # -- what comes from outside -----------------------------------------------------------------------------------------

    @rule(
        num_prompt=st.integers(1, MAX_MODEL_LEN),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
    )
    def add(self, num_prompt, max_tokens, priority):
        number = len(self.tokens) + 1
        prompt = [token_at(number, position) for position in range(num_prompt)]
        params = SamplingParams(max_tokens=max_tokens, priority=priority, seed=number)
        sequence = Sequence(number, 0, params, np.array(prompt, np.int32), number, 1)
        try:
            self.scheduler.add(sequence)
        except NeverFitsError:
            assert num_prompt >= self.scheduler.capacity_tokens
            return
        assert num_prompt < self.scheduler.capacity_tokens
        self.tokens[sequence] = prompt

    def alive(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @precondition(alive)
    @rule(data=st.data())
    def abort(self, data):
        self.scheduler.remove(data.draw(st.sampled_from(self.alive())))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), yields=st.booleans())
    def pause(self, data, yields):
        sequence = data.draw(st.sampled_from(self.scheduler.running))
        self.scheduler.set_paused(sequence, True, yields=yields)

    @precondition(lambda self: any(s.is_paused for s in self.alive()))
    @rule(data=st.data())
    def resume(self, data):
        paused = [s for s in self.alive() if s.is_paused]
        self.scheduler.set_paused(data.draw(st.sampled_from(paused)), False)

    # -- steps -----------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 4))
    def steps(self, data, count):
        most = self.info.max_tokens_per_step
        made = data.draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
        for num_made in made:
            self.compute(num_made)

    def compute(self, num_made: int) -> bool:
        """One step in which every sampled sequence makes up to `num_made` tokens; False if there was nothing to compute."""
        scheduler = self.scheduler
        self.step_number += 1
        waited = {s for s in scheduler.waiting if not s.admitted_ns}
        batch, started = scheduler.schedule(self.step_number, self.step_number)
        scheduler.check()
        assert waited >= {s for s in started if not s.num_retractions}
        if batch is None:
            assert not started
            assert all(s.is_paused for s in scheduler.running), "somebody could have run"
            self.assert_nobody_is_kept_out()
            return False
        self.assert_consistent(batch)
        self.write_and_read(batch)
        scheduler.advance(batch, self.step_number)
        for index in batch.sample_seqs.tolist():
            self.append(scheduler.by_row[int(batch.rows[index])], num_made)
        return True

    def assert_nobody_is_kept_out(self):
        """Whoever waits and could run needs more than what is free and what paused sequences would yield."""
        first = next((s for s in self.scheduler.waiting if not s.is_paused), None)
        if first is None:
            return
        running = self.scheduler.running
        free = self.scheduler.blocks.num_free + sum(len(s.blocks) for s in running if s.yields)
        num_rows = self.scheduler.columns.num_free_rows + sum(s.yields for s in running)
        reach = min(len(self.tokens[first]) + self.info.max_tokens_per_step - 1, MAX_MODEL_LEN)
        assert num_rows == 0 or free < -(-reach // self.info.block_size)

    def assert_consistent(self, batch: Batch):
        scheduler, size = self.scheduler, self.info.block_size
        counts = np.diff(batch.cu_seqlens)
        assert batch.cu_seqlens[0] == 0 and (counts > 0).all()
        assert batch.cu_seqlens[-1] == batch.num_tokens == len(batch.positions)
        assert len(set(batch.rows.tolist())) == batch.num_seqs
        assert len(set(batch.kv_slots.tolist())) == batch.num_tokens
        assert batch.num_tokens <= scheduler.max_num_batched_tokens
        sampled = []
        for index, row in enumerate(batch.rows.tolist()):
            sequence = scheduler.by_row[row]
            assert sequence is not None and not sequence.is_paused
            tokens = self.tokens[sequence]
            part = slice(batch.cu_seqlens[index], batch.cu_seqlens[index + 1])
            kv_len = int(batch.kv_lens[index])
            assert batch.positions[part].tolist() == list(range(kv_len - counts[index], kv_len))
            assert batch.token_ids[part].tolist() == tokens[kv_len - counts[index] : kv_len]
            table = batch.block_table[index].tolist()
            for slot, position in zip(batch.kv_slots[part], batch.positions[part], strict=True):
                assert slot == table[position // size] * size + position % size
            assert all(table[: -(-kv_len // size)]), "block 0 is nobody's"
            assert table[: len(sequence.blocks)] == sequence.blocks
            assert not any(table[len(sequence.blocks) :])
            if kv_len == len(tokens):
                sampled.append(index)
            assert scheduler.sampling.seed[row] == sequence.req_id
            assert scheduler.sampling.position[row] == len(tokens) - sequence.num_prompt_tokens
            assert scheduler.columns.last_time_ns[row] == self.last_ns.get(sequence, 0)
        assert batch.sample_seqs.tolist() == sampled
        if batch.is_decode:
            assert (counts == 1).all() and len(sampled) == batch.num_seqs
        # A long prompt is cut into chunks; whoever decodes does so in every step.
        in_batch = set(batch.rows.tolist())
        for sequence in scheduler.running:
            assert sequence.is_paused or sequence.is_prefilling or sequence.row in in_batch

    def write_and_read(self, batch: Batch):
        size = self.info.block_size
        for index, row in enumerate(batch.rows.tolist()):
            owner = self.scheduler.by_row[row].req_id
            for at in range(batch.cu_seqlens[index], batch.cu_seqlens[index + 1]):
                entry = (owner, int(batch.positions[at]), int(batch.token_ids[at]))
                self.kv[batch.kv_slots[at]] = entry
        for index, row in enumerate(batch.rows.tolist()):
            sequence, table = self.scheduler.by_row[row], batch.block_table[index].tolist()
            for position in range(batch.kv_lens[index]):
                entry = self.kv[table[position // size] * size + position % size]
                wanted = (sequence.req_id, position, self.tokens[sequence][position])
                assert entry == wanted, "the keys and values of somebody else, or of nobody"

    def append(self, sequence: Sequence, num_made: int):
        """The commit: the tokens are known, and all but the last were verified, so their keys and values are there."""
        columns, row, size = self.scheduler.columns, sequence.row, self.info.block_size
        tokens = self.tokens[sequence]
        for _ in range(min(num_made, int(columns.max_total[row]) - len(tokens))):
            position = len(tokens) - 1
            entry = (sequence.req_id, position, tokens[position])
            self.kv[sequence.blocks[position // size] * size + position % size] = entry
            columns.token_ids[row, len(tokens)] = token_at(sequence.req_id, len(tokens))
            tokens.append(token_at(sequence.req_id, len(tokens)))
            self.scheduler.sampling.position[row] += 1
        columns.num_tokens[row] = len(tokens)
        columns.num_computed[row] = len(tokens) - 1
        columns.last_time_ns[row] = self.last_ns[sequence] = self.step_number
        if len(tokens) == columns.max_total[row]:
            self.scheduler.remove(sequence)

    @invariant()
    def law(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self):
        """Nobody starves: once nothing is paused, as many steps as there are tokens to compute, at worst, end them all."""
        if not hasattr(self, "scheduler"):
            return
        left = self.alive()
        for sequence in left:
            self.scheduler.set_paused(sequence, False)
        # The first in line is never preempted, so it needs a step for each of its tokens; then there is another first.
        for _ in range(2 * MAX_MODEL_LEN * len(left) + 1):
            if not self.compute(1):
                break
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.blocks.num_used == 0
        for sequence in left:
            goal = sequence.num_prompt_tokens + sequence.params.max_tokens
            tokens = self.tokens[sequence]
            assert len(tokens) == min(goal, self.scheduler.capacity_tokens)
            assert tokens == [token_at(sequence.req_id, p) for p in range(len(tokens))]


@pytest.mark.timeout(400)  # it takes seconds; making a failure small takes minutes
def test_every_order_keeps_the_laws_and_nobody_starves():
    run_state_machine_as_test(
        Scheduling, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
