"""Any decoder of transformers, run by its own classes with our paged attention, in float32 on the CPU.

Owns: the choice of the class, what is refused at load, and the step from a `Batch` to its `StepOutput`. Never: knows a request,
chooses blocks, or runs code that comes with a model. Worker process, main thread only; transformers is imported with this module,
which takes seconds, so it is imported for a model that nothing else can run.

A model fits if each of its layers keeps no more of the past than keys and values, and attends to them through transformers'
AttentionInterface. Any other is refused at load in one line that names what does not fit. The speed is that of eager torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shmserve.worker.batch import I4, Batch, StepOutput
from shmserve.worker.hf_attention import PagedAttention, Survey, UnfitAttentionError
from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sizing import StepLimits, sized
from shmserve.worker.torch_output import output_of, rows_needed

if TYPE_CHECKING:
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.team import Team

log = logging.getLogger(__name__)

BYTES_PER_VALUE = 4
SURVEYED_TOKENS = 4

KNOWN_LAYERS = frozenset(("full_attention", "sliding_attention", "attention"))
RECURRENT = re.compile(
    r"Mamba|SSM|DeltaNet|LinearAttention|LightningAttention|GatedDelta|RWKV|Rwkv|Recurrent|RGLRU|mLSTM|sLSTM|ShortConv"
)
"""Class names of layers whose memory of the past is a state, not keys and values."""

STRETCHED_ROPES = ("dynamic", "longrope")
"""Rotary scalings whose frequencies depend on the longest sequence of a batch, once it outgrows the original context."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    vocab_size: int
    context_length: int


class HFRunner:
    """`ModelRunner` over a model class of transformers.

    `team`: transformers shares the model among several ranks by its own plan (`refuse_unshared` tells whether it can), and this is one
    of them; `kv_cache_bytes` is what all of them keep together.

    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold; `num_token_ids` is how many ids have a
    token, where the model's vocabulary is padded: the others do not exist for anybody. Raises ModelLoadError, one line, for a
    model that does not fit, cannot be loaded, or for a KV cache too small for one sequence.
    """

    def __init__(
        self,
        model: PreparedModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        kv_cache_bytes: int,
        block_size: int = 16,
        num_threads: int | None,
        progress: Progress,
        num_token_ids: int | None = None,
        team: Team | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        if model.format != "safetensors":
            raise UnknownArchitectureError(
                f"{model.weights}: transformers' classes read safetensors, not {model.format}"
            )
        folder = folder_of(model)
        # What it has to say to a person goes through our own lines.
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        config = config_of(folder)
        num_ranks = 1 if team is None else team.group.size
        self._attention = PagedAttention()
        progress("loading weights", 0.0)
        self._model = load(folder, config, self._attention.name, num_ranks)
        self._takes_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        text = config.get_text_config(decoder=True)
        sizes = _Sizes(self._model.get_output_embeddings().weight.shape[0], _context(text, model))
        survey = self._surveyed(folder, text, sizes.context_length)
        per_token = sum(shape.values_per_token for shape in survey.layers.values())
        per_block = BYTES_PER_VALUE * per_token * block_size  # of this rank's heads
        if team is not None:
            kv_cache_bytes = per_block * team.group.least(kv_cache_bytes // num_ranks // per_block)
        info = sized(
            "hf-cpu" if team is None else f"hf-cpu, {num_ranks} ranks",
            sizes,
            per_block,
            max_model_len,
            kv_cache_bytes,
            block_size,
        )
        self._attention.allocate(survey, info.num_blocks, block_size)
        num_ids = min(info.vocab_size, num_token_ids or info.vocab_size)
        self._info = replace(info, vocab_size=num_ids, max_guesses=max_num_batched_tokens)
        self._team = team
        self._followed: Batch | None = None
        log.info(
            "%s is computed by transformers' %s with paged attention, at the speed of eager torch",
            model.name,
            type(self._model).__name__,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self._limits.check(batch)
        if not batch.num_tokens:
            return StepOutput.of_nothing()
        rows = rows_needed(batch)
        if self._team is not None:
            self._team.compute(batch)
            self._team.logits(rows)
        with torch.inference_mode():
            self._attention.begin(batch)
            logits = self._logits(batch.token_ids, batch.positions, rows)
            return output_of(
                batch,
                sampling,
                lambda wanted: logits[torch.from_numpy(np.searchsorted(rows, wanted))],
            )

    def follow(self, batch: Batch, carried: I4 | None) -> None:
        """Note a step of rank 0; of a rank > 0. Its forward pass comes with the rows whose logits it ends with."""
        self._followed = batch

    def follow_logits(self, rows: I4) -> None:
        """Compute this rank's part of the step that was noted last."""
        batch = self._followed
        assert batch is not None, "logits of no step"
        with torch.inference_mode():
            self._attention.begin(batch)
            self._logits(batch.token_ids, batch.positions, rows)

    def close(self) -> None:
        """Let weights and cache go, and the other ranks."""
        if self._team is not None:
            self._team.close()
        self._attention.release()
        del self._model

    def _logits(self, token_ids: I4, positions: I4, rows: I4) -> Tensor:
        """f32[len(rows), num_ids], of a flat batch."""
        keep = torch.from_numpy(rows).long()
        logits: Tensor = self._model(
            input_ids=torch.from_numpy(token_ids).long()[None],
            position_ids=torch.from_numpy(positions).long()[None],
            use_cache=False,
            **({"logits_to_keep": keep} if self._takes_rows else {}),
        ).logits[0]
        return (logits if self._takes_rows else logits[keep])[:, : self._info.vocab_size].float()

    def _surveyed(self, folder: Path, text: Any, context_length: int) -> Survey:
        def forward() -> object:
            count = min(SURVEYED_TOKENS, context_length)
            return self._model(
                input_ids=torch.zeros((1, count), dtype=torch.long),
                position_ids=torch.arange(count)[None],
                use_cache=False,
            )

        try:
            with torch.inference_mode():
                survey = self._attention.survey(context_length, forward)
            survey.check(text.num_hidden_layers)
        except UnfitAttentionError as error:
            raise _unfit(folder, type(self._model).__name__, str(error)) from None
        return survey


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
        raise _unfit(path, kind, "it is an encoder with a decoder, which attends across")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unfit(path, kind, "transformers has no class for it that generates text")
    if getattr(config, "quantization_config", None):
        raise _unfit(path, kind, "quantised safetensors (quantization_config) are not supported")
    text = config.get_text_config(decoder=True)
    others = sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS)
    if others:
        raise _unfit(path, kind, f"layers of type {', '.join(others)} are not supported")
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
        raise _unfit(folder, name, "it does not take the positions of its tokens")
    try:
        with torch.device("meta"):
            skeleton = model_class(config)
    except Exception as error:  # a class refuses its configuration in many ways
        raise _unfit(folder, name, f"it cannot be built: {_line(error)}") from None
    found = sorted(
        {
            type(part).__name__
            for part in skeleton.modules()
            if RECURRENT.search(type(part).__name__)
        }
    )
    if found or getattr(model_class, "_is_stateful", False):
        what = f"layers of type {', '.join(found)}" if found else "layers"
        raise _unfit(folder, name, f"{what} keep a state instead of keys and values")
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
            raise _unfit(folder, name, why) from None
        raise ModelLoadError(f"{folder}: {name} cannot be loaded: {_line(error)}") from None
    missing = sorted(told["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{folder}: tensor {missing[0]}{more} of {name} is missing")
    result: nn.Module = model.eval()
    return result


def _context(text: Any, model: PreparedModel) -> int:
    """The tokens of a sequence for which the rotary frequencies are the same in every batch."""
    ropes = getattr(text, "rope_parameters", None) or {}
    found = [ropes, *(value for value in ropes.values() if isinstance(value, dict))]
    original = [
        int(rope.get("original_max_position_embeddings") or model.context_length)
        for rope in found
        if rope.get("rope_type") in STRETCHED_ROPES
    ]
    return min([model.context_length, *original])


def _unfit(where: Path, name: str, why: str) -> UnknownArchitectureError:
    return UnknownArchitectureError(f"{where}: {name} cannot be served: {why}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
