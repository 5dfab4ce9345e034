"""Batches put together by hand, as a scheduler would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import Batch, PromptPart

Part = tuple[Sequence[int] | npt.NDArray[np.int32], int, Sequence[int]]
"""Tokens that a sequence computes, the position of the first, and the sequence's blocks."""


def batch_of(
    *parts: Part,
    block_size: int = 16,
    rows: Sequence[int] | None = None,
    samples: bool | Sequence[bool] = True,
    prompt_parts: tuple[PromptPart, ...] = (),
) -> Batch:
    """A ragged batch. Without `rows` the sequences have row slots 0, 1, ..."""
    counts = np.array([len(tokens) for tokens, _, _ in parts])
    starts = np.array([start for _, start, _ in parts])
    table = np.zeros((len(parts), max(len(blocks) for _, _, blocks in parts)), np.int32)
    for index, (_, _, blocks) in enumerate(parts):
        table[index, : len(blocks)] = blocks
    owner = np.repeat(np.arange(len(parts)), counts)
    cu = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(cu[-1]) - cu[owner] + starts[owner]
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    sampling = np.broadcast_to(samples, len(parts))
    return Batch(
        step=0,
        rows=np.array(range(len(parts)) if rows is None else rows, np.int32),
        token_ids=np.concatenate([tokens for tokens, _, _ in parts]).astype(np.int32),
        positions=positions.astype(np.int32),
        kv_slots=slots.astype(np.int32),
        cu_seqlens=cu.astype(np.int32),
        block_table=table,
        kv_lens=(starts + counts).astype(np.int32),
        sample_seqs=np.flatnonzero(sampling).astype(np.int32),
        is_decode=bool((counts == 1).all() and sampling.all()),
        prompt_parts=prompt_parts,
    )
