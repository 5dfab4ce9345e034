"""The weights of a decoder as float32 tensors, or of the part of it that one rank of several has.

Owns: the check of every shape, and the fused layout (q, k and v in one matrix, gate and up in one). Never: knows what is
computed with them. Anything missing or misshapen is one `ModelLoadError` line with the file, the tensor and both shapes. A
tied output head is the embedding's own tensor, so memory holds it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmserve.worker.models.config import DecoderConfig, ModelLoadError
from shmserve.worker.models.sources import Shape, TensorSource

if TYPE_CHECKING:
    from shmserve.worker.parallel.plan import Cut, Partition

LoadProgress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [out, in]; None where the architecture has no such tensor."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor
    attention_branch_norm: Tensor | None = None
    ffn_branch_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """`rope_factors` divide the rotary frequencies, f32[head_dim / 2]; GGUF files carry llama3's scaling this way."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    rope_factors: Tensor | None


def load_weights(
    source: TensorSource,
    config: DecoderConfig,
    progress: LoadProgress = lambda fraction: None,
    place: Callable[[Tensor], Tensor] | None = None,
    partition: Partition | None = None,
) -> DecoderWeights:
    """All weights of the model; `progress` hears the fraction of tensors read so far.

    `place` puts each tensor where it is to stay as soon as it is read: the host holds no more than one of them in float32.
    `partition` is what is read, where it is not all.
    """
    reader = _Reader(source, config, progress, place or (lambda tensor: tensor), partition)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = reader.one("embedding", None, (vocab, hidden))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(reader.layer(layer) for layer in range(config.num_layers)),
        final_norm=reader.one("final_norm", None, (hidden,)),
        head=embedding if config.tied_head else reader.one("head", None, (vocab, hidden)),
        rope_factors=reader.rope_factors(),
    )


class _Reader:
    """Reads part after part, checks each shape, and counts for `progress`."""

    def __init__(
        self,
        source: TensorSource,
        config: DecoderConfig,
        progress: LoadProgress,
        place: Callable[[Tensor], Tensor],
        partition: Partition | None,
    ) -> None:
        self._source, self._config, self._progress = source, config, progress
        self._place, self._partition = place, partition
        biases_and_norms = 3 * config.has_qkv_bias + config.has_output_bias + 2 * config.has_qk_norm
        biases_and_norms += 2 * config.has_branch_norms
        self._total = 2 + (not config.tied_head) + config.num_layers * (9 + biases_and_norms)
        self._num_read = 0

    def layer(self, layer: int) -> LayerWeights:
        c = self._config
        hidden, ffn = c.hidden_size, c.ffn_size
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        biases = {f"{part}_bias": size for part, size in rows.items()}
        return LayerWeights(
            attention_norm=self.one("attention_norm", layer, (hidden,)),
            qkv=self.stacked(layer, rows, (hidden,)),
            qkv_bias=self.stacked(layer, biases, ()) if c.has_qkv_bias else None,
            q_norm=self.one("q_norm", layer, (c.head_dim,)) if c.has_qk_norm else None,
            k_norm=self.one("k_norm", layer, (c.head_dim,)) if c.has_qk_norm else None,
            output=self.one("output", layer, (hidden, q_rows)),
            output_bias=self.one("output_bias", layer, (hidden,))
            if self._adds_output_bias
            else None,
            ffn_norm=self.one("ffn_norm", layer, (hidden,)),
            gate_up=self.stacked(layer, {"gate": ffn, "up": ffn}, (hidden,)),
            down=self.one("down", layer, (hidden, ffn)),
            attention_branch_norm=self.branch_norm("attention_branch_norm", layer),
            ffn_branch_norm=self.branch_norm("ffn_branch_norm", layer),
        )

    def branch_norm(self, part: str, layer: int) -> Tensor | None:
        has_it = self._config.has_branch_norms
        return self.one(part, layer, (self._config.hidden_size,)) if has_it else None

    @property
    def _adds_output_bias(self) -> bool:
        """What several ranks give is added up: the bias must be in it once."""
        is_first = self._partition is None or self._partition.rank == 0
        return self._config.has_output_bias and is_first

    def stacked(self, layer: int, rows: dict[str, int], rest: Shape) -> Tensor:
        """Several parts under each other in one tensor, each copied to its place as it is read."""
        for part, size in rows.items():  # before memory is taken for numbers that may be absurd
            self._found(part, layer, (size, *rest))
        cuts = {part: self._cut(part) for part in rows}
        sizes = {p: size if (cut := cuts[p]) is None else cut.size for p, size in rows.items()}
        out = torch.empty((sum(sizes.values()), *rest), dtype=torch.float32)
        start = 0
        for part, size in sizes.items():
            out[start : start + size] = self._read(part, layer, (rows[part], *rest))
            start += size
        return self._place(out)

    def one(self, part: str, layer: int | None, shape: Shape) -> Tensor:
        return self._place(self._read(part, layer, shape))

    def _found(self, part: str, layer: int | None, shape: Shape) -> str:
        """The tensor's name; its shape is what it must be."""
        name = self._source.name(part, layer)
        found = self._source.shape(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise ModelLoadError(
                f"{self._source.where(name)}: tensor {name} {what}, expected {list(shape)}"
            )
        return name

    def _cut(self, part: str) -> Cut | None:
        """What is read of a part; None for all of it."""
        return None if self._partition is None else self._partition.cut(part)

    def _read(self, part: str, layer: int | None, shape: Shape) -> Tensor:
        """The values of a tensor that has `shape` in the file: of it what this rank has."""
        name = self._found(part, layer, shape)
        cut = self._cut(part)
        tensor = self._source.read(name, part, cut).contiguous()
        if cut is not None and tensor.shape[cut.dim] < cut.size:
            padding = cut.size - tensor.shape[cut.dim]  # of rows only: ids that do not exist
            tensor = torch.cat((tensor, tensor.new_zeros((padding, *tensor.shape[1:]))))
        self._num_read += 1
        self._progress(self._num_read / self._total)
        return tensor

    def rope_factors(self) -> Tensor | None:
        name, expected = "rope_freqs.weight", (self._config.head_dim // 2,)
        found = self._source.shape(name)
        if found is None:
            return None
        if found != expected:
            where = self._source.where(name)
            raise ModelLoadError(
                f"{where}: tensor {name} has shape {list(found)}, expected {list(expected)}"
            )
        return self._source.read(name, "rope_factors")
