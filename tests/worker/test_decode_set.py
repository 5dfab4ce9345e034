"""A decode set that goes on makes the batches that a new one would make."""

import itertools
from dataclasses import fields

import numpy as np
import pytest

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.mixed_batch import ragged_batch
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence

SIZE = 4


class Desk:
    """Sequences of different phases that decode; `step` makes one token of each, all of them told by the caller."""

    def __init__(self, *lengths: int, num_blocks=200, most_tokens=1, token=None, budget=256):
        info = RunnerInfo("fake", 100, 64, num_blocks, SIZE, most_tokens)
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget}
        self.scheduler = Scheduler(info, **limits, eos_ids=(1,))
        self.sequences = []
        for length in lengths:
            self.add(np.arange(length) + 50 * len(self.sequences))
        self.number = 0
        self.step(token)
        assert not self.scheduler._prefilling

    def add(self, prompt, priority=0):
        number = len(self.sequences)
        params = SamplingParams(max_tokens=60, priority=priority)
        sequence = Sequence(number + 1, 0, params, np.array(prompt, np.int32), number, 1)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self, token=None) -> Batch:
        """Checks the rows that decode against a new set's."""
        scheduler, columns = self.scheduler, self.scheduler.columns
        self.number += 1
        batch, _ = scheduler.schedule(self.number, self.number)
        self.assert_is_new(batch)
        scheduler.advance(batch, self.number)
        for row in batch.rows[batch.sample_seqs].tolist():
            made = self.number + 10 * row if token is None else token
            columns.token_ids[row, columns.num_tokens[row]] = made
            columns.num_tokens[row] += 1
        scheduler.check()
        return batch

    def assert_is_new(self, batch):
        s = self.scheduler
        owners, counts = [s.by_row[row] for row in batch.rows.tolist()], np.diff(batch.cu_seqlens)
        num_decode = sum(not owner.is_prefilling for owner in owners)
        chunks = list(zip(owners, counts.tolist(), strict=True))[num_decode:]
        new = ragged_batch(batch.step, batch.rows[:num_decode], chunks, s.columns, SIZE)
        for field in fields(Batch):
            ours, theirs = getattr(batch, field.name), getattr(new, field.name)
            is_as_made = np.array_equal(ours, theirs)
            assert is_as_made or (field.name == "is_decode" and not chunks), field.name


@pytest.mark.parametrize("most_tokens", [1, 3])
def test_a_set_goes_on_over_many_blocks(most_tokens):
    desk = Desk(3, 4, 5, 6, 9, most_tokens=most_tokens)
    desk.step()
    first = desk.scheduler._decode_set
    for _ in range(40):
        assert desk.step().is_decode
    assert desk.scheduler._decode_set is first


def test_a_set_goes_on_beside_a_prompt_in_chunks_until_the_prompt_is_complete():
    desk = Desk(3, 5, budget=8)
    desk.step()
    before, made = desk.scheduler._decode_set, []
    desk.add(np.arange(40) + 1000)
    while not made or desk.scheduler._prefilling:
        made.append(desk.step())
        assert desk.scheduler._decode_set is before
    assert [batch.num_tokens for batch in made] == [8] * 6 + [6], "two decode beside six of 40"
    assert not any(batch.is_decode for batch in made) and len(made[-1].sample_seqs) == 3
    assert desk.step().is_decode
    assert len(desk.scheduler._decode_set.rows) == 3


def test_a_row_that_another_sequence_takes_ends_its_set():
    """The newcomer is given the row, and comes to be as long as the one that left it: to the columns it might be the same."""
    desk = Desk(4)
    for _ in range(2):
        desk.step()
    before, first = desk.scheduler._decode_set, desk.sequences[0]
    row, num_tokens = first.row, int(desk.scheduler.columns.num_tokens[first.row])
    desk.scheduler.remove(first)
    assert before is not None and desk.scheduler._decode_set is None
    late = desk.add(np.arange(num_tokens - 1) + 500)
    desk.step()
    assert (late.row, int(desk.scheduler.columns.num_tokens[row])) == (row, num_tokens)
    desk.step()
    assert desk.scheduler._decode_set is not before


def test_a_batch_in_flight_keeps_its_own_arrays():
    desk = Desk(3, 5)
    before = desk.step()
    kept = [array.copy() for array in (before.positions, before.kv_lens, before.kv_slots)]
    ids = before.token_ids.copy()
    desk.step()
    for array, copy in zip((before.positions, before.kv_lens, before.kv_slots), kept, strict=True):
        assert array.tolist() == copy.tolist()
    assert before.token_ids.tolist() == ids.tolist()


def test_who_comes_pauses_or_leaves_ends_a_set():
    desk = Desk(3, 5, 6)
    for change in (
        lambda: desk.add([7, 8, 9]),
        lambda: desk.scheduler.set_paused(desk.sequences[0], True),
        lambda: desk.scheduler.set_paused(desk.sequences[0], False),
        lambda: desk.scheduler.remove(desk.sequences[1]),
    ):
        for _ in range(3):
            desk.step()
        before = desk.scheduler._decode_set
        assert before is not None
        change()
        for _ in range(3):
            desk.step()
        after = desk.scheduler._decode_set
        assert after is not before
        assert sorted(after.rows) == sorted(
            s.row for s in desk.scheduler.running if not s.is_paused
        )


def test_a_step_of_several_tokens_ends_a_set():
    desk = Desk(3, 5)
    desk.step()
    before = desk.scheduler._decode_set
    columns, row = desk.scheduler.columns, desk.sequences[1].row
    columns.token_ids[row, columns.num_tokens[row]] = 9
    columns.num_tokens[row] += 1
    columns.num_computed[row] += 1
    assert not before.goes_on()
    desk.step()
    assert desk.scheduler._decode_set is not before


def test_a_block_that_gives_way_to_a_cached_one_leaves_the_table():
    desk = Desk(SIZE, SIZE, token=77)
    twin = desk.add(np.arange(SIZE))  # as the first, whose answer it gives one step later
    for _ in range(4 * SIZE):
        desk.step(token=77)
    assert desk.sequences[0].blocks[:3] == twin.blocks[:3]


def test_without_a_free_block_the_scheduler_decides():
    desk = Desk(3, 5, 6, num_blocks=9)
    for _ in range(12):
        desk.step()
    assert desk.scheduler.num_preempted > 0


def test_with_room_each_gets_its_next_block_at_the_beginning_of_a_plan_and_never_a_second():
    desk = Desk(3, 4, 5, 6, 9)
    free = []
    for _ in range(6 * SIZE):
        desk.step()
        free.append(desk.scheduler.blocks.num_free)
        for sequence in desk.sequences:
            num_computed = int(desk.scheduler.columns.num_computed[sequence.row])
            assert len(sequence.blocks) - -(-num_computed // SIZE) in (0, 1)
    given = [(at, before - now) for at, (before, now) in enumerate(itertools.pairwise(free))]
    given = [(at, count) for at, count in given if count][1:]
    assert [count for _, count in given] == [len(desk.sequences)] * len(given)
    assert {after - at for (at, _), (after, _) in itertools.pairwise(given)} == {SIZE}


def test_where_blocks_are_few_nobody_has_one_before_it_is_needed():
    desk = Desk(3, 5, 6, num_blocks=11)
    for _ in range(6):
        desk.step()
        for sequence in desk.sequences:
            num_computed = int(desk.scheduler.columns.num_computed[sequence.row])
            assert len(sequence.blocks) == -(-num_computed // SIZE)
    assert desk.scheduler.num_preempted == 0


def test_blocks_of_a_plan_are_indexed_at_its_end():
    desk = Desk(3, 6)
    for _ in range(4 * SIZE):
        desk.step()
        columns = desk.scheduler.columns
        for sequence in desk.sequences:
            behind = int((columns.num_computed - columns.num_indexed)[sequence.row])
            assert behind < 2 * SIZE


def test_blocks_that_fill_are_found_by_the_next_prompt():
    desk = Desk(3, 6)
    for _ in range(3 * SIZE):
        desk.step()
    row, num_computed = desk.sequences[1].row, 6 + 3 * SIZE - 1
    tokens = desk.scheduler.columns.token_ids[row, :num_computed].copy()
    late = desk.add(tokens)
    desk.step()
    assert late.cached_tokens == num_computed // SIZE * SIZE - (num_computed % SIZE == 0) * SIZE


def test_after_a_flush_nothing_is_indexed():
    desk = Desk(3, 6)
    desk.step()
    desk.scheduler.flush_cache()
    for _ in range(3 * SIZE):
        desk.step()
    assert desk.scheduler.tables.cache.num_cached == 0
