"""One token for each row of logits, as each row's own parameters and random stream say.

Owns: the order of the steps (logit_bias, penalties, min_tokens, temperature, min-p, top-k, top-p, draw) and raw logprobs.
Never: keeps state between calls, or uses a global random generator.

Laws
  - A draw is a function of the row's logits, its parameters, its seed and its position: neither of its batch, nor of its
    place in it, nor of how often it was preempted: every random number is keyed by (seed, position, token id).
  - Candidates are ordered by logit, then by lower id; greedy is the first of that order.
  - logprobs come from the log-softmax of the model's own logits, before bias and temperature.

A row that keeps no more than HEAD tokens gives each of them its own random number; limited rows (top-k, top-p or min-p) nearly
always do, and one partial sort finds them. Rows that keep more, and rows without limits (however few tokens their edits leave),
are drawn in two steps, each a Gumbel-max: a bucket of BUCKET neighbouring ids by its summed weight, then an id in it. The
distribution is the same for a hundredth of the random numbers.

This is the definition, for torch's own runner and the tests; the C kernels (cpu/sampling.h) and the CUDA kernels (cuda/sampling.py) draw
by the same rules, with the same random words. They round sums and logarithms differently, and on another kind of hardware the logits
themselves are others in their last bits: so a seed is a promise for one server and model, and beyond that a good chance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmserve.worker.batch import F4, I4
from shmserve.worker.philox import DOMAIN_BUCKET, gumbels
from shmserve.worker.sampling_state import SamplingState

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

HEAD = 256
BUCKET = 256


class Sample(NamedTuple):
    """What `sample` gives for R rows; a failed row's token means nothing, and a logprob nobody asked for is NaN."""

    token_ids: I4
    logprobs: F4 | None
    top: dict[int, tuple[I4, F4]] | None
    failed: tuple[int, ...]


def score(logits: Tensor, token_ids: I4, num_top: int) -> tuple[F4, I4, F4]:
    """Logprobs f4[R] of the token that stands for each row of `logits`, NaN where a logit is not finite; and the `num_top` most
    likely of each, ids i4[R, N] and logprobs f4[R, N]."""
    num_rows, num_top = logits.shape[0], min(num_top, logits.shape[1])
    ids = np.zeros((num_rows, num_top), np.int32)
    values = np.full((num_rows, num_top), np.nan, np.float32)
    finite = np.flatnonzero(~_not_finite(logits))
    wanted = np.full(num_rows, num_top, np.int32)
    logprobs, top = _logprobs(logits, finite, token_ids, wanted)
    for index, (row_ids, row_values) in (top or {}).items():
        ids[index], values[index] = row_ids, row_values
    return logprobs, ids, values


def sample(logits: Tensor, rows: I4, state: SamplingState) -> Sample:
    """A token for each row of `logits` f32[R, V], which is overwritten; `rows` i4[R] are the row slots in `state`.

    `failed` names the rows that have no token: a logit was not finite, or nothing was left to choose from.
    """
    failed = _not_finite(logits)
    is_asked = (state.num_logprobs[rows] >= 0) & ~failed
    raw = logits.clone() if state.has_edits and is_asked.any() else logits
    if state.has_edits:
        failed |= _edit(logits, rows, state)
    is_greedy = state.is_greedy(rows)
    token_ids = np.zeros(rows.shape[0], np.int32)
    if is_greedy.all():
        token_ids[:] = logits.argmax(-1).numpy()
    else:
        greedy, drawn = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy & ~failed)
        token_ids[greedy] = logits[torch.from_numpy(greedy)].argmax(-1).numpy()
        if drawn.size:
            some = logits if drawn.size == rows.size else logits[torch.from_numpy(drawn)]
            with np.errstate(divide="ignore", over="ignore"):  # log 0: a token not kept
                token_ids[drawn] = _draw(some, rows[drawn], state)
    failed_rows = tuple(np.flatnonzero(failed).tolist())
    asked = np.flatnonzero(is_asked & ~failed)
    if not asked.size:
        return Sample(token_ids, None, None, failed_rows)
    logprobs, top = _logprobs(raw, asked, token_ids, state.num_logprobs[rows])
    return Sample(token_ids, logprobs, top, failed_rows)


def _not_finite(logits: Tensor) -> Bool:
    # A sum that is finite has only finite terms, at a thirtieth of the price of looking at each of them.
    suspects = ~np.isfinite(logits.sum(-1).numpy())
    for index in np.flatnonzero(suspects).tolist():
        suspects[index] = not bool(torch.isfinite(logits[index]).all())
    result: Bool = suspects
    return result


def _edit(logits: Tensor, rows: I4, state: SamplingState) -> Bool:
    """Apply logit_bias, penalties and masks, in this order; true where no finite maximum is left."""
    values: F4 = logits.numpy()
    is_dead = np.zeros(rows.shape[0], np.bool_)
    for index in np.flatnonzero(state.is_edited(rows)).tolist():
        row = int(rows[index])
        bias, seen, banned = state.bias.get(row), state.seen(row), state.bans(row)
        mask = state.mask(row)
        if bias is not None:
            values[index, bias[0]] += bias[1]
        if seen is not None:
            values[index, seen[0]] = _penalised(values[index, seen[0]], seen[1], row, state)
        if banned is not None:
            values[index, banned] = -np.inf
        if mask is not None:
            is_allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            values[index, is_allowed[: values.shape[1]] == 0] = -np.inf
        is_dead[index] = not np.isfinite(values[index].max())
    return is_dead


def _penalised(values: F4, counts: I4, row: int, state: SamplingState) -> F4:
    """Logits of tokens that were seen: made less likely by `repetition`, and by how often they were generated."""
    repetition = state.repetition_penalty[row]
    with np.errstate(over="ignore"):
        values = np.where(values > 0, values / repetition, values * repetition)
        loss = state.frequency_penalty[row] * counts.astype(np.float32)
        return np.where(counts > 0, values - loss - state.presence_penalty[row], values)


def _draw(logits: Tensor, rows: I4, state: SamplingState) -> I4:
    """Gumbel-max over the kept candidates of n rows, none of them greedy."""
    top_k, top_p, min_p = state.top_k[rows], state.top_p[rows], state.min_p[rows]
    tokens = np.zeros(rows.shape[0], np.int32)
    is_open = (top_k == 0) & (top_p >= 1) & (min_p <= 0)
    is_wide = is_open.copy()
    limited = np.flatnonzero(~is_open)
    if limited.size:
        some = logits[torch.from_numpy(limited)]
        tokens[limited], is_wide[limited] = _draw_from_head(some, rows[limited], state)
    wide = np.flatnonzero(is_wide)
    if wide.size:
        weights = np.zeros((wide.size, -(-logits.shape[1] // BUCKET) * BUCKET), np.float32)
        for place, index in enumerate(wide.tolist()):
            row: F4 = logits[index].numpy()
            temperature = state.temperature[rows[index]]
            kept: I8 | slice = slice(0, row.size)
            if not is_open[index]:
                kept = _kept_of_row(row, temperature, top_k[index], top_p[index], min_p[index])
                if kept.size <= HEAD:
                    tokens[index] = _draw_each(row, kept, int(rows[index]), state)
                    is_wide[index] = False
                    continue
            weights[place, kept] = np.exp((row[kept] - row.max()) / temperature)
        is_left = is_wide[wide]
        if is_left.any():
            tokens[wide[is_left]] = _draw_by_buckets(weights[is_left], rows[wide[is_left]], state)
    return tokens


def _draw_each(logits: F4, kept: I8, row: int, state: SamplingState) -> int:
    """A draw among the ids `kept` of one row, each with its own random number."""
    log_weights = (logits[kept] - np.float64(logits.max())) / np.float64(state.temperature[row])
    position = state.position[row, None].astype(np.uint64)
    noise = gumbels(state.seed[row, None], position, kept.astype(np.uint64))
    return int(kept[(log_weights + noise).argmax()])


def _draw_from_head(logits: Tensor, rows: I4, state: SamplingState) -> tuple[I4, Bool]:
    """Tokens of n rows, and which rows have none because the head does not settle what they keep."""
    vocab_size = logits.shape[1]
    top_k, top_p = state.top_k[rows], state.top_p[rows]
    temperature = state.temperature[rows].astype(np.float64)
    top_values, top_ids = logits.topk(min(HEAD, vocab_size), dim=-1)
    values, ids = top_values.numpy(), top_ids.numpy()
    order = np.lexsort((ids, -values), axis=-1)
    values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
    log_weights = (values - values[:, :1].astype(np.float64)) / temperature[:, None]
    weights, before = _weights(log_weights)

    counts = (log_weights >= _least_log(state.min_p[rows])[:, None]).sum(1)
    counts = np.where(top_k > 0, np.minimum(counts, top_k), counts)
    # Tokens as likely as the head's last may lie outside it, so only those before them are known to come first.
    num_sure = (values > values[:, -1:]).sum(1) if vocab_size > HEAD else np.full(len(rows), HEAD)
    is_settled = counts <= num_sure
    totals = np.take_along_axis(before + weights, counts[:, None] - 1, 1)[:, 0]
    for index in np.flatnonzero(~is_settled & (top_k == 0) & (state.min_p[rows] <= 0)).tolist():
        row: F4 = logits[index].numpy()
        totals[index] = np.exp((row - row.max()) / np.float32(temperature[index])).sum(
            dtype=np.float64
        )
        needed = top_p[index] * totals[index]
        is_settled[index] = num_sure[index] > 0 and before[index, num_sure[index]] >= needed
    nucleus = np.maximum((before < (top_p * totals)[:, None]).sum(1), 1)
    counts = np.where(top_p < 1, np.minimum(counts, nucleus), counts)

    is_kept = (np.arange(ids.shape[1]) < counts[:, None]) & is_settled[:, None]
    owner = rows[np.nonzero(is_kept)[0]]
    noise = gumbels(
        state.seed[owner], state.position[owner].astype(np.uint64), ids[is_kept].astype(np.uint64)
    )
    keys = np.full(ids.shape, -np.inf)
    keys[is_kept] = log_weights[is_kept] + noise
    tokens = ids[np.arange(len(rows)), keys.argmax(1)]
    return tokens.astype(np.int32), ~is_settled


def _least_log(min_p: F4) -> F8:
    """The least log-weight that min-p leaves."""
    result: F8 = np.log(np.minimum(min_p, 1), dtype=np.float64)
    return result


def _weights(log_weights: F8) -> tuple[F8, F8]:
    """The weight of each ordered candidate, and of all before it."""
    weights = np.exp(log_weights)
    before = np.zeros_like(weights)
    np.cumsum(weights[..., :-1], axis=-1, out=before[..., 1:])
    return weights, before


def _kept_of_row(row: F4, temperature: np.float32, top_k: int, top_p: float, min_p: float) -> I8:
    """All ids that one row keeps, most likely first."""
    log_weights = (row - np.float64(row.max())) / temperature
    is_candidate = log_weights >= (np.log(np.float64(min(min_p, 1))) if min_p > 0 else -np.inf)
    is_candidate &= row > -np.inf
    if 0 < top_k < row.size:
        is_candidate &= row >= np.partition(row, -top_k)[-top_k]
    total: float | None = None
    if top_p < 1 and top_k == 0:
        # What is less likely than this weighs less than 1 - top_p altogether: it need not be sorted to be left out.
        weights = np.exp(log_weights) * is_candidate
        total = weights.sum()
        is_candidate &= weights >= (1 - top_p) * total / row.size
    ids = np.flatnonzero(is_candidate)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        kept_weights, before = _weights(log_weights[ids])
        total = kept_weights.sum() if total is None else total
        ids = ids[: max(1, int((before < top_p * total).sum()))]
    return ids


def _draw_by_buckets(weights: F4, rows: I4, state: SamplingState) -> I4:
    """Draw from n rows of weights over the whole vocabulary: first a bucket of neighbouring ids, then an id in it."""
    seeds, positions = state.seed[rows, None], state.position[rows, None].astype(np.uint64)
    n, num_buckets = weights.shape[0], weights.shape[1] // BUCKET
    by_bucket = weights.reshape(n, num_buckets, BUCKET)
    buckets = np.arange(num_buckets, dtype=np.uint64)
    masses = np.log(by_bucket.sum(2), dtype=np.float64)
    chosen = (masses + gumbels(seeds, positions, buckets, DOMAIN_BUCKET)).argmax(1)
    ids = chosen[:, None] * BUCKET + np.arange(BUCKET)
    inside = np.log(by_bucket[np.arange(n), chosen], dtype=np.float64)
    best = (inside + gumbels(seeds, positions, ids.astype(np.uint64))).argmax(1)
    tokens: I4 = (chosen * BUCKET + best).astype(np.int32)
    return tokens


def _logprobs(
    raw: Tensor, asked: I8, token_ids: I4, num_logprobs: I4
) -> tuple[F4, dict[int, tuple[I4, F4]] | None]:
    """Of the chosen token, and of the most likely ones where more than 0 were asked for."""
    logprobs = np.full(token_ids.shape[0], np.nan, np.float32)
    log_sums = torch.logsumexp(raw[torch.from_numpy(asked)], -1).numpy()
    values: F4 = raw.numpy()
    logprobs[asked] = values[asked, token_ids[asked]] - log_sums
    top: dict[int, tuple[I4, F4]] = {}
    for index, log_sum in zip(asked.tolist(), log_sums, strict=True):
        num_top = min(int(num_logprobs[index]), raw.shape[1])
        if num_top > 0:
            row = values[index]
            least = float(raw[index].topk(num_top).values[-1])
            ids = np.flatnonzero(row >= least)  # all ties with the last, so that the lower ids win
            ids = ids[np.lexsort((ids, -row[ids]))[:num_top]]
            top[index] = (ids.astype(np.int32), row[ids] - log_sum)
    return logprobs, top or None
