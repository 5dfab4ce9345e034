"""The decoder of the llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM 2 and 3, Phi-3, Gemma 1 to 3.

Owns: the arithmetic from token ids to hidden states and logits, and the rotary tables. Matrices may be kept in bfloat16; all between
two of them is float32. Never: allocates the KV cache,
chooses blocks, or samples. Runs under `torch.inference_mode` of its caller. As one rank of several it computes its part, and the others theirs
at the same time (parallel/team.py).

All rows of a ragged batch go through each matrix in one product. A row's result does not depend on the other rows beyond
the rounding of float32 (the matrix library may choose another summation order for another number of rows).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shmserve.worker.models.attention import AttentionPlan, KVCache
from shmserve.worker.models.config import DecoderConfig, Rope
from shmserve.worker.models.weights import DecoderWeights

if TYPE_CHECKING:
    from shmserve.worker.parallel.team import Share


class Decoder:
    """Weights and rotary tables of one model, for positions below `max_positions`; or with `share` of one rank's part of it."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        max_positions: int,
        share: Share | None = None,
    ) -> None:
        self.config = config
        self._weights, self._share = weights, share
        self._own = config if share is None else share.partition.own
        self._tables = {
            rope: rope_tables(rope, config.head_dim, weights.rope_factors, max_positions)
            for rope in set(config.ropes)
            if rope is not None
        }

    def hidden_states(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        cache: KVCache,
        plans: Mapping[int | None, AttentionPlan],
    ) -> Tensor:
        """[T, hidden_size], before the final norm; writes the keys and values of the T tokens. `plans` is keyed by window."""
        c = self.config
        num_q, num_kv = self._own.num_heads, self._own.num_kv_heads
        turns = {
            rope: (cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))
            for rope, (cos, sin) in self._tables.items()
        }
        hidden = self._embedded(token_ids)
        if c.embedding_scale != 1.0:
            hidden = hidden * c.embedding_scale
        scale = c.query_scale * c.head_dim**-0.5
        for index, layer in enumerate(self._weights.layers):
            x = self._norm(hidden, layer.attention_norm)
            qkv = linear(x, layer.qkv, layer.qkv_bias).view(-1, num_q + 2 * num_kv, c.head_dim)
            query, keys, values = qkv.split((num_q, num_kv, num_kv), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, keys = self._norm(query, layer.q_norm), self._norm(keys, layer.k_norm)
            rope = c.ropes[index]
            if rope is not None:
                query, keys = rotate(query, *turns[rope]), rotate(keys, *turns[rope])
            cache.write(index, kv_slots, keys, values)
            attended = plans[c.sliding_windows[index]].attend(
                query,
                cache.keys[index],
                cache.values[index],
                scale=scale,
                softcap=c.attention_softcap,
            )
            branch = self._summed(linear(attended.flatten(1), layer.output, layer.output_bias))
            hidden = hidden + self._branch_norm(branch, layer.attention_branch_norm)
            gate, up = linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            branch = self._summed(linear(self._activated(gate) * up, layer.down))
            hidden = hidden + self._branch_norm(branch, layer.ffn_branch_norm)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] for R rows of hidden states."""
        logits = linear(self._norm(hidden, self._weights.final_norm), self._weights.head)
        if self._share is not None:
            logits = self._share.joined(logits)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        table = self._weights.embedding
        if self._share is not None:
            return self._share.embedded(token_ids, table)
        return F.embedding(token_ids, table).float()

    def _summed(self, branch: Tensor) -> Tensor:
        """What all ranks together have for `branch`."""
        return branch if self._share is None else self._share.summed(branch)

    def _activated(self, gate: Tensor) -> Tensor:
        if self.config.activation == "silu":
            return F.silu(gate)
        return F.gelu(gate, approximate="tanh")

    def _branch_norm(self, branch: Tensor, weight: Tensor | None) -> Tensor:
        return branch if weight is None else self._norm(branch, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x float32[T, in] through a matrix [out, in], in the precision that it is kept in; the result is float32 again."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    product = F.linear(x.to(weight.dtype), weight).float()
    return product if bias is None else product + bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order: element j turns with element j + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(
    config: DecoderConfig, factors: Tensor | None, max_positions: int
) -> tuple[Tensor, Tensor]:
    """`rope_tables` of a model whose layers are all rotated alike."""
    return rope_tables(config.rope, config.head_dim, factors, max_positions)


def rope_tables(
    rope: Rope, head_dim: int, factors: Tensor | None, max_positions: int
) -> tuple[Tensor, Tensor]:
    """cos and sin, f32[max_positions, head_dim / 2]; `factors` from the file divide the frequencies once more."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = _scaled(rope.theta**-exponents, rope)
    if factors is not None:
        frequencies = frequencies / factors.double()
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    magnitude = rope.scaling.magnitude
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def _scaled(frequencies: Tensor, rope: Rope) -> Tensor:
    scaling = rope.scaling
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Long wavelengths are stretched, short ones kept, those between are blended.
    if scaling.kind == "llama3":
        turns = scaling.original_context_length * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        share_kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    else:
        share_kept = _yarn_share_kept(rope, len(frequencies))
    return frequencies * share_kept + frequencies / scaling.factor * (1.0 - share_kept)


def _yarn_share_kept(rope: Rope, num_pairs: int) -> Tensor:
    """Of each pair of dimensions: 1 where it turns `beta_fast` times in the original context, 0 where `beta_slow` times."""
    scaling = rope.scaling

    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_context_length / (times * 2 * math.pi)
        return num_pairs * math.log(wavelength) / math.log(rope.theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(num_pairs, dtype=torch.float64)
    return 1.0 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
