"""The llama family as a list of operations over buffers that are made once, for a GPU.

Owns: weights on the device, the KV cache, the workspace, and the order of operations of one step. Never: allocates while it
runs a decode step (so that it can be recorded), chooses blocks, or looks at a result. The operations are `Ops`, kernels or
plain torch; matrices are gemv for few rows and torch.mm (cuBLAS) for more. Worker's main thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shmserve.worker.cuda.buffers import Inputs, StepBuffers
from shmserve.worker.cuda.ops import DecodeScratch, Ops, SampleScratch
from shmserve.worker.cuda.reference import MAX_GEMV_ROWS
from shmserve.worker.models.config import DecoderConfig, Rope
from shmserve.worker.models.decoder import rope_tables
from shmserve.worker.models.weights import DecoderWeights, LayerWeights

if TYPE_CHECKING:
    from shmserve.worker.parallel.device_share import DeviceShare


class Attention(Protocol):
    """What attends in place of the operations, for the step that it was told of (flashinfer_attention.py)."""

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, out: Tensor
    ) -> None: ...


class DeviceModel:
    """`weights` must be on the buffers' device already, matrices in the dtype that is computed in. The head may be shorter than
    the embedding: only its ids exist. With `share` it is one rank's part of a model: `config` and `weights` are those of the part, and
    `num_ids` is how many ids exist."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        ops: Ops,
        buffers: StepBuffers,
        *,
        max_num_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        attention: Attention | None = None,
        share: DeviceShare | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.config, self._weights, self._ops, self._buffers = config, weights, ops, buffers
        self._attention, self._share = attention, share
        device, dtype = weights.embedding.device, weights.embedding.dtype
        rows, seqs = max_num_tokens, buffers.max_num_seqs
        heads = config.num_heads + 2 * config.num_kv_heads

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        cache = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = empty(*cache), empty(*cache)
        self._turns = {
            rope: turn_tables(rope, config.head_dim, weights.rope_factors, max_model_len, device)
            for rope in set(config.ropes)
        }
        self._scale = config.query_scale * config.head_dim**-0.5
        self._residual = empty(rows, config.hidden_size)
        self._normed = empty(rows, config.hidden_size)
        self._branch = empty(rows, config.hidden_size)
        self._qkv = empty(rows, heads * config.head_dim)
        self._query = empty(rows, config.num_heads, config.head_dim)
        self._attended = empty(rows, config.num_heads, config.head_dim)
        self._gate_up = empty(rows, 2 * config.ffn_size)
        self._ffn = empty(rows, config.ffn_size)
        self._last = empty(seqs, config.hidden_size)
        vocab_size = num_ids or weights.head.shape[0]
        self.logits = empty(seqs, vocab_size)
        self._not_carried = torch.full((seqs,), -1, dtype=torch.int32, device=device)
        max_blocks = buffers.tables.shape[1]
        self._tables = torch.zeros((seqs, max_blocks), dtype=torch.int32, device=device)
        self._decode = DecodeScratch.allocate(
            seqs, config.num_heads, config.head_dim, max_model_len, device
        )
        self._sample = SampleScratch.allocate(seqs, vocab_size, device)

    def compute(self, inputs: Inputs, max_query_len: int, num_single: int = 0) -> None:
        """Hidden states of all token rows, and their keys and values into the cache. `max_query_len` 1: all rows decode.

        The first `num_single` sequences have one token each, like rows that decode, and attend as those do: their contexts are cut
        into splits, where a chunk's tile would go through a long one all alone.
        """
        c, w, ops = self.config, self._weights, self._ops
        count, num_seqs = inputs.token_ids.shape[0], inputs.kv_lens.shape[0]
        residual, normed = self._residual[:count], self._normed[:count]
        branch, attended = self._branch[:count], self._attended[:count]
        tables = self._tables[:num_seqs]
        torch.index_select(inputs.block_tables, 0, inputs.table_rows, out=tables)
        self._embed(inputs, residual)
        for index, layer in enumerate(w.layers):
            if index == 0:
                ops.add_rms_norm(residual, None, layer.attention_norm, normed, c.norm_eps)
            else:
                ops.add_rms_norm(branch, residual, layer.attention_norm, normed, c.norm_eps)
            self._attend(index, layer, inputs, tables, max_query_len, num_single)
            self._linear(attended.view(count, -1), layer.output, layer.output_bias, branch)
            self._sum(branch)
            self._norm_branch(branch, layer.attention_branch_norm)
            ops.add_rms_norm(branch, residual, layer.ffn_norm, normed, c.norm_eps)
            gate_up, ffn = self._gate_up[:count], self._ffn[:count]
            self._linear(normed, layer.gate_up, None, gate_up)
            ops.gated_mul(gate_up, ffn, c.activation != "silu")
            self._linear(ffn, layer.down, None, branch)
            self._sum(branch)
            self._norm_branch(branch, layer.ffn_branch_norm)
        ops.add_rms_norm(branch, residual, w.final_norm, normed, c.norm_eps)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        inputs: Inputs,
        tables: Tensor,
        max_query_len: int,
        num_single: int,
    ) -> None:
        c, ops, count = self.config, self._ops, inputs.token_ids.shape[0]
        qkv, query = self._qkv[:count], self._query[:count]
        keys, values = self.keys[index], self.values[index]
        self._linear(self._normed[:count], layer.qkv, None, qkv)
        norms = (layer.qkv_bias, layer.q_norm, layer.k_norm)
        places = (inputs.positions, inputs.kv_slots)
        turn = self._turns[c.ropes[index]]
        ops.rotary_write(qkv, *norms, *turn, *places, query, keys, values, c.norm_eps)
        out = self._attended[:count]
        if self._attention is not None:
            self._attention.attend(index, query, keys, values, out)
            return
        how = (self._scale, c.sliding_windows[index] or 0, c.attention_softcap or 0.0)
        n = count if max_query_len == 1 else num_single
        if n:
            rows = (query[:n], keys, values, tables[:n], inputs.kv_lens[:n], out[:n])
            ops.decode_attention(*rows, self._decode, *how)
        if n < inputs.kv_lens.shape[0]:
            chunks = (query, keys, values, tables, inputs.cu_seqlens, inputs.kv_lens, out)
            ops.prefill_attention(*chunks, max_query_len, *how, first=n)

    def sample(self, inputs: Inputs, num_samples: int) -> None:
        """Logits of the first `num_samples` of `last_tokens`, and a token of each into the result buffers."""
        n, buffers = num_samples, self._buffers
        last, logits = self._last[:n], self.logits[:n]
        # The rows are not carried: a gather with the embedding's kernel.
        at, none = inputs.last_tokens[:n], self._not_carried[:n]
        self._ops.embed(at, none, buffers.sampled_ids, self._normed, last)
        share = self._share
        local = logits if share is None else share.part_of_logits(n)
        self._linear(last, self._weights.head, None, local)
        if share is not None:
            share.join(logits)
            if not share.draws:
                share.tell_drawn(buffers.sampled_ids[:n])
                return
        self._cap(logits)
        results = (buffers.sampled_ids[:n], buffers.sampled_logprobs[:n], buffers.failures[:n])
        limits = (inputs.temperature[:n], inputs.min_p[:n], inputs.top_k[:n], inputs.top_p[:n])
        draws = (inputs.seeds[:n], inputs.draw_positions[:n])
        self._ops.sample(logits, *limits, *draws, *results, self._sample)
        if share is not None:
            share.tell_drawn(buffers.sampled_ids[:n])

    def hidden_logits(self, first: int, count: int) -> Tensor:
        """f32[count, vocabulary] of token rows of the step just computed; allocates."""
        logits = (self._normed[first : first + count] @ self._weights.head.t()).float()
        if self._share is not None:
            logits = self._share.joined(logits)[:, : self.logits.shape[1]]
        self._cap(logits)
        return logits

    def _embed(self, inputs: Inputs, residual: Tensor) -> None:
        ids, table, scale = (
            self._buffers.sampled_ids,
            self._weights.embedding,
            self.config.embedding_scale,
        )
        if self._share is not None:
            self._share.embed(self._ops, inputs, ids, table, residual, scale)
            return
        self._ops.embed(inputs.token_ids, inputs.carried, ids, table, residual, scale)

    def _sum(self, branch: Tensor) -> None:
        """`branch` becomes what all ranks together have for it."""
        if self._share is not None:
            self._share.sum(branch)

    def _cap(self, logits: Tensor) -> None:
        cap = self.config.logit_softcap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)

    def _norm_branch(self, branch: Tensor, weight: Tensor | None) -> None:
        if weight is not None:
            self._ops.add_rms_norm(branch, None, weight, branch, self.config.norm_eps)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if x.shape[0] <= MAX_GEMV_ROWS:
            self._ops.gemv(x, weight, bias, out)
            return
        torch.mm(x, weight.t(), out=out)
        if bias is not None:
            out.add_(bias)


def turn_tables(
    rope: Rope | None,
    head_dim: int,
    factors: Tensor | None,
    max_positions: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """cos and sin on the device. Layers without rotary positions turn by nothing: one kernel serves all."""
    if rope is None:
        turned = torch.ones(max_positions, head_dim // 2, device=device)
        return turned, torch.zeros_like(turned)
    cos, sin = rope_tables(rope, head_dim, factors, max_positions)
    return cos.to(device), sin.to(device)


def placing(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Puts one tensor on the device. Vectors (norms, biases) stay float32: they are small, and Gemma's norms need the bits."""

    def place(tensor: Tensor) -> Tensor:
        kept = torch.float32 if tensor.dim() == 1 else dtype
        return tensor.to(device=device, dtype=kept).contiguous()

    return place
