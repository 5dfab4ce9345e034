"""The decoder of the llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM2.

Owns: the arithmetic from token ids to hidden states and logits, and the rotary tables. Never: allocates the KV cache,
chooses blocks, or samples. Runs under `torch.inference_mode` of its caller.

All rows of a ragged batch go through each matrix in one product. A row's result does not depend on the other rows beyond
the rounding of float32 (the matrix library may choose another summation order for another number of rows).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shmserve.worker.models.attention import AttentionPlan, KVCache
from shmserve.worker.models.config import DecoderConfig, RopeScaling
from shmserve.worker.models.weights import DecoderWeights


class Decoder:
    """Weights and rotary tables of one model, for positions below `max_positions`."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, max_positions: int) -> None:
        self.config = config
        self._weights = weights
        self._cos, self._sin = rotary_tables(config, weights.rope_factors, max_positions)

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
        num_q, num_kv = c.num_heads, c.num_kv_heads
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = F.embedding(token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x = self._norm(hidden, layer.attention_norm)
            qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, num_q + 2 * num_kv, c.head_dim)
            query, keys, values = qkv.split((num_q, num_kv, num_kv), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, keys = self._norm(query, layer.q_norm), self._norm(keys, layer.k_norm)
            query, keys = rotate(query, cos, sin), rotate(keys, cos, sin)
            cache.write(index, kv_slots, keys, values)
            plan = plans[c.sliding_windows[index]]
            attended = plan.attend(query, cache.keys[index], cache.values[index])
            hidden = hidden + F.linear(attended.flatten(1), layer.output, layer.output_bias)
            gate, up = F.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] for R rows of hidden states."""
        return F.linear(self._norm(hidden, self._weights.final_norm), self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in half-split order: element j turns with element j + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(
    config: DecoderConfig, factors: Tensor | None, max_positions: int
) -> tuple[Tensor, Tensor]:
    """cos and sin, f32[max_positions, head_dim / 2]; `factors` from the file divide the frequencies once more."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = _scaled(config.rope_theta**-exponents, config.rope_scaling)
    if factors is not None:
        frequencies = frequencies / factors.double()
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long wavelengths are stretched, short ones kept, those between are blended.
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * share_kept + frequencies / scaling.factor * (1.0 - share_kept)
