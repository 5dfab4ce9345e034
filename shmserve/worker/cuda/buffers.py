"""Memory that a step goes through: staging on the host, inputs, block tables and results on the device.

Owns: every buffer whose address a recorded step knows, and the copies: one to the device and one back for each step. Never:
computes anything, or waits but for a buffer. What lies between host and device is link.py.

A step's numbers are 32-bit words of one staging tensor; floats and halves of seeds are words, too. `Layout` says which words
are which, and is the same for every step of one bucket, so the views that a recorded step reads never move:

    token fields   num_tokens words each: ids, carried, positions, KV slots
    seq fields     num_seqs words each: table row, length, last token, draw parameters; and num_seqs + 1 words of cu_seqlens

Behind them stand the changed entries of the block tables (place, block), which live on the device by row slot: a table is sent
once, and then its changes. The row behind the last one is the padding's: all its entries are block 0.

Laws
  - A staging or result buffer is used again only when its copy is over: there are three of each, at most two steps in flight.
  - All copies and steps are in one stream, so what a step reads on the device is not overwritten before it has read it.

Worker's main thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmserve.worker.batch import F4, I4, Batch
from shmserve.worker.cuda.link import Link, Mark, Passed
from shmserve.worker.sampling_state import SamplingState

NUM_SLOTS = 3
ALIGN_WORDS = 4  # 16 bytes: what kernels load at once

TOKEN_FIELDS = ("token_ids", "carried", "positions", "kv_slots")
SEQ_FIELDS: tuple[str, ...] = ("table_rows", "kv_lens", "last_tokens", "draw_positions")
SEQ_FIELDS += ("temperature", "min_p", "top_k", "top_p", "seeds", "cu_seqlens")
FLOAT_FIELDS = ("temperature", "min_p", "top_p")
NUM_RESULTS = (
    3  # words of a sampled row: its id, the bits of its logprob, whether its logits were not finite
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the fields of a step with so many token rows and sequence rows begin, in words."""

    num_tokens: int
    num_seqs: int
    starts: dict[str, int]
    num_words: int

    @classmethod
    def of(cls, num_tokens: int, num_seqs: int) -> Layout:
        starts, at = {}, 0
        for name in TOKEN_FIELDS + SEQ_FIELDS:
            starts[name] = at
            size = _size(name, num_tokens, num_seqs)
            at += -(-size // ALIGN_WORDS) * ALIGN_WORDS
        return cls(num_tokens, num_seqs, starts, at)

    def place(self, name: str) -> slice:
        size = _size(name, self.num_tokens, self.num_seqs)
        return slice(self.starts[name], self.starts[name] + size)


def _size(name: str, num_tokens: int, num_seqs: int) -> int:
    if name in TOKEN_FIELDS:
        return num_tokens
    return {"cu_seqlens": num_seqs + 1, "seeds": 2 * num_seqs}.get(name, num_seqs)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step's fields on the device, int32 but for the floats and the 64-bit seeds; views of one tensor. `block_tables` are all rows' tables."""

    token_ids: Tensor
    carried: Tensor
    positions: Tensor
    kv_slots: Tensor
    table_rows: Tensor
    kv_lens: Tensor
    last_tokens: Tensor
    draw_positions: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    cu_seqlens: Tensor
    block_tables: Tensor


class StepBuffers:
    """Made once, for at most `max_num_tokens` token rows and `max_num_seqs` sequences in a step, padding included.

    `num_rows` row slots have a block table of `max_blocks` entries each.
    """

    def __init__(
        self,
        link: Link,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        num_rows: int,
        max_blocks: int,
    ) -> None:
        self.link = link
        self.max_num_seqs = max_num_seqs
        self._padding_row = num_rows
        # Every sequence of a step may be new to the device, each with a whole table; as a rule there are a few entries.
        self._num_words = Layout.of(max_num_tokens, max_num_seqs).num_words
        num_changes = max_num_seqs * max_blocks
        self._host = [link.host_words(self._num_words + 2 * num_changes) for _ in range(NUM_SLOTS)]
        self._sent: list[Mark] = [Passed() for _ in range(NUM_SLOTS)]
        self._turn = 0
        device = link.device
        self.words = torch.zeros(
            self._num_words + 2 * num_changes, dtype=torch.int32, device=device
        )
        self.tables = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self._known: I4 = np.zeros((num_rows + 1, max_blocks), np.int32)  # what the device has
        self._newest_table: I4 | None = None  # all of it is known
        # Sampled ids and the bits of their logprobs; the next step reads the ids of carried rows here.
        self.results = torch.zeros((NUM_RESULTS, max_num_seqs), dtype=torch.int32, device=device)
        self._landed = [link.host_words(NUM_RESULTS * max_num_seqs) for _ in range(NUM_SLOTS)]
        self._landing = 0
        self._inputs: dict[tuple[int, int], Inputs] = {}

    @property
    def sampled_ids(self) -> Tensor:
        return self.results[0]

    @property
    def sampled_logprobs(self) -> Tensor:
        return self.results[1].view(torch.float32)

    @property
    def failures(self) -> Tensor:
        return self.results[2]

    def inputs(self, num_tokens: int, num_seqs: int) -> Inputs:
        """Where a step of this size reads its fields. The same views every time."""
        key = (num_tokens, num_seqs)
        found = self._inputs.get(key)
        if found is None:
            layout = Layout.of(num_tokens, num_seqs)
            views = {name: self.words[layout.place(name)] for name in TOKEN_FIELDS + SEQ_FIELDS}
            views |= {name: views[name].view(torch.float32) for name in FLOAT_FIELDS}
            views["seeds"] = views["seeds"].view(torch.int64)
            found = Inputs(**views, block_tables=self.tables)
            if num_tokens == num_seqs:  # those that steps are recorded with
                self._inputs[key] = found
        return found

    def send(
        self, batch: Batch, sampling: SamplingState, carried: I4 | None, bucket: int | None
    ) -> Inputs:
        """Put the numbers of `batch` into the stream, padded to `bucket` rows if that is not None."""
        num_tokens, num_seqs = bucket or batch.num_tokens, bucket or batch.num_seqs
        layout = Layout.of(num_tokens, num_seqs)
        slot, self._turn = self._turn, (self._turn + 1) % NUM_SLOTS
        self._sent[slot].wait()
        host = self._host[slot]
        words: I4 = host.numpy()
        self._write(words, layout, batch, sampling, carried)
        num_changes = self._write_changes(words[layout.num_words :], batch)
        end = layout.num_words + 2 * num_changes
        self.link.copy(self.words[:end], host[:end])
        self._sent[slot] = self.link.mark()
        if num_changes:
            places = self.words[layout.num_words : layout.num_words + num_changes]
            blocks = self.words[layout.num_words + num_changes : end]
            self.tables.view(-1).index_copy_(0, places.long(), blocks)
        return self.inputs(num_tokens, num_seqs)

    def _write(
        self,
        words: I4,
        layout: Layout,
        batch: Batch,
        sampling: SamplingState,
        carried: I4 | None,
    ) -> None:
        def put(name: str, values: npt.NDArray[np.generic] | int, padding: int = 0) -> None:
            field = words[layout.place(name)]
            count = values.shape[0] if isinstance(values, np.ndarray) else field.shape[0]
            field[:count] = values
            field[count:] = padding

        put("token_ids", batch.token_ids)
        put("carried", -1)
        put("positions", batch.positions)
        put("kv_slots", batch.kv_slots)
        put("table_rows", batch.rows, self._padding_row)
        put("kv_lens", batch.kv_lens)
        put("cu_seqlens", batch.cu_seqlens)
        cu = words[layout.place("cu_seqlens")]
        cu[batch.num_seqs :] = batch.num_tokens
        if layout.num_tokens != batch.num_tokens:
            cu[:] = np.arange(layout.num_seqs + 1)
        rows = batch.rows[batch.sample_seqs]
        put("last_tokens", batch.cu_seqlens[1:][batch.sample_seqs] - 1)
        if batch.is_decode:
            last = words[layout.place("last_tokens")]
            last[:] = np.arange(layout.num_seqs)
        positions = sampling.position[rows]
        if carried is not None:
            # Whoever carries a token computes no other: its row is where its sequence begins.
            words[layout.place("carried")][batch.cu_seqlens[:-1]] = carried
            # The token that it carries has not been counted yet.
            positions = positions + (carried[batch.sample_seqs] >= 0)
        put("draw_positions", positions)
        temperature = np.where(sampling.is_greedy(rows), np.float32(0), sampling.temperature[rows])
        put("temperature", temperature.view(np.int32))
        put("min_p", sampling.min_p[rows].view(np.int32))
        put("top_k", sampling.top_k[rows])
        put("top_p", sampling.top_p[rows].view(np.int32))
        put("seeds", sampling.seed[rows].view(np.int32))

    def _write_changes(self, words: I4, batch: Batch) -> int:
        """Entries of the tables that the device does not have yet: places, then blocks."""
        if batch.block_table is self._newest_table:
            return 0  # of the same rows: as long as no table changes, a decode set has the same array in all its steps
        self._newest_table = batch.block_table
        width = batch.block_table.shape[1]
        index, column = np.nonzero(self._known[batch.rows, :width] != batch.block_table)
        count = index.shape[0]
        if count:
            rows, blocks = batch.rows[index], batch.block_table[index, column]
            self._known[rows, column] = blocks
            words[:count] = rows * self._known.shape[1] + column
            words[count : 2 * count] = blocks
        return int(count)

    def fetch(self, num_results: int) -> Landing:
        """Put the copy of the step's results to the host into the stream."""
        host = self._landed[self._landing]
        self._landing = (self._landing + 1) % NUM_SLOTS
        # One copy: the ids of the bucket's rows and, one row further, the bits of their logprobs.
        self.link.copy(host, self.results.view(-1))
        return Landing(host, self.max_num_seqs, num_results, self.link.mark())


@dataclass(frozen=True, slots=True)
class Landing:
    """Results on their way to the host; good until three more steps were fetched."""

    words: Tensor
    stride: int
    num_results: int
    mark: Mark

    def wait(self) -> tuple[I4, F4, I4]:
        """Ids, logprobs and failures (1 where the logits were not finite) of the sampled rows, copied out."""
        self.mark.wait()
        words: I4 = self.words.numpy().reshape(NUM_RESULTS, self.stride)
        ids, bits, failures = words[:, : self.num_results].copy()
        return ids, bits.view(np.float32), failures
