"""Tiny random checkpoints that transformers' own classes make, and the same models by our loader and decoder."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batches import Part, batch_of
from torch import Tensor

from shmserve.worker.models.attention import AttentionPlan, KVCache
from shmserve.worker.models.config import DecoderConfig
from shmserve.worker.models.decoder import Decoder
from shmserve.worker.models.weights import DecoderWeights, load_weights
from shmserve.worker.torch_runner import open_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB, MAX_POSITIONS, BLOCK, NUM_BLOCKS = 61, 96, 16, 40
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 45).tolist()

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
BY_LAYER_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


@dataclass(frozen=True)
class Family:
    """A model class of transformers, and how its toy differs from `SIZES`."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_size: str = "1GB"


FAMILIES = {
    "llama 2": Family("Llama", {"rope_parameters": PLAIN}, torch.float16),
    "llama 3": Family("Llama", {"rope_parameters": LLAMA3}, torch.bfloat16, "30KB"),
    "llama with biases": Family("Llama", {"rope_parameters": PLAIN, "attention_bias": True}),
    "smollm2": Family(
        "Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": True}, torch.bfloat16
    ),
    "mistral": Family("Mistral", {"rope_parameters": PLAIN, "sliding_window": 7}, torch.bfloat16),
    "qwen2": Family("Qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen2 windows": Family(
        "Qwen2",
        {
            "rope_parameters": PLAIN,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen2 yarn": Family("Qwen2", {"rope_parameters": YARN}),
    "qwen3": Family("Qwen3", {"rope_parameters": PLAIN, "head_dim": 16}, torch.bfloat16),
    "smollm3": Family(
        "SmolLM3", {"rope_parameters": PLAIN, "no_rope_layer_interval": 2}, torch.bfloat16
    ),
    "phi3": Family("Phi3", {"rope_parameters": PLAIN, "sliding_window": 9}, torch.bfloat16),
    "gemma": Family("Gemma", {"rope_parameters": PLAIN, "head_dim": 16}),
    "gemma2": Family(
        "Gemma2",
        {
            "rope_parameters": PLAIN,
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        torch.bfloat16,
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "rope_parameters": BY_LAYER_TYPE,
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        torch.bfloat16,
    ),
}
BY_KERNELS = tuple(name for name in FAMILIES if not name.startswith("gemma"))


@dataclass(frozen=True)
class Toy:
    """A checkpoint, and the logits of transformers for `TOKENS` after each of them, in float32."""

    folder: Path
    logits: Tensor

    def config(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return values


class Computed:
    """The decoder over a cache of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self._decoder = Decoder(config, weights, MAX_POSITIONS)
        self._cache = KVCache(
            config.num_layers, NUM_BLOCKS, BLOCK, config.num_kv_heads, config.head_dim
        )

    def logits(self, *parts: Part) -> Tensor:
        """Of every row of the batch."""
        batch = batch_of(*parts)
        plans = {
            window: AttentionPlan(batch, BLOCK, window)
            for window in set(self.config.sliding_windows)
        }
        with torch.inference_mode():
            self._cache.clear_opened(batch.kv_slots)
            hidden = self._decoder.hidden_states(
                torch.from_numpy(batch.token_ids),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.kv_slots).long(),
                self._cache,
                plans,
            )
            return self._decoder.logits(hidden)


def make_toy(folder: Path, family: Family) -> Toy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, of which it has many
        import transformers

        name = f"{family.kind}TextConfig" if family.kind == "Gemma3" else f"{family.kind}Config"
        config = getattr(transformers, name)(**{**SIZES, **family.changes})
        kind = getattr(transformers, f"{family.kind}ForCausalLM")
        torch.manual_seed(11)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Vectors are biases around 0 or gains around what they are made as.
                parameter.copy_(
                    0.25 * torch.randn_like(parameter) + (parameter.dim() == 1) * parameter
                )
        model.to(family.dtype).save_pretrained(folder, max_shard_size=family.shard_size)
        exact = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return Toy(folder, exact(torch.tensor([TOKENS])).logits[0])


def computed(folder: Path) -> Computed:
    config, source = open_model(folder, "safetensors")
    with torch.inference_mode():
        return Computed(config, load_weights(source, config))
