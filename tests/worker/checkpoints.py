"""Small random checkpoints of the llama family, written by hand, and how a runner is told of one.

`models/toys.py` has those that transformers' own classes make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from shmserve.models import PreparedModel

Weights = dict[str, npt.NDArray[np.float32]]

TOY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GEMMA2_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def random_weights(config: Mapping[str, Any], seed: int = 0, scale: float = 0.3) -> Weights:
    """Every tensor that a checkpoint of this configuration has: matrices around 0, gains around 1."""
    rng = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or hidden // num_q
    kind, vocab = config["model_type"], config["vocab_size"]

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    def gain(size: int) -> npt.NDArray[np.float32]:
        return (1 + scale * rng.normal(size=size)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(vocab, hidden), "model.norm.weight": gain(hidden)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = gain(hidden)
        out[at + "post_attention_layernorm.weight"] = gain(hidden)
        for name in GEMMA2_NORMS if kind == "gemma2" else ():
            out[f"{at}{name}.weight"] = gain(hidden)
        for name, heads in (("q", num_q), ("k", num_kv), ("v", num_kv)):
            out[f"{at}self_attn.{name}_proj.weight"] = matrix(heads * head, hidden)
            if kind == "qwen2" or config.get("attention_bias"):
                out[f"{at}self_attn.{name}_proj.bias"] = matrix(heads * head)
        out[at + "self_attn.o_proj.weight"] = matrix(hidden, num_q * head)
        if config.get("attention_bias"):
            out[at + "self_attn.o_proj.bias"] = matrix(hidden)
        if kind == "qwen3":
            out[at + "self_attn.q_norm.weight"] = gain(head)
            out[at + "self_attn.k_norm.weight"] = gain(head)
        out[at + "mlp.gate_proj.weight"] = matrix(ffn, hidden)
        out[at + "mlp.up_proj.weight"] = matrix(ffn, hidden)
        out[at + "mlp.down_proj.weight"] = matrix(hidden, ffn)
    return out


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    weights: Weights,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_toy(
    folder: Path,
    *,
    seed: int = 3,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    poison_token: int | None = None,
    **changes: Any,
) -> Path:
    """A model that differs from TOY by `changes`; the embedding of `poison_token` is not finite."""
    config = TOY | changes
    weights = random_weights(config, seed, scale)
    if poison_token is not None:
        weights["model.embed_tokens.weight"][poison_token] = np.inf
    return write_folder(folder, config, weights, dtype)


def prepared(weights: Path, **changes: Any) -> PreparedModel:
    """The model in a folder, or of a file. What is not told of its sizes is read from its config.json."""
    folder = weights if weights.is_dir() else weights.parent
    if not {"vocab_size", "context_length"} <= changes.keys():
        config = json.loads((folder / "config.json").read_text())
        sizes = {"vocab_size": "vocab_size", "context_length": "max_position_embeddings"}
        changes = {field: config[name] for field, name in sizes.items()} | changes
    fields: dict[str, Any] = {
        "folder": folder,
        "name": "toy",
        "spec": str(weights),
        "weights": weights,
        "format": "safetensors",
        "architecture": "toy",
        "bos_token_id": None,
        "eos_token_ids": (0,),
        "pad_token_id": None,
        "unk_token_id": None,
        "add_bos_token": False,
        "special_token_ids": (),
        "chat_template": None,
        "token_bytes_exact": True,
        "strips_leading_space": False,
    }
    return PreparedModel(**{**fields, **changes})
