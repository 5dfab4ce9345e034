"""Steps on their way to other ranks: what is written is read, by each of them, in order, and nobody is overtaken."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from together import batch_of

from shmserve.config import WorkerConfig
from shmserve.memory_bounds import step_bytes
from shmserve.worker.batch import Batch
from shmserve.worker.parallel.steps import (
    NUM_SLOTS,
    Order,
    StepReader,
    StepWriter,
    bytes_needed,
    words_needed,
)

WORDS = words_needed(64, 6, 4)


@pytest.fixture
def ends():
    """A writer and its two readers."""
    writer = StepWriter(2, WORDS)
    readers = [StepReader(*map(os.dup, writer.fds_of(index))) for index in range(2)]
    yield writer, readers
    for end in (writer, *readers):
        end.close()


def assert_same(found: Batch, batch: Batch) -> None:
    for name in ("rows", "token_ids", "positions", "kv_slots", "cu_seqlens", "block_table"):
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name), name)
        assert getattr(found, name).dtype == np.int32
    np.testing.assert_array_equal(found.kv_lens, batch.kv_lens)
    np.testing.assert_array_equal(found.sample_seqs, batch.sample_seqs)
    assert (found.step, found.is_decode) == (batch.step, batch.is_decode)


def test_every_reader_gets_every_step_as_it_was(ends):
    writer, readers = ends
    prompts = batch_of((0, [3, 4, 5], 0), (4, [9], 17))
    decode = batch_of((0, [7], 3), (4, [8], 18), (5, [1], 0))
    carried = np.array([1, 0, 2], np.int32)
    for turn in range(2 * NUM_SLOTS + 1):  # round the slots, twice
        writer.compute(replace(prompts, step=turn, sample_seqs=np.zeros(1, np.int32)))
        writer.compute(replace(decode, step=1000 + turn), carried)
        writer.logits(np.array([2, 3], np.int32))
        for reader in readers:
            first, second, third = (reader.read() for _ in range(3))
            assert first.order is second.order is Order.COMPUTE and third.order is Order.LOGITS
            assert first.batch is not None and second.batch is not None and third.batch is None
            assert first.batch.sample_seqs.tolist() == [0] and first.carried is None
            assert first.batch.step == turn and not first.batch.is_decode
            assert_same(second.batch, replace(decode, step=1000 + turn))
            assert second.carried is not None and second.carried.tolist() == [1, 0, 2]
            assert third.rows is not None and third.rows.tolist() == [2, 3]


def test_what_was_read_is_the_readers_own(ends):
    writer, (reader, other) = ends
    writer.logits(np.array([5], np.int32))
    message = reader.read()
    for value in range(NUM_SLOTS - 1):
        writer.logits(np.array([value], np.int32))
    assert message.rows is not None and message.rows.tolist() == [5]
    message.rows[0] = 6
    assert [other.read().rows.tolist() for _ in range(NUM_SLOTS)] == [[5], [0], [1], [2]]


def test_a_slot_is_written_again_only_when_the_last_reader_has_read_it(ends):
    writer, (quick, slow) = ends
    done = threading.Event()

    def write() -> None:
        for value in range(NUM_SLOTS + 1):
            writer.logits(np.array([value], np.int32))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert [quick.read().rows[0] for _ in range(NUM_SLOTS)] == list(range(NUM_SLOTS))
    assert not done.wait(0.2), "the slow one has read nothing"
    assert slow.read().rows[0] == 0
    thread.join(10)
    assert done.is_set()
    assert [slow.read().rows[0] for _ in range(NUM_SLOTS)] == list(range(1, NUM_SLOTS + 1))
    assert quick.read().rows[0] == NUM_SLOTS


def test_the_largest_step_has_room(ends):
    writer, (reader, other) = ends
    batch = batch_of(*((row, list(range(10 + (row < 4))), 0) for row in range(6)))
    assert batch.num_tokens == 64
    writer.compute(batch, np.arange(6, dtype=np.int32))
    for each in (reader, other):
        found = each.read().batch
        assert found is not None
        assert_same(found, batch)


@pytest.mark.parametrize("chunks", [True, False])
def test_the_printed_bound_is_no_less_than_the_memory(chunks):
    worker = WorkerConfig(max_num_seqs=7, max_num_batched_tokens=100, chunked_prefill=chunks)
    most = 100 if chunks else 1100
    needed = bytes_needed(most, 7, -(-1000 // worker.block_size))
    assert needed <= step_bytes(worker, 1000) <= 1.2 * needed
