"""The scheduler under every order of arrivals, aborts, pauses, failures, flushes and steps that chance finds, over a KV memory that tells.

Blocks and rows are so few that sequences are preempted all the time, and prompts so alike that most find others' blocks in the
prefix cache. The machine keeps its own list of each sequence's tokens. A step writes into the KV memory, where the batch says,
what real keys and values are a function of: all tokens up to there (and the salt, and how often the cache was flushed before).
Then every running sequence reads all that it has: a block given away too early, found under another prefix, written by
two, or never computed, is seen at once.
"""

from __future__ import annotations

from dataclasses import fields

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
from shmserve.worker.decode_set import DecodeSet
from shmserve.worker.mixed_batch import ragged_batch
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import NeverFitsError, Scheduler
from shmserve.worker.sequence import Sequence

MAX_MODEL_LEN = 24
POISON = "not a number"


def next_token(seed: int, tokens: list[int]) -> int:
    """The model: a token depends on all before it, and on the request's seed. There are few, so that prefixes meet again."""
    return (seed + sum(tokens) * 5 + len(tokens)) % 3


class Scheduling(RuleBasedStateMachine):
    """Adds, aborts, pauses and resumes sequences, and computes steps."""

    @initialize(
        num_rows=st.integers(1, 4),
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(1, 12),
        most_tokens=st.integers(1, 4),
        caches=st.sampled_from([True, True, True, False]),
        chunks=st.sampled_from([True, True, True, False]),
    )
    def begin(self, num_rows, num_blocks, block_size, budget, most_tokens, caches, chunks):
        self.info = RunnerInfo("fake", 1000, MAX_MODEL_LEN, num_blocks, block_size, most_tokens)
        self.scheduler = Scheduler(
            self.info,
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
            eos_ids=(),
            caches_prefixes=caches,
            chunks_prompts=chunks,
        )
        self.caches, self.chunks = caches, chunks
        self.kv = [None] * (num_blocks * block_size)
        self.num_flushes = 0
        self.flushes_at_admission: dict[Sequence, int] = {}
        self.num_computed: dict[Sequence, int] = {}
        self.is_poisoned: set[Sequence] = set()
        self.tokens: dict[Sequence, list[int]] = {}
        self.last_ns: dict[Sequence, int] = {}
        self.step_number = 0

    # -- what comes from outside -----------------------------------------------------------------------------------------

    @rule(
        num_prompt=st.integers(1, MAX_MODEL_LEN),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
        kind=st.integers(0, 1),
        salt=st.sampled_from([b"", b"", b"", b"a", b"b"]),
        copies=st.sampled_from([1, 1, 1, 3]),
        prompt_logprobs=st.sampled_from([-1, -1, -1, 0]),
    )
    def add(self, num_prompt, max_tokens, priority, kind, salt, copies, prompt_logprobs):
        """`copies` requests whose prompt begins as others do and has an end of its own half of the time."""
        prompt = [(kind + position // 3) % 3 for position in range(num_prompt)]
        for _ in range(copies):
            seed = len(self.tokens) + 1
            params = SamplingParams(
                max_tokens=max_tokens,
                priority=priority,
                seed=seed,
                prompt_logprobs=prompt_logprobs,
            )
            self.submit(prompt, params, salt)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), question=st.lists(st.integers(0, 2), max_size=3))
    def add_next_turn(self, data, question):
        """A request that goes on from the prompt and the answer of another one, finished or not."""
        earlier = data.draw(st.sampled_from(list(self.tokens)))
        params = SamplingParams(max_tokens=4, seed=len(self.tokens) + 1)
        self.submit(self.tokens[earlier] + question, params, earlier.cache_salt)

    def submit(self, prompt, params, salt):
        number, num_prompt = params.seed, len(prompt)
        prompt = list(prompt)
        sequence = Sequence(
            number, 0, params, np.array(prompt, np.int32), number, 1, cache_salt=salt
        )
        try:
            self.scheduler.add(sequence)
        except NeverFitsError:
            assert num_prompt >= self.scheduler.capacity_tokens
            return
        assert num_prompt < self.scheduler.capacity_tokens
        self.tokens[sequence] = prompt
        self.num_computed[sequence] = 0

    @rule()
    def flush(self):
        self.scheduler.flush_cache()
        self.num_flushes += 1
        assert self.scheduler.tables.cache.num_cached == 0

    def alive(self) -> list[Sequence]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    @precondition(alive)
    @rule(data=st.data())
    def abort(self, data):
        self.scheduler.remove(data.draw(st.sampled_from(self.alive())))

    @precondition(alive)
    @rule(data=st.data(), yields=st.booleans())
    def pause(self, data, yields):
        """One that runs, or waits (for the first time, or again since it was preempted), and may be paused for another reason already."""
        sequence = data.draw(st.sampled_from(self.alive()))
        self.scheduler.set_paused(sequence, True, yields=yields)

    @precondition(lambda self: self.scheduler.running)
    @rule(but_one=st.booleans(), yields=st.booleans(), count=st.integers(0, 12))
    def pause_all_who_run(self, but_one, yields, count):
        """All clients stop reading at once, or all but the newest: whoever goes on, for some steps, needs their rows and blocks."""
        running = self.scheduler.running
        for sequence in running[: len(running) - but_one]:
            self.scheduler.set_paused(sequence, True, yields=yields)
        for _ in range(count):
            self.compute(1)

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

    @rule(number=st.integers(0, 3))
    def step_that_breaks(self, number):
        """Of one sequence the newest keys and values, and so the logits, are no numbers."""
        self.compute(1, breaks=number)

    def compute(self, num_made: int, breaks: int | None = None) -> bool:
        """One step in which every sampled sequence makes up to `num_made` tokens; False if there was nothing to compute."""
        scheduler = self.scheduler
        self.step_number += 1
        waited = {s for s in scheduler.waiting if not s.admitted_ns}
        ran = list(scheduler.running)
        batch, started = scheduler.schedule(self.step_number, self.step_number)
        scheduler.check()
        self.assert_paused_ones_go_first(ran)
        assert waited >= {s for s in started if not s.num_retractions}
        for sequence in started:
            self.flushes_at_admission[sequence] = self.num_flushes
            assert self.caches or sequence.cached_tokens == 0
            assert sequence.params.prompt_logprobs < 0 or sequence.cached_tokens == 0
        if batch is None:
            assert not started
            assert all(s.is_paused for s in scheduler.running), "somebody could have run"
            self.assert_nobody_is_kept_out()
            return False
        self.assert_consistent(batch)
        self.assert_is_as_if_new(batch)
        failed = self.write_and_read(batch, breaks)
        in_batch = [scheduler.by_row[int(batch.rows[index])] for index in batch.sample_seqs]
        scheduler.advance(batch, self.step_number, failed)
        for index, sequence in enumerate(in_batch):
            self.assert_counted(sequence)
            if index in failed:
                scheduler.remove(sequence)
            else:
                self.append(sequence, num_made)
        self.assert_kept()
        return True

    def assert_is_as_if_new(self, batch):
        """A set of decoding rows that has gone on makes the batch that a new one makes, and the same beside prompts."""
        s = self.scheduler
        if batch.is_decode:
            new = DecodeSet(batch.rows, s.info, s.columns, s.tables, s.by_row).batch(batch.step)
        else:
            owners, counts = (
                [s.by_row[row] for row in batch.rows.tolist()],
                np.diff(batch.cu_seqlens),
            )
            num_decode = sum(not owner.is_prefilling for owner in owners)
            chunks = list(zip(owners, counts.tolist(), strict=True))[num_decode:]
            rows = batch.rows[:num_decode]
            new = ragged_batch(batch.step, rows, chunks, s.columns, s.info.block_size)
        for field in fields(Batch):
            ours, theirs = getattr(batch, field.name), getattr(new, field.name)
            if field.name == "prompt_parts":
                ours, theirs = repr(ours), repr(theirs)
            assert np.array_equal(ours, theirs), field.name

    def assert_counted(self, sequence):
        """What a prompt was found to be in the cache and what was computed of it are the prompt."""
        if (
            not sequence.num_retractions
            and len(self.tokens[sequence]) == sequence.num_prompt_tokens
        ):
            found = sequence.num_prompt_tokens - self.num_computed[sequence]
            assert sequence.cached_tokens == found

    def assert_kept(self):
        """Whoever runs can read all that it has computed, and what is cached is what it is found by."""
        for sequence in self.scheduler.running:
            computed = int(self.scheduler.columns.num_computed[sequence.row])
            assert self.read(sequence, sequence.blocks, computed) == (sequence in self.is_poisoned)
        cache, size = self.scheduler.tables.cache, self.info.block_size
        for block in range(self.info.num_blocks):
            node = cache.node_of(block)
            for at in range(size if node else 0):
                entry = self.kv[block * size + at]
                assert entry not in (None, POISON) and entry[2][-1] == node.tokens[4 * at]

    def assert_paused_ones_go_first(self, ran):
        """Nobody who computes lost its blocks while one that is paused kept its own."""
        still = set(self.scheduler.running)
        preempted = [s for s in ran if s not in still]
        if any(not s.is_paused for s in preempted):
            assert all(not s.is_paused for s in ran if s in still)

    def assert_nobody_is_kept_out(self):
        """Whoever waits and could run needs more than what is free and what paused sequences would yield."""
        first = next((s for s in self.scheduler.waiting if not s.is_paused), None)
        if first is None:
            return
        running, blocks = self.scheduler.running, self.scheduler.blocks
        num_rows = self.scheduler.columns.num_free_rows + sum(s.yields for s in running)
        reach = min(len(self.tokens[first]) + self.info.max_tokens_per_step - 1, MAX_MODEL_LEN)
        found = {node.block for node in self.scheduler.tables.found_for(first)}
        stays = {block for s in running if not s.yields for block in s.blocks}
        free = blocks.num_blocks - 1 - len(stays | found)
        assert num_rows == 0 or free < -(-reach // self.info.block_size) - len(found)

    def assert_consistent(self, batch: Batch):
        scheduler, size = self.scheduler, self.info.block_size
        counts = np.diff(batch.cu_seqlens)
        assert batch.cu_seqlens[0] == 0 and (counts > 0).all()
        assert batch.cu_seqlens[-1] == batch.num_tokens == len(batch.positions)
        assert len(set(batch.rows.tolist())) == batch.num_seqs
        assert len(set(batch.kv_slots.tolist())) == batch.num_tokens
        assert batch.num_tokens <= scheduler.max_num_batched_tokens + MAX_MODEL_LEN * (
            not self.chunks
        )
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

    def entry_of(self, sequence: Sequence, position: int):
        """What the keys and values of a position are a function of, and when they were made."""
        salt, tokens = sequence.cache_salt, self.tokens[sequence]
        return (self.num_flushes, salt, tuple(tokens[: position + 1]))

    def write_and_read(self, batch: Batch, breaks: int | None) -> tuple[int, ...]:
        """All rows write, then all read; indices of the sampled sequences whose logits are no numbers."""
        sequences = [self.scheduler.by_row[row] for row in batch.rows.tolist()]
        sampled = batch.sample_seqs.tolist()
        broken = (
            sequences[sampled[breaks % len(sampled)]] if breaks is not None and sampled else None
        )
        for index, sequence in enumerate(sequences):
            for at in range(batch.cu_seqlens[index], batch.cu_seqlens[index + 1]):
                entry = self.entry_of(sequence, int(batch.positions[at]))
                is_last = at == batch.cu_seqlens[index + 1] - 1
                is_poison = sequence in self.is_poisoned or (is_last and sequence is broken)
                self.kv[batch.kv_slots[at]] = POISON if is_poison else entry
                self.num_computed[sequence] += 1
        for index, sequence in enumerate(sequences):
            table = batch.block_table[index].tolist()
            if self.read(sequence, table, int(batch.kv_lens[index])):
                self.is_poisoned.add(sequence)
        return tuple(i for i, at in enumerate(sampled) if sequences[at] in self.is_poisoned)

    def read(self, sequence: Sequence, table: list[int], count: int) -> bool:
        """Read the first `count` positions; True if there is poison among them."""
        size, is_poisoned = self.info.block_size, False
        least = self.flushes_at_admission[sequence]
        for position in range(count):
            entry = self.kv[table[position // size] * size + position % size]
            if entry == POISON:
                is_poisoned = True
                continue
            wanted = self.entry_of(sequence, position)
            assert entry is not None and entry[1:] == wanted[1:], "somebody else's, or nobody's"
            assert entry[0] >= least, "it was to be forgotten"
        return is_poisoned

    def append(self, sequence: Sequence, num_made: int):
        """The commit: the tokens are known, and all but the last were verified, so their keys and values are there."""
        columns, row, size = self.scheduler.columns, sequence.row, self.info.block_size
        tokens = self.tokens[sequence]
        for _ in range(min(num_made, int(columns.max_total[row]) - len(tokens))):
            position = len(tokens) - 1
            if position >= columns.num_computed[row]:
                slot = sequence.blocks[position // size] * size + position % size
                self.kv[slot] = self.entry_of(sequence, position)
            tokens.append(next_token(sequence.params.seed, tokens))
            columns.token_ids[row, len(tokens) - 1] = tokens[-1]
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
            for end in range(sequence.num_prompt_tokens, len(tokens)):
                assert tokens[end] == next_token(sequence.params.seed, tokens[:end])


@pytest.mark.timeout(400)  # it takes seconds; making a failure small takes minutes
def test_every_order_keeps_the_laws_and_nobody_starves():
    run_state_machine_as_test(
        Scheduling, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
