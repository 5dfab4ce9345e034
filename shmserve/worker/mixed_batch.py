"""Steps in which somebody computes more than one token: prompts in chunks, guesses, and rows that decode beside them.

Owns: the arrays of such a batch. Never: decides who computes what (the scheduler does; overlap.py where a step is in flight), or
changes a column. Rows that decode come first. Where their set has planned them (decode_set.py) their part is copied, not made again:
what a chunk costs the host then hardly depends on how many decode beside it. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace

import numpy as np

from shmserve.worker.batch import I4, Batch
from shmserve.worker.columns import Columns
from shmserve.worker.prompt_scores import prompt_parts
from shmserve.worker.sequence import Sequence

Chunks = list[tuple[Sequence, int]]
"""Who computes its prompt, or what was preempted of it, and how many tokens of it."""


def ragged_batch(
    step: int,
    decode_rows: I4,
    chunks: Chunks,
    columns: Columns,
    block_size: int,
    guesses: Mapping[int, Listing[int]] | None = None,
    firsts: I4 | None = None,
) -> Batch:
    """`decode_rows`, then `chunks`. Index i of the rows computes `guesses[i]` behind its token, too.

    `firsts` are the positions that the chunks begin at, where a step in flight computes what is before them; None: what the columns
    say. Prompts that are scored are then not among them.
    """
    num_decode = len(decode_rows)
    rows = decode_rows
    counts = np.ones(num_decode + len(chunks), np.int32)
    if chunks:
        rows = np.concatenate([rows, np.array([s.row for s, _ in chunks], np.int32)])
        counts[num_decode:] = [count for _, count in chunks]
    num_drafts: I4 | None = None
    if guesses:
        num_drafts = np.zeros(len(rows), np.int32)
        num_drafts[list(guesses)] = [len(guess) for guess in guesses.values()]
        counts += num_drafts
    computed = columns.num_computed[rows]
    if firsts is not None:
        computed[num_decode:] = firsts
    kv_lens = computed + counts
    table = columns.block_table[rows, : max(1, int(columns.num_blocks[rows].max()))]
    cu = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=cu[1:])
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(cu[-1], dtype=np.int32) - cu[owner] + computed[owner]
    token_ids = columns.token_ids[rows[owner], positions]
    for index, guess in (guesses or {}).items():
        token_ids[cu[index + 1] - len(guess) : cu[index + 1]] = guess
    num_known = kv_lens if num_drafts is None else kv_lens - num_drafts
    sample_seqs = np.flatnonzero(num_known == columns.num_tokens[rows]).astype(np.int32)
    return Batch(
        step=step,
        rows=rows,
        token_ids=token_ids,
        positions=positions,
        kv_slots=table[owner, positions // block_size] * block_size + positions % block_size,
        cu_seqlens=cu,
        block_table=table,
        kv_lens=kv_lens,
        sample_seqs=sample_seqs,
        is_decode=False,
        prompt_parts=() if firsts is not None else prompt_parts(columns, chunks, num_decode, cu),
        num_drafts=None if num_drafts is None else num_drafts[sample_seqs],
    )


def joined(decode: Batch, chunks: Batch) -> Batch:
    """A decode set's step and one of chunks alone as one; neither changes."""
    num_decode = decode.num_seqs
    parts = chunks.prompt_parts
    return Batch(
        step=decode.step,
        rows=np.concatenate((decode.rows, chunks.rows)),
        token_ids=np.concatenate((decode.token_ids, chunks.token_ids)),
        positions=np.concatenate((decode.positions, chunks.positions)),
        kv_slots=np.concatenate((decode.kv_slots, chunks.kv_slots)),
        cu_seqlens=np.concatenate((decode.cu_seqlens[:-1], chunks.cu_seqlens + num_decode)),
        block_table=_one_below_the_other(decode.block_table, chunks.block_table),
        kv_lens=np.concatenate((decode.kv_lens, chunks.kv_lens)),
        sample_seqs=np.concatenate((decode.sample_seqs, chunks.sample_seqs + num_decode)),
        is_decode=False,
        # One token stands in front of a chunk for each sequence in front of it.
        prompt_parts=tuple(
            replace(part, seq=part.seq + num_decode, first_row=part.first_row + num_decode)
            for part in parts
        ),
    )


def _one_below_the_other(upper: I4, lower: I4) -> I4:
    """Both tables, the narrower one filled up with block 0."""
    num_upper, width = upper.shape[0], max(upper.shape[1], lower.shape[1])
    table = np.zeros((num_upper + lower.shape[0], width), np.int32)
    table[:num_upper, : upper.shape[1]] = upper
    table[num_upper:, : lower.shape[1]] = lower
    return table
