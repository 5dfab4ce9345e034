"""Verifying guesses: which rows of a step are sampled, and which of their tokens are kept.

Owns: the rule by which a guess is accepted. Never: makes one (speculation.py does), or samples (the runner does).

A sequence that guesses computes its last known token and its guesses, one row each. Every row is sampled as plain decoding
would sample it at that place: with the sequence's parameters, and the random number of that position. The token of a row is kept
as long as every row before it gave the token that was guessed there, since so long each row has seen what plain decoding would
have shown it.

Law: the tokens kept, and their logprobs, are those of plain decoding, greedy or drawn, as far as a row's logits do not depend on
the number of rows computed with it. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import F4, I4, Batch

Top = dict[int, tuple[I4, F4]]


@dataclass(slots=True)
class Places:
    """The Q places of a step that are sampled: for each of R sequences one, and one more for each of its guesses.

    token_rows  i4[Q]  which of the T tokens' logits
    rows        i4[Q]  row slot of the sequence, the key into SamplingState
    owners      i4[Q]  index into R
    ahead       i4[Q]  how many guesses stand between the last known token and this place; None: nobody guesses, and Q = R
    """

    token_rows: I4
    rows: I4
    owners: I4
    ahead: I4 | None


@dataclass(slots=True)
class Kept:
    """As in StepOutput, which says what each is."""

    token_ids: I4
    counts: I4 | None
    logprobs: F4 | None
    top: Top | None
    failed: tuple[int, ...]


def places_of(batch: Batch) -> Places:
    if batch.is_decode and len(batch.sample_seqs) == batch.num_seqs:  # and none guesses
        return Places(batch.sample_seqs, batch.rows, batch.sample_seqs, None)
    rows = batch.rows[batch.sample_seqs]
    last = batch.cu_seqlens[1:][batch.sample_seqs] - 1
    owners = np.arange(len(rows), dtype=np.int32)
    if batch.num_drafts is None:
        return Places(last, rows, owners, None)
    counts = 1 + batch.num_drafts
    owners = np.repeat(owners, counts)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    ahead = np.arange(len(owners), dtype=np.int32) - starts[owners]
    return Places((last - batch.num_drafts)[owners] + ahead, rows[owners], owners, ahead)


def kept_of(
    batch: Batch, places: Places, token_ids: I4, logprobs: F4 | None = None, top: Top | None = None
) -> Kept:
    """What is kept of the tokens i4[Q] sampled at `places`, -1 where there is none, with their logprobs f4[Q], and the most
    likely (ids i4[N], logprobs f4[N]) by place.

    A sequence fails only if its first place has no token: one further on will be its first, and fail, in the next step.
    """
    ahead = places.ahead
    if ahead is None:  # nobody guesses: each place is its sequence's only one
        has_none = token_ids < 0
        failed = tuple(has_none.nonzero()[0].tolist()) if np.count_nonzero(has_none) else ()
        return Kept(
            (np.maximum(token_ids, 0) if failed else token_ids.copy())[:, None],
            None,
            None if logprobs is None else logprobs[:, None],
            {at: (ids[None], values[None]) for at, (ids, values) in top.items()} if top else None,
            failed,
        )
    counts = _counts(batch, places, ahead, token_ids)
    num_rows, width = len(batch.sample_seqs), int(counts.max(initial=1))
    wide = ahead < width
    where = (places.owners[wide], ahead[wide])
    tokens = np.zeros((num_rows, width), np.int32)
    tokens[where] = np.maximum(token_ids[wide], 0)
    kept_logprobs = None
    if logprobs is not None:
        kept_logprobs = np.full((num_rows, width), np.nan, np.float32)
        kept_logprobs[where] = logprobs[wide]
    first = np.flatnonzero(ahead == 0)
    kept_top: Top = {}
    for owner, place in enumerate(first.tolist() if top else ()):
        assert top is not None
        if place in top:
            parts = [top[at] for at in range(place, place + int(counts[owner]))]
            kept_top[owner] = (np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts]))
    return Kept(
        tokens,
        counts,
        kept_logprobs,
        kept_top or None,
        tuple(np.flatnonzero(token_ids[first] < 0).tolist()),
    )


def _counts(batch: Batch, places: Places, ahead: I4, token_ids: npt.NDArray[np.int32]) -> I4:
    """How many tokens each sequence keeps, at least 1."""
    assert batch.num_drafts is not None
    most = int(batch.num_drafts.max(initial=0))
    is_right = np.zeros((len(batch.num_drafts), most + 1), np.bool_)
    checked = np.flatnonzero(ahead < batch.num_drafts[places.owners])
    guesses = batch.token_ids[places.token_rows[checked] + 1]
    is_right[places.owners[checked], ahead[checked]] = token_ids[checked] == guesses
    counts: I4 = 1 + np.cumprod(is_right, axis=1, dtype=np.int32).sum(axis=1, dtype=np.int32)
    # Where the last one has no token, those before it stand.
    ends = np.flatnonzero(ahead == 0) + counts - 1
    counts -= (counts > 1) & (token_ids[ends] < 0)
    return counts
