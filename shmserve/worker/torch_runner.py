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

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.worker.batch import Batch, StepOutput
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

BYTES_PER_VALUE = 4


class TorchRunner:
    """`ModelRunner` over torch's own operators.

    `num_token_ids` is how many ids have a token, where the model's vocabulary is padded: the others do not exist for anybody.
    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold. Raises ModelLoadError, one line,
    for a model that cannot be loaded or a KV cache too small for one sequence.

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
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._limits = StepLimits(max_num_seqs, max_num_batched_tokens)
        config, source = open_model(model.weights, model.format)
        kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        per_block = BYTES_PER_VALUE * kv_values * block_size
        name = "torch-cpu-bf16" if keeps_bf16 else "torch-cpu"
        info = sized(name, config, per_block, max_model_len, kv_cache_bytes, block_size)
        num_ids = min(info.vocab_size, num_token_ids or info.vocab_size)
        with torch.inference_mode():
            weights = load_weights(
                source,
                config,
                lambda share: progress("loading weights", share),
                _matrix_as_bf16 if keeps_bf16 else None,
            )
            self._decoder = Decoder(config, weights, info.max_model_len)
            self._cache = KVCache(
                config.num_layers, info.num_blocks, block_size, config.num_kv_heads, config.head_dim
            )
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        self._info = replace(info, vocab_size=num_ids, max_guesses=max_num_batched_tokens)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self._limits.check(batch)
        if not batch.num_tokens:
            return StepOutput.of_nothing()
        num_ids = self._info.vocab_size
        with torch.inference_mode():
            self._cache.clear_opened(batch.kv_slots)
            hidden = self._decoder.hidden_states(
                torch.from_numpy(batch.token_ids),
                torch.from_numpy(batch.positions),
                torch.from_numpy(batch.kv_slots).long(),
                self._cache,
                {
                    window: AttentionPlan(batch, self._info.block_size, window)
                    for window in self._windows
                },
            )
            return output_of(
                batch,
                sampling,
                lambda rows: self._decoder.logits(hidden[torch.from_numpy(rows)])[:, :num_ids],
            )

    def close(self) -> None:
        """Let weights and cache go."""
        del self._decoder, self._cache


def _matrix_as_bf16(tensor: torch.Tensor) -> torch.Tensor:
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
