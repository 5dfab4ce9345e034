"""Buffers of a step behind a link whose copies end late: nothing is written over before it was read, and only changes are sent."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.cuda.buffers import ALIGN_WORDS, NUM_SLOTS, Layout, StepBuffers
from shmserve.worker.cuda.link import Passed
from shmserve.worker.sampling_state import SamplingState

BLOCK, ROWS = 16, 4


class SlowLink:
    """A stream on the CPU that is behind the host: a copy is over when a mark behind it is waited for, or `run` says so.

    The device sees at once what was copied to it (it computes in order, so it cannot see it too early), but the memory that
    is copied from must keep its values until the copy is over, and memory of the host gets its values only then.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.host: list[torch.Tensor] = []
        self.sizes: list[int] = []  # of all copies to the device
        self.num_waits = 0  # of marks that the stream had not come to
        self._queue: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_done = 0

    def host_words(self, count):
        self.host.append(torch.zeros(count, dtype=torch.int32))
        return self.host[-1]

    def copy(self, target, source):
        self._queue.append((target, source, source.clone()))
        if not self._is_host(target):
            self.sizes.append(len(source))
            target.copy_(source)

    def _is_host(self, tensor):
        return any(
            t.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for t in self.host
        )

    def mark(self):
        return SlowMark(self, len(self._queue))

    def run(self, count=None):
        """The stream comes to the copy of this number, or to the end."""
        for target, source, values in self._queue[self._num_done : count]:
            if self._is_host(target):
                target.copy_(values)
            else:
                assert torch.equal(source, values), "written over before it was copied"
        self._num_done = max(self._num_done, len(self._queue) if count is None else count)


class SlowMark:
    def __init__(self, link, count) -> None:
        self._link, self._count = link, count

    def wait(self):
        self._link.num_waits += self._count > self._link._num_done
        self._link.run(self._count)


def buffers_of(link, max_blocks=4) -> StepBuffers:
    sizes = {"max_num_tokens": 64, "max_num_seqs": 8, "num_rows": ROWS, "max_blocks": max_blocks}
    return StepBuffers(link, **sizes)


def decode_batch(step, table, rows=(0, 1, 2)) -> Batch:
    count = len(rows)
    cu = np.arange(count + 1, dtype=np.int32)
    positions = np.full(count, step, np.int32)
    table = np.asarray(table, np.int32)
    return Batch(
        step=step,
        rows=np.array(rows, np.int32),
        token_ids=np.arange(count, dtype=np.int32) + 100 * step,
        positions=positions,
        kv_slots=table[cu[:-1], positions // BLOCK] * BLOCK + positions % BLOCK,
        cu_seqlens=cu,
        block_table=table,
        kv_lens=positions + 1,
        sample_seqs=cu[:-1],
        is_decode=True,
    )


TABLE = [[3, 4], [5, 6], [7, 8]]


def test_staging_keeps_its_values_until_they_were_copied():
    link = SlowLink()
    buffers = buffers_of(link)
    for step in range(3 * NUM_SLOTS):
        inputs = buffers.send(decode_batch(step, TABLE), SamplingState(ROWS), None, 4)
        assert inputs.token_ids[:3].tolist() == [100 * step, 100 * step + 1, 100 * step + 2]
        assert link.num_waits == max(0, step + 1 - NUM_SLOTS), "a wait for each turn but the first"
    link.run()


def test_without_its_waits_staging_would_be_written_over():
    """That the link sees it: a test of the test."""
    link = SlowLink()
    buffers = buffers_of(link)
    for step in range(NUM_SLOTS + 1):
        buffers._sent = [Passed() for _ in range(NUM_SLOTS)]
        buffers.send(decode_batch(step, TABLE), SamplingState(ROWS), None, 4)
    with pytest.raises(AssertionError, match="written over"):
        link.run()


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["late", "ahead of the host"])
def test_results_of_two_steps_in_flight_reach_the_host_unmixed(runs_ahead):
    link = SlowLink()
    buffers = buffers_of(link)
    flying = []
    for step in range(9):
        buffers.sampled_ids[:3] = torch.tensor([step, step + 1, step + 2], dtype=torch.int32)
        buffers.sampled_logprobs[:3] = torch.tensor([-0.5 - step, -1.0, -2.0])
        buffers.failures[:3] = torch.tensor([0, step % 2, 0], dtype=torch.int32)
        flying.append((step, buffers.fetch(3)))
        if runs_ahead:
            link.run()
        if len(flying) == 2:
            told, landing = flying.pop(0)
            ids, logprobs, failures = landing.wait()
            assert ids.tolist() == [told, told + 1, told + 2]
            assert logprobs.tolist() == [-0.5 - told, -1.0, -2.0]
            assert failures.tolist() == [0, told % 2, 0]


def test_results_that_were_read_do_not_change_under_their_reader():
    buffers = buffers_of(SlowLink())
    buffers.sampled_ids[:1] = 5
    ids, _, _ = buffers.fetch(1).wait()
    buffers.sampled_ids[:1] = 6
    for _ in range(NUM_SLOTS):
        buffers.fetch(1).wait()
    assert ids.tolist() == [5]


def test_a_table_is_sent_once_and_then_its_changes():
    link = SlowLink()
    buffers = buffers_of(link)
    state, fixed = SamplingState(ROWS), Layout.of(4, 4).num_words
    table = np.array(TABLE)
    buffers.send(decode_batch(0, table), state, None, 4)
    buffers.send(decode_batch(1, table), state, None, 4)
    table = np.array([[3, 4, 0], [5, 6, 9], [7, 2, 0]])
    buffers.send(decode_batch(2, table), state, None, 4)
    assert link.sizes == [fixed + 2 * 6, fixed, fixed + 2 * 2]
    assert buffers.tables[:3, :3].tolist() == table.tolist()
    assert not buffers.tables[3:].any() and not buffers.tables[:, 3:].any()


def test_a_table_that_is_still_the_same_array_is_not_looked_through():
    buffers = buffers_of(SlowLink())
    batch = decode_batch(0, TABLE)
    buffers.send(batch, SamplingState(ROWS), None, 4)
    buffers._known = None
    buffers.send(replace(batch, step=1), SamplingState(ROWS), None, 4)
    with pytest.raises(TypeError):
        buffers.send(decode_batch(2, TABLE), SamplingState(ROWS), None, 4)
    assert buffers.tables[:3, :2].tolist() == TABLE


def test_a_row_that_another_sequence_takes_gets_its_table():
    buffers = buffers_of(SlowLink())
    buffers.send(decode_batch(0, TABLE), SamplingState(ROWS), None, 4)
    buffers.send(decode_batch(0, [[9, 0]], rows=(1,)), SamplingState(ROWS), None, 1)
    assert buffers.tables[:3, :2].tolist() == [[3, 4], [9, 0], [7, 8]]


def test_padding_rows_compute_nothing_of_anybodys():
    buffers = buffers_of(SlowLink())
    buffers.send(decode_batch(20, TABLE), SamplingState(ROWS), None, 8)
    inputs = buffers.send(decode_batch(21, TABLE), SamplingState(ROWS), None, 8)
    assert inputs.kv_lens.tolist() == [22, 22, 22, 0, 0, 0, 0, 0]
    assert inputs.kv_slots[3:].tolist() == [0] * 5 and inputs.carried.tolist() == [-1] * 8
    assert inputs.table_rows.tolist() == [0, 1, 2, *[ROWS] * 5]
    assert not buffers.tables[ROWS].any(), "their table is block 0"


def test_floats_and_seeds_arrive_bit_for_bit():
    state = SamplingState(ROWS)
    seeds = (2**64 - 1, 2**63 + 5, 7)
    for row, seed in enumerate(seeds):
        params = SamplingParams(max_tokens=9, temperature=0.1 + row, min_p=0.3, seed=seed)
        state.set(row, params, (), 40 + row)
    state.temperature[2] = 0
    inputs = buffers_of(SlowLink()).send(decode_batch(3, TABLE), state, None, 4)
    assert inputs.seeds[:3].numpy().view(np.uint64).tolist() == list(seeds)
    assert inputs.temperature[:3].tolist() == [np.float32(0.1), np.float32(1.1), 0.0]
    assert inputs.min_p[:3].tolist() == [np.float32(0.3)] * 3
    assert inputs.draw_positions[:3].tolist() == [40, 41, 42]


def test_a_carried_row_draws_one_position_further_and_takes_its_token_from_the_device():
    carried = np.array([2, 0, 1], np.int32)
    inputs = buffers_of(SlowLink()).send(decode_batch(3, TABLE), SamplingState(ROWS), carried, 4)
    assert inputs.carried.tolist() == [2, 0, 1, -1]
    assert inputs.draw_positions[:3].tolist() == [1, 1, 1]


def test_beside_a_prompt_only_those_who_carry_a_token_draw_one_position_further():
    batch = decode_batch(0, TABLE)
    batch = replace(
        batch,
        token_ids=np.array([0, 0, 21, 22, 23], np.int32),
        positions=np.array([4, 5, 0, 1, 2], np.int32),
        kv_slots=np.array([52, 85, 112, 113, 114], np.int32),
        cu_seqlens=np.array([0, 1, 2, 5], np.int32),
        kv_lens=np.array([5, 6, 3], np.int32),
        is_decode=False,
    )
    carried = np.array([1, 0, -1], np.int32)
    inputs = buffers_of(SlowLink()).send(batch, SamplingState(ROWS), carried, None)
    assert inputs.carried.tolist() == [1, 0, -1, -1, -1]
    assert inputs.draw_positions[:3].tolist() == [1, 1, 0]


def test_a_step_with_prompts_samples_the_last_token_of_each():
    batch = decode_batch(0, [[3, 4], [5, 6]], rows=(0, 2))
    prompt = np.arange(5, dtype=np.int32)
    batch = replace(
        batch,
        token_ids=np.concatenate([prompt, [9]]).astype(np.int32),
        positions=np.array([0, 1, 2, 3, 4, 7], np.int32),
        kv_slots=np.array([48, 49, 50, 51, 52, 87], np.int32),
        cu_seqlens=np.array([0, 5, 6], np.int32),
        kv_lens=np.array([5, 8], np.int32),
        sample_seqs=np.array([1], np.int32),
        is_decode=False,
    )
    inputs = buffers_of(SlowLink()).send(batch, SamplingState(ROWS), None, None)
    assert inputs.token_ids.tolist() == [0, 1, 2, 3, 4, 9]
    assert inputs.cu_seqlens.tolist() == [0, 5, 6] and inputs.table_rows.tolist() == [0, 2]
    assert inputs.last_tokens[:1].tolist() == [5]


@pytest.mark.parametrize(("num_tokens", "num_seqs"), [(1, 1), (3, 3), (64, 7), (256, 256)])
def test_fields_lie_apart_and_aligned(num_tokens, num_seqs):
    layout = Layout.of(num_tokens, num_seqs)
    places = sorted((layout.place(name) for name in layout.starts), key=lambda place: place.start)
    assert all(place.start % ALIGN_WORDS == 0 for place in places)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(places))
    assert places[-1].stop <= layout.num_words
