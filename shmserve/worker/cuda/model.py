"""The llama family as a list of operations over buffers that are made once, for a GPU.

Owns: weights on the device, the KV cache, the workspace, and the order of operations of one step. Never: allocates while it
runs a decode step (so that it can be recorded), chooses blocks, or looks at a result. The operations are `Ops`, kernels or
plain torch; matrices are gemv for few rows and torch.mm (cuBLAS) for more. Worker's main thread only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shmserve.worker.cuda.buffers import Inputs, StepBuffers
from shmserve.worker.cuda.ops import DecodeScratch, Ops, SampleScratch
from shmserve.worker.cuda.reference import MAX_GEMV_ROWS
from shmserve.worker.models.config import DecoderConfig
from shmserve.worker.models.decoder import rotary_tables
from shmserve.worker.models.weights import DecoderWeights, LayerWeights


class DeviceModel:
    """`weights` must be on the buffers' device already, in the dtype that is computed in."""

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
    ) -> None:
        self.config, self._weights, self._ops, self._buffers = config, weights, ops, buffers
        device, dtype = weights.embedding.device, weights.embedding.dtype
        rows, seqs = max_num_tokens, buffers.max_num_seqs
        heads = config.num_heads + 2 * config.num_kv_heads

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        cache = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.keys, self.values = empty(*cache), empty(*cache)
        cos, sin = rotary_tables(config, weights.rope_factors, max_model_len)
        self._cos, self._sin = cos.to(device), sin.to(device)
        self._residual = empty(rows, config.hidden_size)
        self._normed = empty(rows, config.hidden_size)
        self._branch = empty(rows, config.hidden_size)
        self._qkv = empty(rows, heads * config.head_dim)
        self._query = empty(rows, config.num_heads, config.head_dim)
        self._attended = empty(rows, config.num_heads, config.head_dim)
        self._gate_up = empty(rows, 2 * config.ffn_size)
        self._ffn = empty(rows, config.ffn_size)
        self._last = empty(seqs, config.hidden_size)
        self.logits = empty(seqs, config.vocab_size)
        self._not_carried = torch.full((seqs,), -1, dtype=torch.int32, device=device)
        max_blocks = buffers.tables.shape[1]
        self._tables = torch.zeros((seqs, max_blocks), dtype=torch.int32, device=device)
        self._decode = DecodeScratch.allocate(
            seqs, config.num_heads, config.head_dim, max_model_len, device
        )
        self._sample = SampleScratch.allocate(seqs, config.vocab_size, device)

    def compute(self, inputs: Inputs, max_query_len: int) -> None:
        """Hidden states of all token rows, and their keys and values into the cache. `max_query_len` 1: all rows decode."""
        c, w, ops = self.config, self._weights, self._ops
        count, num_seqs = inputs.token_ids.shape[0], inputs.kv_lens.shape[0]
        residual, normed = self._residual[:count], self._normed[:count]
        branch, attended = self._branch[:count], self._attended[:count]
        tables = self._tables[:num_seqs]
        torch.index_select(inputs.block_tables, 0, inputs.table_rows, out=tables)
        ids = self._buffers.sampled_ids
        ops.embed(inputs.token_ids, inputs.carried, ids, w.embedding, residual)
        for index, layer in enumerate(w.layers):
            if index == 0:
                ops.add_rms_norm(residual, None, layer.attention_norm, normed, c.norm_eps)
            else:
                ops.add_rms_norm(branch, residual, layer.attention_norm, normed, c.norm_eps)
            self._attend(index, layer, inputs, tables, max_query_len)
            self._linear(attended.view(count, -1), layer.output, layer.output_bias, branch)
            ops.add_rms_norm(branch, residual, layer.ffn_norm, normed, c.norm_eps)
            gate_up, ffn = self._gate_up[:count], self._ffn[:count]
            self._linear(normed, layer.gate_up, None, gate_up)
            ops.gated_mul(gate_up, ffn)
            self._linear(ffn, layer.down, None, branch)
        ops.add_rms_norm(branch, residual, w.final_norm, normed, c.norm_eps)

    def _attend(
        self, index: int, layer: LayerWeights, inputs: Inputs, tables: Tensor, max_query_len: int
    ) -> None:
        c, ops, count = self.config, self._ops, inputs.token_ids.shape[0]
        qkv, query = self._qkv[:count], self._query[:count]
        keys, values = self.keys[index], self.values[index]
        self._linear(self._normed[:count], layer.qkv, None, qkv)
        norms = (layer.qkv_bias, layer.q_norm, layer.k_norm)
        places = (inputs.positions, inputs.kv_slots)
        turn = (self._cos, self._sin)
        ops.rotary_write(qkv, *norms, *turn, *places, query, keys, values, c.norm_eps)
        scale, window = c.head_dim**-0.5, c.sliding_windows[index] or 0
        cache = (query, keys, values, tables)
        out = self._attended[:count]
        if max_query_len == 1:
            ops.decode_attention(*cache, inputs.kv_lens, out, self._decode, scale, window)
        else:
            lengths = (inputs.cu_seqlens, inputs.kv_lens)
            ops.prefill_attention(*cache, *lengths, out, max_query_len, scale, window)

    def sample(self, inputs: Inputs, num_samples: int) -> None:
        """Logits of the first `num_samples` of `last_tokens`, and a token of each into the result buffers."""
        n, buffers = num_samples, self._buffers
        last, logits = self._last[:n], self.logits[:n]
        # The rows are not carried: a gather with the embedding's kernel.
        at, none = inputs.last_tokens[:n], self._not_carried[:n]
        self._ops.embed(at, none, buffers.sampled_ids, self._normed, last)
        self._linear(last, self._weights.head, None, logits)
        results = (buffers.sampled_ids[:n], buffers.sampled_logprobs[:n], buffers.failures[:n])
        draws = (inputs.temperature[:n], inputs.min_p[:n], inputs.seeds[:n])
        self._ops.sample(logits, *draws, inputs.draw_positions[:n], *results, self._sample)

    def hidden_logits(self, first: int, count: int) -> Tensor:
        """f32[count, vocabulary] of token rows of the step just computed; allocates."""
        return (self._normed[first : first + count] @ self._weights.head.t()).float()

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if x.shape[0] <= MAX_GEMV_ROWS:
            self._ops.gemv(x, weight, bias, out)
            return
        torch.mm(x, weight.t(), out=out)
        if bias is not None:
            out.add_(bias)


def moved(weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """The weights on the device. A tied head stays one tensor."""

    def put(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype).contiguous()

    def maybe(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else put(tensor)

    layers = tuple(
        replace(
            layer,
            attention_norm=put(layer.attention_norm),
            qkv=put(layer.qkv),
            qkv_bias=maybe(layer.qkv_bias),
            q_norm=maybe(layer.q_norm),
            k_norm=maybe(layer.k_norm),
            output=put(layer.output),
            output_bias=maybe(layer.output_bias),
            ffn_norm=put(layer.ffn_norm),
            gate_up=put(layer.gate_up),
            down=put(layer.down),
        )
        for layer in weights.layers
    )
    embedding = put(weights.embedding)
    head = embedding if weights.head is weights.embedding else put(weights.head)
    return replace(
        weights,
        embedding=embedding,
        layers=layers,
        final_norm=put(weights.final_norm),
        head=head,
    )
