"""How the other ranks hear what is computed: the words of each step, in memory that all ranks of a worker share.

Owns: the layout of a message, the memory, and the counters by which it is handed over. Never: pickles, allocates per step, or has a name
that could stay behind: memory and counters are descriptors, which the ranks inherit.

    rank 0     StepWriter.write    take a free slot of every reader; copy the words; add 1 to every reader's counter
    rank > 0   StepReader.read     wait for the counter; copy the words; give the slot back

One message is written once, whatever the number of ranks. The counter is the hand-over, as in the rings: what was stored before it was
added to is seen after it was read. NUM_SLOTS messages may be on their way; then the writer waits, so a rank that hangs stops the step, and
the rules for hanging steps find it. A reader that waits costs nothing, however long nobody asks for anything: a collective operation that
waits has a time limit, and on a GPU keeps it busy.

A message is int32 words: a header, then the arrays it names the lengths of. Main thread of each rank only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from shmserve.worker.batch import I4, Batch

NUM_SLOTS = 4
_ARRAYS = (
    8  # of a step: the fields of a Batch that shape a forward pass, and which tokens are carried
)
_HEADER = (
    4 + _ARRAYS
)  # kind, step, whether all rows decode, columns of the block table; length of each array, -1 for none
_SPARE_COLUMNS = 2


class Order(IntEnum):
    """What a message asks for."""

    COMPUTE = 1  # the hidden states of a batch
    LOGITS = 2  # of some tokens of that batch


@dataclass(frozen=True, slots=True)
class Message:
    """`batch` and `carried` of COMPUTE: as OverlappingRunner.launch has them. `rows` of LOGITS: tokens of the batch."""

    order: Order
    batch: Batch | None = None
    carried: I4 | None = None
    rows: I4 | None = None


def words_needed(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Words of the longest message: as many tokens and sequences as a step may have."""
    per_seq = 5 + max_blocks + _SPARE_COLUMNS
    return _HEADER + 3 * max_num_tokens + per_seq * max_num_seqs + 1


def bytes_needed(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Of the shared memory of one worker."""
    return 4 * NUM_SLOTS * words_needed(max_num_tokens, max_num_seqs, max_blocks)


class StepWriter:
    """Rank 0's end, for `num_readers` others."""

    def __init__(self, num_readers: int, num_words: int) -> None:
        self._num_words = num_words
        self.memory_fd = os.memfd_create("shmserve steps", os.MFD_CLOEXEC)
        os.ftruncate(self.memory_fd, 4 * NUM_SLOTS * num_words)
        self._map = mmap.mmap(self.memory_fd, 4 * NUM_SLOTS * num_words)
        self._words: I4 = np.frombuffer(self._map, np.int32).reshape(NUM_SLOTS, num_words)
        # A counter of messages for each reader, which gives them out one by one, and one of slots that it has given back.
        self._data = [_counter(os.EFD_SEMAPHORE) for _ in range(num_readers)]
        self._credits = [_counter(0) for _ in range(num_readers)]
        self._free = [NUM_SLOTS] * num_readers
        self._turn = 0

    def fds_of(self, reader: int) -> list[int]:
        """What reader number `reader`, from 0, must be given: memory, messages, credits."""
        return [self.memory_fd, self._data[reader], self._credits[reader]]

    def compute(self, batch: Batch, carried: I4 | None = None) -> None:
        """All ranks compute `batch`."""
        arrays = (
            batch.rows,
            batch.token_ids,
            batch.positions,
            batch.kv_slots,
            batch.kv_lens,
            batch.sample_seqs,
            batch.block_table.reshape(-1),
            carried,
        )
        self._write(Order.COMPUTE, arrays, batch.step, batch.is_decode, batch)

    def logits(self, rows: I4) -> None:
        """All ranks compute the logits of tokens `rows` of the last batch."""
        self._write(Order.LOGITS, (rows,))

    def _write(
        self,
        order: Order,
        arrays: Sequence[I4 | None],
        step: int = 0,
        is_decode: bool = False,
        batch: Batch | None = None,
    ) -> None:
        for reader, free in enumerate(self._free):
            if not free:
                self._free[reader] = os.eventfd_read(self._credits[reader])
        words = self._words[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        words[:_HEADER] = -1
        # A step number is for logs; it must only fit.
        words[:4] = (
            order,
            step & 0x7FFFFFFF,
            is_decode,
            0 if batch is None else batch.block_table.shape[1],
        )
        at = _HEADER
        for index, array in enumerate(arrays):
            if array is not None:
                words[4 + index] = len(array)
                words[at : at + len(array)] = array
                at += len(array)
        if batch is not None:  # one longer than the sequences: its length needs no word
            words[at : at + len(batch.cu_seqlens)] = batch.cu_seqlens
        for reader, data in enumerate(self._data):
            self._free[reader] -= 1
            os.eventfd_write(data, 1)

    def close(self) -> None:
        """Give descriptors and memory back."""
        del self._words
        self._map.close()
        for fd in (self.memory_fd, *self._data, *self._credits):
            os.close(fd)


class StepReader:
    """The end of a rank that is not 0, over the descriptors that `StepWriter.fds_of` named. They are its own from now on."""

    def __init__(self, memory_fd: int, data_fd: int, credit_fd: int) -> None:
        self._map = mmap.mmap(memory_fd, 0, prot=mmap.PROT_READ)
        words: I4 = np.frombuffer(self._map, np.int32)
        self._words = words.reshape(NUM_SLOTS, -1)
        self._data, self._credit = data_fd, credit_fd
        self._turn = 0
        os.close(memory_fd)

    def read(self) -> Message:
        """The next message. Waits for it as long as it takes."""
        os.eventfd_read(self._data)
        slot = self._words[self._turn]
        self._turn = (self._turn + 1) % NUM_SLOTS
        header = slot[:_HEADER].tolist()
        order, lengths = Order(header[0]), header[4:]
        used = _HEADER + sum(length for length in lengths if length > 0)
        if order is Order.COMPUTE:
            used += lengths[0] + 1
        words = slot[_HEADER:used].copy()
        os.eventfd_write(self._credit, 1)
        return _message(order, header, lengths, words)

    def close(self) -> None:
        """Give descriptors and memory back."""
        del self._words
        self._map.close()
        for fd in (self._data, self._credit):
            os.close(fd)


def _message(order: Order, header: list[int], lengths: list[int], words: I4) -> Message:
    arrays: list[I4 | None] = []
    at = 0
    for length in lengths:
        arrays.append(None if length < 0 else words[at : at + length])
        at += max(length, 0)
    if order is not Order.COMPUTE:
        return Message(order, rows=arrays[0])
    rows, token_ids, positions, kv_slots, kv_lens, sample_seqs, table, carried = arrays
    assert rows is not None and token_ids is not None and positions is not None
    assert kv_slots is not None and kv_lens is not None and sample_seqs is not None
    assert table is not None
    batch = Batch(
        step=header[1],
        rows=rows,
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        cu_seqlens=words[at:],
        block_table=table.reshape(len(rows), header[3]),
        kv_lens=kv_lens,
        sample_seqs=sample_seqs,
        is_decode=bool(header[2]),
    )
    return Message(order, batch, carried)


def _counter(flags: int) -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | flags)
