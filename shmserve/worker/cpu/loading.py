"""A model's tensors brought from its files into the kernels' layout.

Owns: which tensor goes where, and the check of every shape. Never: computes with them, or keeps a float copy of a matrix.
Anything missing or misshapen is one `ModelLoadError` line with the file, the tensor and both shapes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from shmserve.gguf import GGUFFile, unpermute_rows
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.pack import (
    COLUMNS,
    F4,
    GROUP,
    KEPT_TYPES,
    U1,
    Arena,
    PackedLayer,
    PackedMatrix,
    PackedModel,
    pack_blocks,
    pack_floats,
    padded,
)
from shmserve.worker.models.config import DecoderConfig, ModelLoadError
from shmserve.worker.models.decoder import rotary_tables
from shmserve.worker.models.sources import GGUFSource, Shape, TensorSource
from shmserve.worker.models.weights import LoadProgress
from shmserve.worker.torch_runner import open_model


class UncomputedModelError(KernelsError):
    """A model that the kernels do not compute, and the torch runner does."""


class BlockSource(GGUFSource):
    """A GGUF file whose quantised blocks can be had as they are."""

    def blocks(self, name: str, part: str) -> tuple[str, U1] | None:
        """The type and the rows of blocks [rows, bytes], in half-split rotary order; None if they are not kept as blocks."""
        info = self._file.tensors[name]
        if info.type_name not in KEPT_TYPES:
            return None
        rows = self._file.raw(name).reshape(info.shape[0], -1)
        if part in self._interleaved_heads:
            rows = unpermute_rows(rows, self._interleaved_heads[part])
        return info.type_name, rows


def open_source(weights: Path, format: str) -> tuple[DecoderConfig, TensorSource]:
    """As `open_model`, but blocks of a GGUF file can be had as they are. Raises UncomputedModelError for what the kernels cannot."""
    config, source = open_model(weights, format)
    features = ", ".join(config.special_features)
    if features:
        raise UncomputedModelError(
            f"the C kernels do not compute {config.architecture} models with {features}"
        )
    return config, BlockSource(GGUFFile(weights), config) if format == "gguf" else source


def load_model(
    source: TensorSource,
    config: DecoderConfig,
    max_positions: int,
    progress: LoadProgress,
    num_token_ids: int | None = None,
) -> PackedModel:
    """The packed model; `progress` hears the fraction of layers read so far. Its head ends with the last of the `num_token_ids`
    ids that have a token, where the file's is padded beyond."""
    reader = _Reader(source, config)
    hidden, vocab = config.hidden_size, config.vocab_size
    num_ids = min(vocab, num_token_ids or vocab)
    embedding = reader.matrix("embedding", None, (vocab, hidden))
    head = embedding if config.tied_head else reader.matrix("head", None, (vocab, hidden))
    layers = []
    for index in range(config.num_layers):
        layers.append(reader.layer(index))
        progress((index + 1) / config.num_layers)
    cos, sin = rotary_tables(config, reader.rope_factors(), max_positions)
    return PackedModel(
        vocab_size=num_ids,
        hidden_size=hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        embedding=embedding,
        head=PackedMatrix(head.blocks[: -(-num_ids // COLUMNS)]),
        final_norm=padded(reader.vector("final_norm", None, hidden)),
        layers=tuple(layers),
        cos=np.ascontiguousarray(cos.numpy()),
        sin=np.ascontiguousarray(sin.numpy()),
    )


class _Reader:
    """Reads part after part into one arena, and checks each shape."""

    def __init__(self, source: TensorSource, config: DecoderConfig) -> None:
        self._source, self._config, self._arena = source, config, Arena()

    def layer(self, layer: int) -> PackedLayer:
        c = self._config
        hidden, ffn = c.hidden_size, c.ffn_size
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        has_bias = c.has_qkv_bias
        return PackedLayer(
            attention_norm=padded(self.vector("attention_norm", layer, hidden)),
            ffn_norm=padded(self.vector("ffn_norm", layer, hidden)),
            q=self.matrix("q", layer, (q_rows, hidden)),
            k=self.matrix("k", layer, (kv_rows, hidden)),
            v=self.matrix("v", layer, (kv_rows, hidden)),
            o=self.matrix("output", layer, (hidden, q_rows)),
            # gate and up are computed 32 columns at a time: one group of down's input
            gate=self.matrix("gate", layer, (ffn, hidden), row_multiple=GROUP),
            up=self.matrix("up", layer, (ffn, hidden), row_multiple=GROUP),
            down=self.matrix("down", layer, (hidden, ffn)),
            q_norm=self.vector("q_norm", layer, c.head_dim) if c.has_qk_norm else None,
            k_norm=self.vector("k_norm", layer, c.head_dim) if c.has_qk_norm else None,
            q_bias=self.vector("q_bias", layer, q_rows) if has_bias else None,
            k_bias=self.vector("k_bias", layer, kv_rows) if has_bias else None,
            v_bias=self.vector("v_bias", layer, kv_rows) if has_bias else None,
            o_bias=padded(self.vector("output_bias", layer, hidden)) if c.has_output_bias else None,
            window=c.sliding_windows[layer],
            is_rotated=c.ropes[layer] is not None,
        )

    def matrix(
        self, part: str, layer: int | None, shape: Shape, row_multiple: int = COLUMNS
    ) -> PackedMatrix:
        name = self._found(self._source.name(part, layer), shape)
        if isinstance(self._source, BlockSource):
            kept = self._source.blocks(name, part)
            if kept is not None:
                return pack_blocks(*kept, self._arena, row_multiple=row_multiple)
        values = self._source.read(name, part).numpy()
        return pack_floats(values, self._arena, row_multiple=row_multiple)

    def vector(self, part: str, layer: int | None, size: int) -> F4:
        name = self._found(self._source.name(part, layer), (size,))
        # A copy: the tensor may be a view into the file.
        return np.array(self._source.read(name, part).numpy(), np.float32)

    def rope_factors(self) -> Tensor | None:
        name = "rope_freqs.weight"
        if self._source.shape(name) is None:
            return None
        self._found(name, (self._config.head_dim // 2,))
        return self._source.read(name, "rope_factors")

    def _found(self, name: str, shape: Shape) -> str:
        found = self._source.shape(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            where = self._source.where(name)
            raise ModelLoadError(f"{where}: tensor {name} {what}, expected {list(shape)}")
        return name
