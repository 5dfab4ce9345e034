"""What every GPU kernel computes, in plain torch: the contract, and the back end of last resort.

Owns: the meaning, the shapes and the dtypes of each operation. Never: is fast, or knows of requests. The kernels beside it are
tested against it; the runner runs on either (ops.py). Worker's main thread only.

Laws
  - Every operation writes into tensors that its caller owns and allocates nothing that outlives it, so that it can be
    recorded into a CUDA graph. Lengths and tables are read on the device: no value of them shapes a launch.
  - Arithmetic is float32 inside and rounds once, to the dtype of the output. T is float32 or bfloat16, one for a model.
  - A padding row does no harm: its KV length is 0, its KV slot lies in block 0, its output is finite and looked at by nobody.
  - `unit_offset` is Gemma's norm: it multiplies by 1 + weight.
  - All tensors are contiguous.

Names of sizes: T tokens, S sequences, B rows of a decode step, R sampled rows, V vocabulary, Q and KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shmserve.worker import philox, sampler

MAX_GEMV_ROWS = 8
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 32
SAMPLE_CHUNK = 4096
"""Token ids that one program of the sampling kernels looks at: whole buckets of sampler.py."""


def split_tokens(max_model_len: int) -> int:
    """Tokens of one split of decode attention: a power of two, fixed by the model's length and by nothing in a batch.

    A row is thus cut at the same places whatever its neighbours, and the partial results stay within MAX_SPLITS.
    """
    size = MIN_SPLIT_TOKENS
    while size * MAX_SPLITS < max_model_len:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Where the splits of decode attention leave their parts; one for all layers.

    partial  f32[B, Q, splits, D]  attended values of a split, normalised within it
    lse      f32[B, Q, splits]     log-sum-exp of its scores, base 2
    tokens   tokens of a split: splits * tokens is the longest context
    """

    partial: Tensor
    lse: Tensor
    tokens: int

    @classmethod
    def allocate(
        cls, max_rows: int, num_heads: int, head_dim: int, max_model_len: int, device: torch.device
    ) -> DecodeScratch:
        """For up to `max_rows` rows of contexts up to `max_model_len`."""
        tokens = split_tokens(max_model_len)
        splits = -(-max_model_len // tokens)
        shape = (max_rows, num_heads, splits)
        partial = torch.zeros((*shape, head_dim), dtype=torch.float32, device=device)
        return cls(partial, torch.zeros(shape, dtype=torch.float32, device=device), tokens)


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """Per row and chunk of SAMPLE_CHUNK ids, f32[R, chunks]: largest logit, sum of exp(logit - largest), best score of an id and of a
    bucket. i32[R, chunks]: that id, that bucket, and how many ids are kept. i32[R]: the last id that top-k and top-p leave, by the order
    of its logit and by itself, and whether a row has any limit."""

    largest: Tensor
    total: Tensor
    score: Tensor
    bucket_score: Tensor
    token_id: Tensor
    bucket_id: Tensor
    num_kept: Tensor
    last_key: Tensor
    last_id: Tensor
    limited: Tensor

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
        shape = (max_rows, -(-vocab_size // SAMPLE_CHUNK))

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        floats = [zeros(torch.float32) for _ in range(4)]
        ints = [zeros(torch.int32) for _ in range(3)]
        rows = [torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(3)]
        return cls(*floats, *ints, *rows)


def embed(
    ids: Tensor, source: Tensor, previous: Tensor, table: Tensor, out: Tensor, scale: float = 1.0
) -> None:
    """out[t] = scale * table[id of t]; with source[t] >= 0 the id is previous[source[t]], else ids[t].

    `previous` holds the ids that the step before sampled, still on the device: a step can be launched before its
    predecessor's tokens are known. Also gathers rows: table = hidden states, ids = row indices.

    ids, source i32[T]; previous i32[any >= 1]; table T[V, H]; out T[T, H]
    """
    taken = previous[source.clamp(min=0).long()]
    chosen = torch.where(source >= 0, taken, ids)
    out.copy_(table[chosen.long()].float() * scale)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """residual += x (rounded to T), then out = norm(residual) * weight. Without a residual: out = norm(x) * weight.

    x, residual, out T[T, H] (out may be x); weight T[H]
    """
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    out.copy_(_norm(x.float(), weight, eps, unit_offset))


def _norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled * (weight.float() + (1.0 if unit_offset else 0.0))


def rotary_write(
    qkv: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    unit_offset: bool = False,
) -> None:
    """Bias, norm of queries and keys, rotary embedding in half-split order; queries go to q_out, keys and values to the cache.

    qkv T[T, (Q + 2 KV) * D], in the order queries, keys, values; bias T[(Q + 2 KV) * D]; q_norm, k_norm T[D];
    cos, sin f32[positions, D / 2]; positions, kv_slots i32[T] (slot = block * block_size + offset);
    q_out T[T, Q, D]; k_cache, v_cache T[blocks, block_size, KV, D]
    """
    check_norms(q_norm, k_norm)
    num_q, num_kv, dim = q_out.shape[1], k_cache.shape[2], k_cache.shape[3]
    x = qkv.float()
    if bias is not None:
        x = x + bias.float()
    query, key, value = x.view(len(x), -1, dim).split((num_q, num_kv, num_kv), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = _norm(query, q_norm, eps, unit_offset), _norm(key, k_norm, eps, unit_offset)
    at = positions.long()
    c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
    q_out.copy_(_rotate(query, c, s))
    slots = kv_slots.long()
    k_cache.view(-1, num_kv, dim)[slots] = _rotate(key, c, s).to(k_cache.dtype)
    v_cache.view(-1, num_kv, dim)[slots] = value.to(v_cache.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """One query a row, at position kv_lens - 1, over the keys that its block table names. A row of length 0 gives zeros.

    window > 0: only the last `window` keys. softcap > 0: scores become softcap * tanh(score / softcap).

    q, out T[B, Q, D]; caches T[blocks, block_size, KV, D]; block_table i32[B, M]; kv_lens i32[B]; scratch for >= B rows
    """
    for row, length in enumerate(kv_lens.tolist()):
        at = (q[row : row + 1], k_cache, v_cache, block_table[row], length)
        out[row : row + 1] = _attend(*at, scale, window, softcap).to(out.dtype)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    out: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: int = 0,
) -> None:
    """Ragged chunks, each the last tokens of its sequence, causal over the cache (their own keys are in it already).

    Query i of sequence s is at position kv_lens[s] - (its query count) + i. `max_query_len` is the longest chunk or more.
    Sequences before number `first` are left out: what `out` holds for them stays.

    q, out T[T, Q, D]; caches as for decode; block_table i32[S, M]; cu_seqlens i32[S + 1]; kv_lens i32[S]
    """
    bounds = cu_seqlens.tolist()
    for s, length in list(enumerate(kv_lens.tolist()))[first:]:
        rows = slice(bounds[s], bounds[s + 1])
        attended = _attend(
            q[rows], k_cache, v_cache, block_table[s], length, scale, window, softcap
        )
        out[rows] = attended.to(out.dtype)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    length: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """f32[n, Q, D] for the last n positions of one sequence."""
    if length == 0 or len(q) == 0:
        return torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    block_size, num_kv = k_cache.shape[1:3]
    used = blocks[: -(-length // block_size)].long()
    group = q.shape[1] // num_kv
    keys = k_cache[used].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
    values = v_cache[used].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    key_at = torch.arange(length, device=q.device)
    query_at = torch.arange(length - len(q), length, device=q.device)[:, None]
    hidden = key_at > query_at
    if window > 0:
        hidden |= key_at <= query_at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def gated_mul(gate_up: Tensor, out: Tensor, gelu: bool = False) -> None:
    """out = silu(gate) * up, or Gemma's tanh form of gelu. gate_up T[T, 2 F], gates first; out T[T, F]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up)


def check_gemv_rows(num_rows: int) -> None:
    """ValueError for more than go through gemv; of the reference and of the kernel."""
    if num_rows > MAX_GEMV_ROWS:
        raise ValueError(f"{num_rows} rows, at most {MAX_GEMV_ROWS} go through gemv")


def check_norms(q_norm: Tensor | None, k_norm: Tensor | None) -> None:
    """ValueError for one of them alone; of the reference and of the kernel."""
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are both normed or neither")


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x @ weight.T (+ bias) for at most MAX_GEMV_ROWS rows, each row's sum in an order that M does not change.

    x T[M, K]; weight T[N, K]; bias T[N]; out T or f32 [M, N]
    """
    check_gemv_rows(len(x))
    w = weight.float()
    for row in range(len(x)):
        product = w @ x[row].float()
        out[row] = (product if bias is None else product + bias.float()).to(out.dtype)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out_ids: Tensor,
    out_logprobs: Tensor,
    failed: Tensor,
    scratch: SampleScratch,
) -> None:
    """One id a row, by the rule of sampler.py. Temperature 0: the largest logit, the lowest id of several. Else a draw, over ids of at
    least min_p times the likeliest one's probability, of them the top_k likeliest (0: all), of those the likeliest ones that together have
    top_p of their weight (1: all). Where a limit leaves HEAD ids or fewer: the largest of logit / temperature + Gumbel (philox.gumbels
    of seed, position, token id). Else the same among buckets of BUCKET neighbouring ids, by the sum of their weights and numbers of a
    domain of their own, and then among the ids of the one bucket.

    out_logprobs is the raw log-softmax of the id. A row with NaN, +inf or nothing above -inf: failed 1, id 0, logprob 0.

    logits T or f32[R, V]; temperatures, min_p, top_p f32[R]; top_k i32[R]; seeds i64[R] (the bits of a u64); positions i32[R];
    out_ids, failed i32[R]; out_logprobs f32[R]; scratch for >= R rows
    """
    for row, x in enumerate(logits.float()):
        largest = x.max()  # NaN if there is one
        failed[row] = int(not bool(torch.isfinite(largest)))
        if failed[row]:
            out_ids[row], out_logprobs[row] = 0, 0.0
            continue
        scores, temperature = x, float(temperatures[row])
        if temperature > 0:
            scores = (x - largest) / temperature
            limits = (float(min_p[row]), int(top_k[row]), float(top_p[row]))
            kept = _kept(x, scores, *limits)
            scores = torch.where(kept, scores, -torch.inf)
            is_few = limits != (0.0, 0, 1.0) and int(kept.sum()) <= sampler.HEAD
            chosen = _drawn(scores, seeds[row], positions[row], is_few)
        else:
            chosen = _first_of_largest(scores)
        out_ids[row] = chosen
        out_logprobs[row] = x[chosen] - x.logsumexp(0)


def _kept(x: Tensor, log_weights: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Which ids of a row the limits leave, bool[V]."""
    is_candidate = x > -torch.inf
    if min_p > 0:
        is_candidate &= log_weights >= math.log(min(min_p, 1.0))
    order = x.sort(descending=True, stable=True).indices  # of equal ones the lower id first
    order = order[is_candidate[order]]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = log_weights[order].double().exp()
        before = weights.cumsum(0) - weights
        order = order[: max(1, int((before < top_p * weights.sum()).sum()))]
    kept = torch.zeros_like(is_candidate)
    kept[order] = True
    return kept


def _drawn(log_weights: Tensor, seed: Tensor, position: Tensor, is_few: bool) -> int:
    """An id in proportion to the weights, from all of them, or from those of a bucket that is drawn first."""
    first, size = 0, len(log_weights)
    if not is_few:
        size = sampler.BUCKET
        padded = F.pad(log_weights, (0, -len(log_weights) % size), value=-torch.inf)
        masses = padded.view(-1, size).logsumexp(1)
        domain = philox.DOMAIN_BUCKET
        first = size * _first_of_largest(masses + _gumbels(seed, position, 0, len(masses), domain))
        log_weights = padded[first : first + size]
    noise = _gumbels(seed, position, first, size, philox.DOMAIN_TOKEN)
    return first + _first_of_largest(log_weights + noise)


def _first_of_largest(values: Tensor) -> int:
    return int((values == values.max()).nonzero()[0])


def _gumbels(seed: Tensor, position: Tensor, first: int, count: int, domain: int) -> Tensor:
    words = np.array(int(seed), np.int64).view(np.uint64)
    numbers = np.arange(first, first + count, dtype=np.uint64)
    drawn = philox.gumbels(words, np.array(int(position), np.uint64), numbers, domain)
    return torch.from_numpy(drawn).float().to(seed.device)
