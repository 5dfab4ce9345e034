"""A decode step of a random model through the CUDA runner's own buffers, model and graphs, beside the memory floor.

Owns: the weights, which no file has, and the figures of whole steps. Never: decides what is fast enough.

    floor  (weights without the embedding + keys and values of all rows) / bandwidth
    graph  the recorded step alone, replayed again and again
    step   with its copies and the host's part, two steps in flight, as the engine has them
"""

from __future__ import annotations

import time

import numpy as np
import torch
from bench_common import Row
from gpu_cases import BLOCK_SIZE
from gpu_speed import NUM_BLOCKS, Clock, Scale, products
from torch import Tensor

from shmserve.worker.batch import I4, Batch
from shmserve.worker.cuda.buffers import Landing, StepBuffers
from shmserve.worker.cuda.graphs import StepGraphs
from shmserve.worker.cuda.link import CudaLink, HostLink
from shmserve.worker.cuda.model import DeviceModel
from shmserve.worker.cuda.ops import Ops
from shmserve.worker.models.config import DecoderConfig
from shmserve.worker.models.weights import DecoderWeights, LayerWeights
from shmserve.worker.sampling_state import SamplingState


def random_weights(c: DecoderConfig, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Made where they are used: 16 GB need not cross a bus."""

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)

    def ones() -> Tensor:
        return torch.ones(c.hidden_size, dtype=dtype, device=device)

    shapes = products(c)
    layers = tuple(
        LayerWeights(
            attention_norm=ones(),
            qkv=matrix(*shapes["qkv"]),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(*shapes["output"]),
            output_bias=None,
            ffn_norm=ones(),
            gate_up=matrix(*shapes["gate_up"]),
            down=matrix(*shapes["down"]),
        )
        for _ in range(c.num_layers)
    )
    head = matrix(c.vocab_size, c.hidden_size)
    return DecoderWeights(matrix(c.vocab_size, c.hidden_size), layers, ones(), head, None)


class StepRig:
    """Records a step for each of `batches`."""

    def __init__(
        self,
        clock: Clock,
        scale: Scale,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        batches: tuple[int, ...],
    ) -> None:
        self.clock, self.scale, c = clock, scale, scale.config
        most = max(batches)
        self._blocks_each = -(-scale.context // BLOCK_SIZE)
        self._buffers = StepBuffers(
            CudaLink(device) if clock.is_cuda else HostLink(),
            max_num_tokens=most,
            max_num_seqs=most,
            num_rows=most,
            max_blocks=self._blocks_each,
        )
        weights = random_weights(c, device, dtype)
        self._model = DeviceModel(
            c,
            weights,
            ops,
            self._buffers,
            max_num_tokens=most,
            max_model_len=scale.context,
            num_blocks=1 + most * self._blocks_each,
            block_size=BLOCK_SIZE,
        )
        for cache in (self._model.keys, self._model.values):
            for layer in cache:
                layer.normal_()
        self._graphs = StepGraphs(clock.capture, batches, self._decode)
        self._graphs.record_all()
        self._sampling = SamplingState(most)
        self._sampling.temperature[:] = 0.7
        matrices = (m for w in weights.layers for m in (w.qkv, w.output, w.gate_up, w.down))
        self.weight_bytes = sum(m.nbytes for m in matrices) + weights.head.nbytes
        self.kv_bytes_per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize

    def _decode(self, bucket: int) -> None:
        inputs = self._buffers.inputs(bucket, bucket)
        self._model.compute(inputs, 1)
        self._model.sample(inputs, bucket)

    def measure(self, batch_size: int, gb_s: float) -> Row:
        """One row: the graph alone, and whole steps with their copies and the host's part, each beside the floor."""
        batch = self._batch(batch_size)
        self._buffers.send(batch, self._sampling, None, batch_size)
        graph_ms = self.clock.replay_us(lambda: self._graphs.replay(batch_size)) / 1e3
        step_ms = self._step_ms(batch)
        num_bytes = self.weight_bytes + batch_size * self.scale.context * self.kv_bytes_per_token
        floor_ms = num_bytes / gb_s / 1e6
        row: Row = {"part": "step", "batch": batch_size, "context": self.scale.context}
        row |= {"floor_ms": floor_ms, "graph_ms": graph_ms, "step_ms": step_ms}
        return {**row, "of_floor": graph_ms / floor_ms, "step_of_floor": step_ms / floor_ms}

    def _step_ms(self, batch: Batch) -> float:
        size, num_steps = batch.num_seqs, 2 * NUM_BLOCKS * self.scale.num_replays // 5
        carried = np.arange(size, dtype=np.int32)
        before, begin = self._launch(batch, None), 0.0
        for step in range(num_steps + 2):
            if step == 2:
                begin = time.perf_counter()
            after = self._launch(batch, carried)
            before.wait()
            before = after
        elapsed = time.perf_counter() - begin
        before.wait()
        return elapsed * 1e3 / num_steps

    def _launch(self, batch: Batch, carried: I4 | None) -> Landing:
        self._buffers.send(batch, self._sampling, carried, batch.num_seqs)
        self._graphs.replay(batch.num_seqs)
        return self._buffers.fetch(batch.num_seqs)

    def _batch(self, size: int) -> Batch:
        """Rows at the end of the context, their blocks strewn over all that there are."""
        blocks = 1 + np.random.default_rng(3).permutation(size * self._blocks_each)
        table = blocks.astype(np.int32).reshape(size, self._blocks_each)
        last = self.scale.context - 1
        rows = np.arange(size, dtype=np.int32)
        return Batch(
            step=1,
            rows=rows,
            token_ids=rows % self.scale.config.vocab_size,
            positions=np.full(size, last, np.int32),
            kv_slots=table[:, -1] * BLOCK_SIZE + last % BLOCK_SIZE,
            cu_seqlens=np.arange(size + 1, dtype=np.int32),
            block_table=table,
            kv_lens=np.full(size, last + 1, np.int32),
            sample_seqs=rows,
            is_decode=True,
        )


def batches_that_fit(scale: Scale, device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Those of its batches whose keys and values lie beside the weights in 90 % of the free memory."""
    if device.type != "cuda":
        return scale.batches
    c = scale.config
    layer = sum(h * d for name, (h, d) in products(c).items() if name != "head")
    values = c.num_layers * layer + 2 * c.vocab_size * c.hidden_size
    torch.cuda.empty_cache()
    room = 0.9 * torch.cuda.mem_get_info(device)[0] - values * dtype.itemsize
    each = 2 * c.num_layers * c.num_kv_heads * c.head_dim * scale.context * dtype.itemsize
    return tuple(batch for batch in scale.batches if batch * each <= room)
