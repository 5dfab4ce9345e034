"""What a decoder of the llama family looks like: sizes, rotary scaling, windows, biases.

Owns: `DecoderConfig`, read from GGUF metadata or from a Hugging Face config.json. Never: opens a weight file or imports torch.
Law: a feature that the decoder does not compute is refused here by its name; nothing is ignored that changes the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.model_cache import ModelError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
HF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class ModelLoadError(ModelError):
    """A model that cannot be loaded: one line that names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. The last three fields belong to `llama3` alone."""

    kind: str = "none"  # none, linear, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """`sliding_windows` has one entry a layer: how many tokens, itself included, a token sees; None means all."""

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
    rope_theta: float
    rope_scaling: RopeScaling
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    tied_head: bool


class _Fields:
    """Typed look-ups in the metadata of one file; a JSON null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def error(self, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {text}")

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if isinstance(value, np.ndarray | list):  # GGUF allows one value a layer
            distinct = set(np.asarray(value).tolist())
            if len(distinct) != 1:
                raise self.error(
                    f"{self.prefix}{key} differs between layers, which is not supported"
                )
            value = distinct.pop()
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
        if value != int(value) or value < 1:
            raise self.error(f"{self.prefix}{key} is {value}, expected a positive integer")
        return int(value)


def config_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> DecoderConfig:
    """The configuration of a GGUF file; `tensors` are its tensor names and shapes, which some fields follow from."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ModelLoadError(
            f"{path}: architecture {architecture!r} is not supported (supported: {known})"
        )
    fields = _Fields(path, metadata, f"{architecture}.")
    if fields.get("expert_count"):
        raise fields.error("mixture-of-experts models are not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.error("tensor token_embd.weight is missing")
    hidden_size = fields.count("embedding_length")
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", _head_dim(fields, hidden_size, num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise fields.error(
                f"{fields.prefix}{key} is {fields.get(key)}, but heads have {head_dim}"
            )
    num_layers = fields.count("block_count")
    window = fields.number("attention.sliding_window", 0)
    windows = (int(window) if window else None,) * num_layers
    return _checked(
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
            rope_theta=fields.positive("rope.freq_base", 10000.0),
            rope_scaling=_gguf_rope_scaling(fields),
            sliding_windows=windows,
            has_qkv_bias="blk.0.attn_q.bias" in tensors,
            has_output_bias="blk.0.attn_output.bias" in tensors,
            has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tied_head="output.weight" not in tensors,
        ),
    )


def config_from_hf(path: Path) -> DecoderConfig:
    """The configuration that the config.json at `path` describes."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    fields = _Fields(path, values)
    architecture = values.get("model_type")
    if architecture not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise ModelLoadError(
            f"{path}: model_type {architecture!r} is not supported (supported: {known})"
        )
    for key, plain in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)):
        if values.get(key, plain) not in (plain, None):
            raise fields.error(f"{key} {values[key]!r} is not supported (only {plain!r})")
    if values.get("quantization_config"):
        raise fields.error("quantised safetensors (quantization_config) are not supported")
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise fields.error(f"the rotary parameters are {rope!r}, expected an object")
    rope_fields = _Fields(path, {"rope_theta": values.get("rope_theta"), **rope})
    head_dim = 128 if architecture == "qwen3" else _head_dim(fields, hidden_size, num_heads)
    has_bias = bool(values.get("attention_bias", False))
    return _checked(
        fields,
        DecoderConfig(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            context_length=fields.count("max_position_embeddings"),
            num_layers=num_layers,
            hidden_size=hidden_size,
            ffn_size=fields.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=fields.count("head_dim", head_dim),
            norm_eps=fields.positive("rms_norm_eps"),
            rope_theta=rope_fields.positive("rope_theta", 10000.0),
            rope_scaling=_hf_rope_scaling(rope_fields),
            sliding_windows=_hf_windows(fields, architecture, num_layers),
            has_qkv_bias=architecture == "qwen2" or has_bias,
            has_output_bias=architecture != "qwen2" and has_bias,
            has_qk_norm=architecture == "qwen3",
            tied_head=bool(values.get("tie_word_embeddings", False)),
        ),
    )


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int | None:
    """The head size that follows where the file does not say it; None makes its own field required."""
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _gguf_rope_scaling(fields: _Fields) -> RopeScaling:
    # llama3's factors come as the tensor rope_freqs.weight, not as metadata.
    kind = fields.get("rope.scaling.type") or "none"
    if kind == "none":
        factor = fields.positive("rope.scale_linear", 1.0)  # the key of files before scaling.type
        return RopeScaling("linear", factor) if factor != 1.0 else RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", fields.positive("rope.scaling.factor"))
    raise fields.error(f"rope scaling {kind!r} is not supported (supported: none, linear, llama3)")


def _hf_rope_scaling(rope: _Fields) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", rope.positive("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_context_length=rope.count("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise rope.error("low_freq_factor is not below high_freq_factor")
        return scaling
    raise rope.error(f"rope scaling {kind!r} is not supported (supported: default, linear, llama3)")


def _hf_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral windows every layer; Qwen only if `use_sliding_window`, from `max_window_layers` on; `layer_types` overrule."""
    is_qwen = architecture.startswith("qwen")
    has_window = architecture == "mistral" or (is_qwen and fields.get("use_sliding_window"))
    # null means no window; a file that does not mention it relies on the default of these architectures
    if not has_window or fields.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = fields.count("sliding_window", 4096)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = int(fields.number("max_window_layers", 28)) if is_qwen else 0
        return tuple(window if layer >= first else None for layer in range(num_layers))
    by_kind: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= by_kind.keys():
        known = " or ".join(by_kind)
        raise fields.error(f"layer_types must say {known} for each of the {num_layers} layers")
    return tuple(by_kind[kind] for kind in kinds)


def _checked(fields: _Fields, config: DecoderConfig) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"{config.num_heads} heads cannot share {config.num_kv_heads} kv heads evenly"
        )
    if config.head_dim % 2:
        raise fields.error(f"a head size of {config.head_dim} cannot be rotated: it is odd")
    return config
