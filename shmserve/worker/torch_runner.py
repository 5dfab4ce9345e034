"""A model of the llama family run by torch over a paged KV cache on the CPU, in float32 or with matrices in bfloat16.

Owns: weights, KV cache, and the step from a `Batch` to its `StepOutput`. Never: knows a request, chooses blocks, or draws from
a global random generator. Worker process, main thread only.

What a sequence gets does not depend on the batch it is computed in, beyond the rounding of float32: the matrix library may
sum in another order for another number of rows, so two batches can differ in the last bits (and a tie can break otherwise),
never in more. Sampling adds nothing to that: each row has its own random stream.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.worker.batch import I4, Batch, StepOutput
from shmserve.worker.models.attention import AttentionPlan, KVCache
from shmserve.worker.models.config import (
    DecoderConfig,
    ModelLoadError,
    config_from_gguf,
)
from shmserve.worker.models.decoder import Decoder
from shmserve.worker.models.hf_config import config_from_hf
from shmserve.worker.models.sources import GGUFSource, SafetensorsSource, TensorSource
from shmserve.worker.models.weights import load_weights
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sizing import StepLimits, sized
from shmserve.worker.torch_output import output_of

if TYPE_CHECKING:
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.team import Team

BYTES_PER_VALUE = 4


class TorchRunner:
    """`ModelRunner` over torch's own operators.

    `num_token_ids` is how many ids have a token, where the model's vocabulary is padded: the others do not exist for anybody.
    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold. Raises ModelLoadError, one line,
    for a model that cannot be loaded or a KV cache too small for one sequence.

    `team`: the model is shared among several ranks, and this is one of them.

    `keeps_bf16`: matrices stay in bfloat16, half the memory, and are multiplied in it: as fast as the CPU's instructions for
    that are, with logits of 8 significant bits. Norms, biases, attention and the KV cache are float32 all the same.
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
        keeps_bf16: bool = False,
        team: Team | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        config, source = open_model(model.weights, model.format)
        share = None if team is None else team.share_of(config, model.weights)
        own, num_kv_heads = config, config.num_kv_heads
        if share is not None:
            own, num_kv_heads = share.partition.own, share.partition.num_kv_heads_of_all
        kv_values = 2 * config.num_layers * num_kv_heads * config.head_dim
        per_block = BYTES_PER_VALUE * kv_values * block_size
        name = "torch-cpu-bf16" if keeps_bf16 else "torch-cpu"
        if team is not None:
            name = f"{name}, {team.group.size} ranks"
        info = sized(name, config, per_block, max_model_len, kv_cache_bytes, block_size)
        num_ids = min(info.vocab_size, num_token_ids or info.vocab_size)
        with torch.inference_mode():
            weights = load_weights(
                source,
                config,
                lambda fraction: progress("loading weights", fraction),
                _matrix_as_bf16 if keeps_bf16 else None,
                None if share is None else share.partition,
            )
            self._decoder = Decoder(config, weights, info.max_model_len, share)
            self._cache = KVCache(
                config.num_layers, info.num_blocks, block_size, own.num_kv_heads, config.head_dim
            )
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        self._team = team
        self._followed: Tensor | None = (
            None  # hidden states of the step that a rank > 0 has computed
        )
        self._info = replace(info, vocab_size=num_ids, max_guesses=max_num_batched_tokens)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self._limits.check(batch)
        if not batch.num_tokens:
            return StepOutput.of_nothing()
        if self._team is not None:
            self._team.compute(batch)
        with torch.inference_mode():
            hidden = self._hidden(batch)
            return output_of(batch, sampling, lambda rows: self._logits(hidden, rows))

    def follow(self, batch: Batch, carried: I4 | None) -> None:
        """Compute this rank's part of a step of rank 0; of a rank > 0. Nothing is ever carried here."""
        with torch.inference_mode():
            self._followed = self._hidden(batch)

    def follow_logits(self, rows: I4) -> None:
        """Compute this rank's part of logits of the step that was followed last."""
        assert self._followed is not None, "logits of no step"
        with torch.inference_mode():
            self._logits(self._followed, rows)

    def _hidden(self, batch: Batch) -> Tensor:
        self._cache.clear_opened(batch.kv_slots)
        return self._decoder.hidden_states(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.kv_slots).long(),
            self._cache,
            {
                window: AttentionPlan(batch, self._info.block_size, window)
                for window in self._windows
            },
        )

    def _logits(self, hidden: Tensor, rows: I4) -> Tensor:
        if self._team is not None:
            self._team.logits(rows)
        return self._decoder.logits(hidden[torch.from_numpy(rows)])[:, : self._info.vocab_size]

    def close(self) -> None:
        """Let weights and cache go, and the other ranks."""
        if self._team is not None:
            self._team.close()
        del self._decoder, self._cache, self._followed


def _matrix_as_bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dim() == 2 else tensor


def open_model(weights: Path, format: str) -> tuple[DecoderConfig, TensorSource]:
    """The configuration of a model and its tensors, not read yet; `weights` is a .gguf file, or a folder of safetensors or a file in it."""
    if format == "gguf":
        try:
            file = GGUFFile(weights)
        except GGUFError as error:
            raise ModelLoadError(str(error)) from None
        shapes = {name: tuple(info.shape) for name, info in file.tensors.items()}
        config = config_from_gguf(weights, file.metadata, shapes)
        return config, GGUFSource(file, config)
    if format == "safetensors":
        folder = weights if weights.is_dir() else weights.parent
        config = config_from_hf(folder / "config.json")
        return config, SafetensorsSource(folder, config)
    raise ModelLoadError(
        f"{weights}: format {format!r} is not supported (supported: gguf, safetensors)"
    )
