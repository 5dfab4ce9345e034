"""Attention over a paged KV cache with torch's own operators: right on any device, and the reference for faster kernels.

Owns: `KVCache`, and the plan by which one ragged batch attends. Never: rotates, projects, or knows which layer kinds exist.

Law: a masked position never changes a result. A mask alone cannot promise that, since 0 * NaN is NaN: so a block is cleared
when its first position is written, and what an earlier owner left in it never meets a later one. Block 0 is never written and
stays zero; block tables are padded with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shmserve.worker.batch import I4, Batch

PREFILL_TILE_ROWS = 256
"""Query rows of one prefill call: it bounds the mask, and rows of a tile never read keys that come after the tile."""


class KVCache:
    """Keys and values of all layers, [num_layers, num_blocks, block_size, num_kv_heads, head_dim] each.

    `value_dim` is the head size of the values where it is not that of the keys.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads)
        self.block_size = block_size
        self.keys = torch.zeros((*shape, head_dim))
        self.values = torch.zeros((*shape, value_dim or head_dim))

    def clear_opened(self, kv_slots: I4) -> None:
        """Zero the blocks whose first position is among `kv_slots`."""
        opened = kv_slots[kv_slots % self.block_size == 0] // self.block_size
        if opened.size:
            blocks = torch.from_numpy(opened).long()
            self.keys.index_fill_(1, blocks, 0.0)
            self.values.index_fill_(1, blocks, 0.0)

    def write(self, layer: int, kv_slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, kv_slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, kv_slots, values)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length, one query row each: `mask` is [n, 1, 1, keys], additive."""

    rows: Tensor
    num_seqs: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _PrefillTile:
    """Rows [start, end) of the batch, all of one sequence: `mask` is [end - start, keys], additive."""

    start: int
    end: int
    blocks: Tensor
    mask: Tensor


class AttentionPlan:
    """How the rows of one batch attend under one window: built once a step, used by every layer with that window."""

    def __init__(self, batch: Batch, block_size: int, window: int | None) -> None:
        self._groups: list[_DecodeGroup] = []
        self._tiles: list[_PrefillTile] = []
        lengths = np.diff(batch.cu_seqlens)
        self._add_groups(batch, np.flatnonzero(lengths == 1).astype(np.int32), block_size, window)
        for seq in np.flatnonzero(lengths > 1).tolist():
            self._add_tiles(batch, seq, block_size, window)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, heads, head_dim] attended over one layer's pages; the step's own keys and values are already in them.

        Scores are multiplied by `scale` (None: head_dim ** -0.5), then bent below `softcap`; `sinks` [heads] are scores that take
        their share of each row and give nothing.
        """
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = keys.shape[2]
        out = query.new_empty((query.shape[0], num_heads, values.shape[3]))
        # Heads that share a kv head become rows of one attention call, so keys are never repeated.
        shared = query.view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        for group in self._groups:
            shape = (group.num_seqs, -1, num_kv_heads)
            k = keys.index_select(0, group.blocks).view(*shape, head_dim).transpose(1, 2)
            v = values.index_select(0, group.blocks).view(*shape, values.shape[3]).transpose(1, 2)
            attended = _attend(shared[group.rows], k, v, group.mask, scale, softcap, sinks)
            out[group.rows] = attended.flatten(1, 2)
        sinks = None if sinks is None else sinks.unsqueeze(-1)
        for tile in self._tiles:
            q = shared[tile.start : tile.end].permute(1, 2, 0, 3)
            size = (-1, q.shape[1], -1, -1)
            k = keys.index_select(0, tile.blocks).flatten(0, 1).transpose(0, 1)
            v = values.index_select(0, tile.blocks).flatten(0, 1).transpose(0, 1)
            k, v = k.unsqueeze(1).expand(size), v.unsqueeze(1).expand(size)
            attended = _attend(q, k, v, tile.mask, scale, softcap, sinks)
            out[tile.start : tile.end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def _add_groups(self, batch: Batch, seqs: I4, block_size: int, window: int | None) -> None:
        """Lengths within a factor of two share a group: padding at most doubles the pages read."""
        ends = batch.kv_lens[seqs]
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_blocks = firsts // block_size
        num_blocks = -(-ends // block_size) - first_blocks
        size_class = np.ceil(np.log2(num_blocks))
        for value in np.unique(size_class):
            members = np.flatnonzero(size_class == value)
            width = int(num_blocks[members].max())
            columns = first_blocks[members, None] + np.arange(width)
            is_used = np.arange(width) < num_blocks[members, None]
            columns = np.where(is_used, columns, 0)
            table = np.where(is_used, batch.block_table[seqs[members, None], columns], 0)
            positions = first_blocks[members, None] * block_size + np.arange(width * block_size)
            is_seen = (positions >= firsts[members, None]) & (positions < ends[members, None])
            self._groups.append(
                _DecodeGroup(
                    rows=torch.from_numpy(batch.cu_seqlens[seqs[members]]).long(),
                    num_seqs=len(members),
                    blocks=torch.from_numpy(table.reshape(-1)),
                    mask=_additive(is_seen)[:, None, None, :],
                )
            )

    def _add_tiles(self, batch: Batch, seq: int, block_size: int, window: int | None) -> None:
        start, end = (int(value) for value in batch.cu_seqlens[seq : seq + 2])
        for first in range(start, end, PREFILL_TILE_ROWS):
            last = min(first + PREFILL_TILE_ROWS, end)
            rows = batch.positions[first:last, None]
            oldest = 0 if window is None else max(int(rows[0, 0]) - window + 1, 0)
            first_block, end_block = oldest // block_size, int(rows[-1, 0]) // block_size + 1
            positions = np.arange(first_block * block_size, end_block * block_size)
            is_seen = positions <= rows
            if window is not None:
                is_seen &= positions > rows - window
            blocks = np.ascontiguousarray(batch.block_table[seq, first_block:end_block])
            self._tiles.append(
                _PrefillTile(first, last, torch.from_numpy(blocks), _additive(is_seen))
            )


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """torch's fused operator where it knows how; else the scores themselves. `sinks` is one column of scores."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1) @ values
    column = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values


def _additive(is_seen: np.ndarray) -> Tensor:
    return torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf)))
