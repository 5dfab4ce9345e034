"""What a decoder of the llama family looks like: sizes, rotary scaling, windows, biases.

Owns: `DecoderConfig`, and its reading from GGUF metadata (hf_config.py reads a config.json). Never: opens a weight file or imports torch.
Law: a feature that the decoder does not compute is refused here by its name; nothing is ignored that changes the output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.model_cache import ModelError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class ModelLoadError(ModelError):
    """A model that cannot be loaded: one line that names the file and what is wrong with it."""


class UnknownArchitectureError(ModelLoadError):
    """A model that is no decoder of this package; as far as anybody looked, its files may be whole."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. What stands behind `factor` belongs to the kinds that are named there."""

    kind: str = "none"  # none, linear, llama3, yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context_length: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    is_truncated: bool = True  # yarn: the blended range is one of whole dimensions
    magnitude: float = 1.0  # yarn: what cosine and sine are multiplied by


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a layer."""

    theta: float
    scaling: RopeScaling = RopeScaling()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """`sliding_windows` and `ropes` have one entry a layer: how many tokens, itself included, a token sees, None for all; and
    how it is rotated, None for not at all.

    `vocab_size` is the rows of the embedding; a tokenizer may have fewer ids.
    """

    architecture: str
    vocab_size: int
    context_length: int
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    ropes: tuple[Rope | None, ...]
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    tied_head: bool
    has_fused_matrices: bool = (
        False  # q, k and v lie in one tensor of the file, gate and up in another
    )
    activation: str = "silu"  # or gelu_tanh
    has_branch_norms: bool = (
        False  # what attention and feed-forward give is normed before it is added
    )
    norm_offset: float = 0.0  # added to the weights of norms when they are read
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # of queries, besides head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def rope(self) -> Rope:
        """That of all layers that are rotated, where no special feature is used."""
        (rope,) = {rope for rope in self.ropes if rope is not None}
        return rope

    @property
    def special_features(self) -> tuple[str, ...]:
        """What torch and CUDA compute for this model, and the C kernels do not."""
        has = {
            "rotary positions that differ between layers, or none": len({*self.ropes} - {None})
            != 1,
            f"the activation {self.activation}": self.activation != "silu",
            "norms behind attention and feed-forward": self.has_branch_norms,
            "a scaled embedding": self.embedding_scale != 1.0,
            "a scaled query": self.query_scale != 1.0,
            "soft-capped attention": self.attention_softcap is not None,
            "soft-capped logits": self.logit_softcap is not None,
        }
        return tuple(name for name, is_used in has.items() if is_used)


class Fields:
    """Typed look-ups in the metadata of one file; a JSON null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def error(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {text}")

    def unknown(self, text: str) -> UnknownArchitectureError:
        return UnknownArchitectureError(f"{self.path}: {text}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if isinstance(value, np.ndarray | list):  # GGUF allows one value a layer
            values = value.tolist() if isinstance(value, np.ndarray) else value
            if not values or any(each != values[0] for each in values):
                raise self.error(
                    f"{self.prefix}{key} differs between layers, which is not supported"
                )
            value = values[0]
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self.prefix}{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self.prefix}{key} is {value!r}, expected a number")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self.number(key, default))
        if not (0 < value < float("inf")):
            raise self.error(f"{self.prefix}{key} is {value}, expected a positive number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not math.isfinite(value) or value != int(value) or value < 1:
            raise self.error(f"{self.prefix}{key} is {value}, expected a positive integer")
        return int(value)


def config_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> DecoderConfig:
    """The configuration of a GGUF file; `tensors` are its tensor names and shapes, which some fields follow from."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnknownArchitectureError(
            f"{path}: architecture {architecture!r} is not supported (supported: {known})"
        )
    fields = Fields(path, metadata, f"{architecture}.")
    if fields.get("expert_count"):
        raise fields.error("mixture-of-experts models are not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.error("tensor token_embd.weight is missing")
    hidden_size = fields.count("embedding_length")
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", head_dim_of(fields, hidden_size, num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise fields.error(
                f"{fields.prefix}{key} is {fields.get(key)}, but heads have {head_dim}"
            )
    num_layers = fields.count("block_count")
    if num_layers > len(tensors):  # before anything has one entry a layer
        raise fields.error(
            f"{fields.prefix}block_count is {num_layers}, but the file has {len(tensors)} tensors"
        )
    window = fields.number("attention.sliding_window", 0)
    windows = (int(window) if window else None,) * num_layers
    rope = Rope(fields.positive("rope.freq_base", 10000.0), _gguf_rope_scaling(fields))
    return checked(
        fields,
        DecoderConfig(
            architecture=architecture,
            vocab_size=embedding[0],
            context_length=fields.count("context_length"),
            num_layers=num_layers,
            hidden_size=hidden_size,
            ffn_size=fields.count("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=fields.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
            ropes=(rope,) * num_layers,
            sliding_windows=windows,
            has_qkv_bias="blk.0.attn_q.bias" in tensors,
            has_output_bias="blk.0.attn_output.bias" in tensors,
            has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tied_head="output.weight" not in tensors,
        ),
    )


def head_dim_of(fields: Fields, hidden_size: int, num_heads: int) -> int | None:
    """The head size that follows where the file does not say it; None makes its own field required."""
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _gguf_rope_scaling(fields: Fields) -> RopeScaling:
    # llama3's factors come as the tensor rope_freqs.weight, not as metadata.
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        factor = fields.positive("rope.scale_linear", 1.0)  # the key of files before scaling.type
        return RopeScaling("linear", factor) if factor != 1.0 else RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", fields.positive("rope.scaling.factor"))
    raise fields.error(f"rope scaling {kind!r} is not supported (supported: none, linear, llama3)")


def checked(fields: Fields, config: DecoderConfig) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} kv heads evenly"
        )
    if config.head_dim % 2:
        raise fields.error(f"a head size of {config.head_dim} cannot be rotated: it is odd")
    return config
