"""A decoder's configuration from the config.json of a Hugging Face checkpoint.

Owns: what each family of checkpoints leaves unsaid, and both spellings of the rotary parameters (transformers before 5 and since).
Never: opens a weight file or imports torch. Law: as in config.py, what the decoder does not compute is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmserve.worker.models.config import (
    DecoderConfig,
    Fields,
    ModelLoadError,
    Rope,
    RopeScaling,
    checked,
    head_dim_of,
)

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MOST_LAYERS = 10_000
LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config.json of this family need not say, and what it cannot say."""

    ties_head: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    theta: float = 10000.0
    windows: str = "never"  # never, all layers, if used, alternating
    window: int | None = 4096  # if the file does not mention it
    full_every: int = 2  # alternating: every so manieth layer sees all
    biases: str = "if said"  # if said, qkv
    has_qk_norm: bool = False
    is_fused: bool = False
    is_gemma: bool = False


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(windows="all layers"),
    "qwen2": _Family(windows="if used", biases="qkv"),
    "qwen3": _Family(windows="if used", head_dim=128, has_qk_norm=True),
    "smollm3": _Family(ties_head=True, theta=2_000_000.0, windows="if used"),
    "phi3": _Family(windows="all layers", window=None, is_fused=True),
    "gemma": _Family(ties_head=True, head_dim=256, is_gemma=True),
    "gemma2": _Family(ties_head=True, head_dim=256, windows="alternating", is_gemma=True),
    "gemma3_text": _Family(
        ties_head=True,
        head_dim=256,
        theta=1_000_000.0,
        windows="alternating",
        full_every=6,
        has_qk_norm=True,
        is_gemma=True,
    ),
}
HF_ARCHITECTURES = tuple(FAMILIES)


def config_from_hf(path: Path) -> DecoderConfig:
    """The configuration that the config.json at `path` describes."""
    fields = _opened(path)
    architecture = fields.get("model_type")
    if architecture not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise fields.unknown(f"model_type {architecture!r} is not supported (supported: {known})")
    family = FAMILIES[architecture]
    _refuse_others(fields, architecture)
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    if num_layers > MOST_LAYERS:  # before anything has one entry a layer
        raise fields.error(
            f"num_hidden_layers is {num_layers}, at most {MOST_LAYERS} are supported"
        )
    head_dim = family.head_dim or head_dim_of(fields, hidden_size, num_heads)
    head_dim = fields.count("head_dim", head_dim)
    is_rotated = _rotated_layers(fields, architecture, num_layers)
    is_sliding = _sliding_layers(fields, family, is_rotated)
    window = _window(fields, family)
    ropes = _ropes(fields, architecture, family)
    has_bias = family.biases == "if said" and bool(fields.get("attention_bias"))
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        context_length=_context_length(fields, ropes),
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=fields.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", None if family.is_gemma else num_heads),
        head_dim=head_dim,
        norm_eps=fields.positive("rms_norm_eps"),
        ropes=tuple(
            ropes[sliding] if rotated else None
            for rotated, sliding in zip(is_rotated, is_sliding, strict=True)
        ),
        sliding_windows=tuple(window if sliding else None for sliding in is_sliding),
        has_qkv_bias=family.biases == "qkv" or has_bias,
        has_output_bias=has_bias,
        has_qk_norm=family.has_qk_norm,
        has_branch_norms=architecture in ("gemma2", "gemma3_text"),
        has_fused_matrices=family.is_fused,
        tied_head=bool(fields.get("tie_word_embeddings", family.ties_head)),
        activation="gelu_tanh" if family.is_gemma else "silu",
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=math.sqrt(hidden_size) if family.is_gemma else 1.0,
        query_scale=_query_scale(fields, architecture, head_dim),
        attention_softcap=_softcap(fields, architecture, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, architecture, "final_logit_softcapping", 30.0),
    )
    return checked(fields, config)


def _opened(path: Path) -> Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return Fields(path, values)


def _refuse_others(fields: Fields, architecture: str) -> None:
    """Fields that change the output and that are not computed."""
    activations: tuple[str, ...] = ("silu",)
    if FAMILIES[architecture].is_gemma:
        activations = ("gelu_pytorch_tanh",)
        if architecture == "gemma":
            activations += ("gelu",)  # a legacy value of the official files, which means the other
    for key, plain in (
        (
            "hidden_activation" if "hidden_activation" in fields.values else "hidden_act",
            activations,
        ),
        ("mlp_bias", (False,)),
        ("partial_rotary_factor", (1.0,)),
        ("use_bidirectional_attention", (False,)),
    ):
        if (value := fields.get(key)) is not None and value not in plain:
            raise fields.unknown(f"{key} {value!r} is not supported (only {plain[0]!r})")
    if fields.get("quantization_config"):
        raise fields.error("quantised safetensors (quantization_config) are not supported")
    if architecture == "gemma3_text" and fields.get("attn_logit_softcapping"):
        raise fields.unknown("attn_logit_softcapping is not supported in gemma3_text")


# --- which layers do what


def _rotated_layers(fields: Fields, architecture: str, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves some layers without positions."""
    if architecture != "smollm3":
        return (True,) * num_layers
    said = fields.get("no_rope_layers")
    if said is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(said, list) or len(said) < num_layers or not set(said) <= {0, 1}:
        raise fields.error(f"no_rope_layers must say 1 or 0 for each of the {num_layers} layers")
    return tuple(value == 1 for value in said[:num_layers])


def _sliding_layers(
    fields: Fields, family: _Family, is_rotated: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Mistral windows every layer; Qwen and SmolLM3 only if `use_sliding_window`; `layer_types` overrule."""
    num_layers = len(is_rotated)
    if family.windows == "never":
        return (False,) * num_layers
    if family.windows == "if used" and not fields.get("use_sliding_window"):
        return (False,) * num_layers
    kinds = fields.get("layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(kind in LAYER_KINDS for kind in kinds)
        ):
            known = " or ".join(LAYER_KINDS)
            raise fields.error(f"layer_types must say {known} for each of the {num_layers} layers")
        return tuple(kind == "sliding_attention" for kind in kinds)
    if family.windows == "alternating":
        every = fields.count("sliding_window_pattern", family.full_every)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if not all(is_rotated):
        return tuple(not rotated for rotated in is_rotated)
    first = int(fields.number("max_window_layers", 28)) if family.windows == "if used" else 0
    return tuple(layer >= first for layer in range(num_layers))


def _window(fields: Fields, family: _Family) -> int | None:
    """null means no window; a file that does not mention it relies on the family's own."""
    if family.windows == "never" or fields.values.get("sliding_window", family.window) is None:
        return None
    return fields.count("sliding_window", family.window)


# --- rotary positions


def _ropes(fields: Fields, architecture: str, family: _Family) -> tuple[Rope, Rope]:
    """Of the layers that see all, and of those with a window."""
    if architecture != "gemma3_text":
        rope = _rope(fields, _rope_values(fields, architecture), family.theta)
        return rope, rope
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    if new is not None and (not isinstance(new, dict) or not new.keys() <= set(LAYER_KINDS)):
        raise fields.error(f"rope_parameters are {new!r}, expected an object by layer type")
    full, sliding = ((new or {}).get(kind) or {} for kind in LAYER_KINDS)
    local = fields.positive("rope_local_base_freq", 10000.0)
    return (
        _rope(fields, {**full, **(old or {})}, family.theta),
        _rope(fields, sliding, local, has_own_theta=True),
    )


def _rope_values(fields: Fields, architecture: str) -> dict[str, Any]:
    values = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise fields.error(f"the rotary parameters are {values!r}, expected an object")
    if nested := sorted(key for key, value in values.items() if isinstance(value, dict)):
        raise fields.unknown(
            f"rotary parameters by layer type ({', '.join(nested)}) are not supported in {architecture}"
        )
    return values


def _rope(
    fields: Fields, values: Mapping[str, Any], theta: float, *, has_own_theta: bool = False
) -> Rope:
    """`theta` is used where the file gives none; a `has_own_theta` does not look at the file's general one."""
    general = None if has_own_theta else fields.get("rope_theta")
    rope = Fields(fields.path, {**values, "rope_theta": values.get("rope_theta") or general})
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise rope.unknown(f"partial_rotary_factor {partial!r} is not supported (only 1.0)")
    context_length = fields.count("max_position_embeddings")
    return Rope(rope.positive("rope_theta", theta), _scaling(rope, context_length))


def _context_length(fields: Fields, ropes: tuple[Rope, Rope]) -> int:
    """What YaRN stretches the positions to, where the file still says what the model was trained with: as Qwen tells its users to do."""
    stretched = (
        int(scaling.original_context_length * scaling.factor)
        for scaling in (rope.scaling for rope in ropes)
        if scaling.kind == "yarn"
    )
    return max(fields.count("max_position_embeddings"), *stretched, 0)


def _scaling(rope: Fields, context_length: int) -> RopeScaling:
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
            original_context_length=rope.count("original_max_position_embeddings", context_length),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise rope.error("low_freq_factor is not below high_freq_factor")
        return scaling
    if kind == "yarn":
        return _yarn(rope, context_length)
    known = ", ".join(ROPE_KINDS)
    raise rope.unknown(f"rope scaling {kind!r} is not supported (supported: {known})")


def _yarn(rope: Fields, context_length: int) -> RopeScaling:
    original = rope.count("original_max_position_embeddings", context_length)
    factor = rope.positive("factor", context_length / original)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = (rope.get("mscale"), rope.get("mscale_all_dim"))
    natural = magnitude(1.0)
    if all(weights):
        natural = magnitude(rope.positive("mscale")) / magnitude(rope.positive("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context_length=original,
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        is_truncated=bool(rope.values.get("truncate", True)),
        magnitude=rope.positive("attention_factor", natural),
    )


# --- Gemma's own


def _query_scale(fields: Fields, architecture: str, head_dim: int) -> float:
    if architecture not in ("gemma2", "gemma3_text"):
        return 1.0
    return math.sqrt(head_dim / fields.positive("query_pre_attn_scalar", 256.0))


def _softcap(fields: Fields, architecture: str, key: str, default: float) -> float | None:
    """Gemma 2 has both of them if its file does not say otherwise, Gemma 3 none."""
    if architecture not in ("gemma2", "gemma3_text"):
        return None
    said = fields.values.get(key, default if architecture == "gemma2" else None)
    return None if said is None else fields.positive(key, default)
