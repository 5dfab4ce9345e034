"""From a folder to a model of transformers' own classes: the choice of the class, what is refused at load, and the weights.

Owns: these rules, each with its line for the operator. Never: computes a step, or runs code that comes with a model. Worker process, main
thread only; transformers is imported with this module, which takes seconds.

A model fits if each of its layers keeps no more of the past than keys and values, and attends to them through transformers'
AttentionInterface. What can be told from the configuration and the class is refused here; what only a forward pass shows, by the
survey of hf_attention.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError

if TYPE_CHECKING:
    from shmserve.models import PreparedModel

KNOWN_LAYERS = frozenset(("full_attention", "sliding_attention", "attention"))
RECURRENT = re.compile(
    r"Mamba|SSM|DeltaNet|LinearAttention|LightningAttention|GatedDelta|RWKV|Rwkv|Recurrent|RGLRU|mLSTM|sLSTM|ShortConv"
)
"""Class names of layers whose memory of the past is a state, not keys and values."""

STRETCHED_ROPES = ("dynamic", "longrope")
"""Rotary scalings whose frequencies depend on the longest sequence of a batch, once it outgrows the original context."""


def folder_of(model: PreparedModel) -> Path:
    """Where its safetensors and config.json are."""
    return model.weights if model.weights.is_dir() else model.weights.parent


def config_of(folder: Path) -> Any:
    """The configuration of the model in `folder`, as transformers reads it. Refused if it tells already that the model does not
    fit; code that comes with a model is never run."""
    path = folder / "config.json"
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # its readers raise many kinds; all mean that the file is of no use
        raise ModelLoadError(f"{path}: transformers cannot read it: {_line(error)}") from None
    kind = config.model_type
    if config.is_encoder_decoder:
        raise unfit(path, kind, "it is an encoder with a decoder, which attends across")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unfit(path, kind, "transformers has no class for it that generates text")
    if getattr(config, "quantization_config", None):
        raise unfit(path, kind, "quantised safetensors (quantization_config) are not supported")
    text = config.get_text_config(decoder=True)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS)
    if others:
        raise unfit(path, kind, f"layers of type {', '.join(others)} are not supported")
    return config


def refuse_unshared(folder: Path, config: Any, num_ranks: int) -> None:
    """ModelLoadError, one line, if transformers cannot share this model among so many ranks, by its own plan."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", 0)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not getattr(text, "base_model_tp_plan", None):
        reason = f"transformers has no plan by which {config.model_type} could be shared"
    elif heads % num_ranks or kv_heads % num_ranks:
        reason = (
            f"transformers shares heads evenly, and the model has {heads} over {kv_heads} kv heads"
        )
    elif importlib.util.find_spec("accelerate") is None:
        reason = "transformers shares a model only where accelerate is installed (pip install accelerate)"
    elif torch.accelerator.is_available():
        reason = "transformers' classes are computed on the CPU, and would be shared among GPUs"
    else:
        return
    raise ModelLoadError(f"{folder}: --tensor-parallel {num_ranks}: {reason}")


def load(folder: Path, config: Any, attention: str, num_ranks: int = 1) -> nn.Module:
    """The model with its weights in float32, to attend by the function registered as `attention`; of several ranks, this one's part."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    name = model_class.__name__
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise unfit(folder, name, "it does not take the positions of its tokens")
    try:
        with torch.device("meta"):
            skeleton = model_class(config)
    except Exception as error:  # a class refuses its configuration in many ways
        raise unfit(folder, name, f"it cannot be built: {_line(error)}") from None
    found = sorted(
        {
            type(part).__name__
            for part in skeleton.modules()
            if RECURRENT.search(type(part).__name__)
        }
    )
    if found or getattr(model_class, "_is_stateful", False):
        what = f"layers of type {', '.join(found)}" if found else "layers"
        raise unfit(folder, name, f"{what} keep a state instead of keys and values")
    try:
        model, told = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,  # never its pickled forms, whatever else lies in the folder
            output_loading_info=True,
            **(
                {}
                if num_ranks == 1
                else {"distributed_config": DistributedConfig(tp_size=num_ranks)}
            ),
        )
    except Exception as error:  # as above
        if isinstance(error, KeyError) and error.args == (attention,):
            why = "its attention does not go through transformers' AttentionInterface"
            raise unfit(folder, name, why) from None
        raise ModelLoadError(f"{folder}: {name} cannot be loaded: {_line(error)}") from None
    missing = sorted(told["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{folder}: tensor {missing[0]}{more} of {name} is missing")
    result: nn.Module = model.eval()
    return result


def context_of(text: Any, model: PreparedModel) -> int:
    """The tokens of a sequence for which the rotary frequencies are the same in every batch."""
    ropes = getattr(text, "rope_parameters", None) or {}
    found = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    original = [
        int(rope.get("original_max_position_embeddings") or model.context_length)
        for rope in found
        if rope.get("rope_type") in STRETCHED_ROPES
    ]
    return min([model.context_length, *original])


def unfit(where: Path, name: str, why: str) -> UnknownArchitectureError:
    return UnknownArchitectureError(f"{where}: {name} cannot be served: {why}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
