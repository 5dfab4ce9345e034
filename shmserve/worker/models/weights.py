"""The weights of a decoder as float32 tensors, from a GGUF file or a folder of safetensors.

Owns: the names of tensors in both formats, the check of every shape, and the fused layout (q, k and v in one matrix, gate
and up in one). Never: knows what is computed with them. Anything missing or misshapen is one `ModelLoadError` line with the
file, the tensor and both shapes. A tied output head is the embedding's own tensor, so memory holds it once.

Rows of q and k are in the half-split rotary order of Hugging Face; llama-architecture GGUF files interleave them and are
put right here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shmserve.gguf import GGUFError, GGUFFile, unpermute_rows
from shmserve.worker.models.config import DecoderConfig, ModelLoadError

Shape = tuple[int, ...]
LoadProgress = Callable[[float], None]

# part -> (name in a GGUF file, name in a Hugging Face checkpoint)
MODEL_NAMES = {
    "embedding": ("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
LAYER_NAMES = {
    "attention_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "q_bias": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": ("attn_v.bias", "self_attn.v_proj.bias"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "output": ("attn_output.weight", "self_attn.o_proj.weight"),
    "output_bias": ("attn_output.bias", "self_attn.o_proj.bias"),
    "ffn_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
    "attention_branch_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "ffn_branch_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
BRANCH_NORM_NAMES = {"ffn_norm": "pre_feedforward_layernorm.weight"}
"""In checkpoints with branch norms, whose post_attention_layernorm is one."""

NORMS = frozenset(part for part in (*MODEL_NAMES, *LAYER_NAMES) if part.endswith("_norm"))
SAFETENSORS_DTYPES = ("F32", "F16", "BF16")


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


class TensorSource(Protocol):
    """One model's tensors by name."""

    def name(self, part: str, layer: int | None) -> str: ...

    def shape(self, name: str) -> Shape | None:
        """None where there is no such tensor."""

    def read(self, name: str, part: str) -> Tensor:
        """The values as float32."""

    def where(self, name: str) -> Path:
        """The file that has the tensor, or should have it."""


class GGUFSource:
    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self._file = file
        is_interleaved = config.architecture == "llama"
        self._interleaved_heads = (
            dict.fromkeys(("q", "q_bias"), config.num_heads)
            | dict.fromkeys(("k", "k_bias"), config.num_kv_heads)
            if is_interleaved
            else {}
        )

    def name(self, part: str, layer: int | None) -> str:
        return MODEL_NAMES[part][0] if layer is None else f"blk.{layer}.{LAYER_NAMES[part][0]}"

    def shape(self, name: str) -> Shape | None:
        info = self._file.tensors.get(name)
        return None if info is None else tuple(info.shape)

    def read(self, name: str, part: str) -> Tensor:
        try:
            values = self._file.array(name)
        except GGUFError as error:
            raise ModelLoadError(str(error)) from None
        if part in self._interleaved_heads:
            values = unpermute_rows(values, self._interleaved_heads[part])
        return torch.from_numpy(values)

    def where(self, name: str) -> Path:
        return self._file.path


class SafetensorsSource:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names.

    Rows of a fused tensor (Phi-3's qkv_proj and gate_up_proj) are a tensor too, called "NAME[first:end]".
    """

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._config = config
        self._rows = _fused_rows(config) if config.has_fused_matrices else {}
        index = folder / "model.safetensors.index.json"
        self._single = folder / "model.safetensors"
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        if index.exists():
            self._file_of = {name: folder / file for name, file in _weight_map(index).items()}
        elif self._single.exists():
            self._file_of = dict.fromkeys(self._open(self._single).keys(), self._single)
        else:
            raise ModelLoadError(
                f"{folder}: has neither model.safetensors nor model.safetensors.index.json"
            )

    def name(self, part: str, layer: int | None) -> str:
        if layer is None:
            return MODEL_NAMES[part][1]
        name = LAYER_NAMES[part][1]
        if self._config.has_branch_norms:
            name = BRANCH_NORM_NAMES.get(part, name)
        if part in self._rows:
            fused, first, end, _ = self._rows[part]
            name = f"{fused}[{first}:{end}]"
        return f"model.layers.{layer}.{name}"

    def shape(self, name: str) -> Shape | None:
        whole, first, end = _split(name)
        path = self._file_of.get(whole)
        if path is None:
            return None
        tensor = self._slice(path, whole)
        if tensor.get_dtype() not in SAFETENSORS_DTYPES:
            known = ", ".join(SAFETENSORS_DTYPES)
            raise ModelLoadError(
                f"{path}: tensor {whole} has type {tensor.get_dtype()}, which cannot be read (readable: {known})"
            )
        shape = tuple(tensor.get_shape())
        if end is None:
            return shape
        num_rows = next(rows[3] for rows in self._rows.values() if whole.endswith(rows[0]))
        if shape[:1] != (num_rows,):
            raise ModelLoadError(
                f"{path}: tensor {whole} has shape {list(shape)}, expected {[num_rows, *shape[1:]]}"
            )
        return (end - first, *shape[1:])

    def read(self, name: str, part: str) -> Tensor:
        whole, first, end = _split(name)
        path = self._file_of[whole]
        tensor: Tensor = (
            self._open(path).get_tensor(whole)
            if end is None
            else self._slice(path, whole)[first:end]
        )
        tensor = tensor.to(torch.float32)
        return tensor + self._config.norm_offset if part in NORMS else tensor

    def where(self, name: str) -> Path:
        return self._file_of.get(_split(name)[0], self._single)

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path}: cannot be read: {error}") from None
        return self._handles[path]

    def _slice(self, path: Path, name: str) -> Any:
        try:
            return self._open(path).get_slice(name)
        except SafetensorError:
            raise ModelLoadError(
                f"{path}: tensor {name} is missing, though the index names it"
            ) from None


def _fused_rows(config: DecoderConfig) -> dict[str, tuple[str, int, int, int]]:
    """part -> (name, first row, end row, all rows of the tensor that it is in)."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv, gate_up = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
    ffn = config.ffn_size
    return {
        "q": (qkv, 0, q, q + 2 * kv),
        "k": (qkv, q, q + kv, q + 2 * kv),
        "v": (qkv, q + kv, q + 2 * kv, q + 2 * kv),
        "gate": (gate_up, 0, ffn, 2 * ffn),
        "up": (gate_up, ffn, 2 * ffn, 2 * ffn),
    }


def _split(name: str) -> tuple[str, int, int | None]:
    """The tensor that "NAME" or "NAME[first:end]" means, and its rows; None as end for a whole tensor."""
    if not name.endswith("]"):
        return name, 0, None
    whole, _, rows = name[:-1].rpartition("[")
    first, _, end = rows.partition(":")
    return whole, int(first), int(end)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: cannot be read: {type(error).__name__}: {error}") from None


def load_weights(
    source: TensorSource,
    config: DecoderConfig,
    progress: LoadProgress = lambda fraction: None,
    place: Callable[[Tensor], Tensor] | None = None,
) -> DecoderWeights:
    """All weights of the model; `progress` hears the fraction of tensors read so far.

    `place` puts each tensor where it is to stay as soon as it is read: the host holds no more than one of them in float32.
    """
    reader = _Reader(source, config, progress, place or (lambda tensor: tensor))
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
    ) -> None:
        self._source, self._config, self._progress = source, config, progress
        self._place = place
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
            output_bias=self.one("output_bias", layer, (hidden,)) if c.has_output_bias else None,
            ffn_norm=self.one("ffn_norm", layer, (hidden,)),
            gate_up=self.stacked(layer, {"gate": ffn, "up": ffn}, (hidden,)),
            down=self.one("down", layer, (hidden, ffn)),
            attention_branch_norm=self.branch_norm("attention_branch_norm", layer),
            ffn_branch_norm=self.branch_norm("ffn_branch_norm", layer),
        )

    def branch_norm(self, part: str, layer: int) -> Tensor | None:
        has_it = self._config.has_branch_norms
        return self.one(part, layer, (self._config.hidden_size,)) if has_it else None

    def stacked(self, layer: int, rows: dict[str, int], rest: Shape) -> Tensor:
        """Several parts under each other in one tensor, each copied to its place as it is read."""
        out = torch.empty((sum(rows.values()), *rest), dtype=torch.float32)
        start = 0
        for part, size in rows.items():
            out[start : start + size] = self._read(part, layer, (size, *rest))
            start += size
        return self._place(out)

    def one(self, part: str, layer: int | None, shape: Shape) -> Tensor:
        return self._place(self._read(part, layer, shape))

    def _read(self, part: str, layer: int | None, shape: Shape) -> Tensor:
        name = self._source.name(part, layer)
        found = self._source.shape(name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise ModelLoadError(
                f"{self._source.where(name)}: tensor {name} {what}, expected {list(shape)}"
            )
        tensor = self._source.read(name, part).contiguous()
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
