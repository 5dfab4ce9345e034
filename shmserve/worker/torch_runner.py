"""A model of the llama family run by torch over a paged KV cache, in float32 on the CPU.

Owns: weights, KV cache, and the step from a `Batch` to its `StepOutput`. Never: knows a request, chooses blocks, or draws from
a global random generator. Worker process, main thread only.

What a sequence gets does not depend on the batch it is computed in, beyond the rounding of float32: the matrix library may
sum in another order for another number of rows, so two batches can differ in the last bits (and a tie can break otherwise),
never in more. Sampling adds nothing to that: each row has its own random stream.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.worker.batch import Batch, StepOutput
from shmserve.worker.models.attention import AttentionPlan, KVCache
from shmserve.worker.models.config import (
    DecoderConfig,
    ModelLoadError,
    config_from_gguf,
    config_from_hf,
)
from shmserve.worker.models.decoder import Decoder
from shmserve.worker.models.weights import (
    GGUFSource,
    SafetensorsSource,
    TensorSource,
    load_weights,
)
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampler import sample
from shmserve.worker.sampling_state import SamplingState

if TYPE_CHECKING:
    from shmserve.models import PreparedModel

BYTES_PER_VALUE = 4


class TorchRunner:
    """`ModelRunner` over torch's own operators.

    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold. Raises ModelLoadError, one line,
    for a model that cannot be loaded or a KV cache too small for one sequence.
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
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._max_num_seqs, self._max_num_tokens = max_num_seqs, max_num_batched_tokens
        config, source = open_model(model.weights, model.format)
        kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        per_block = BYTES_PER_VALUE * kv_values * block_size
        info = sized("torch-cpu", config, per_block, max_model_len, kv_cache_bytes, block_size)
        with torch.inference_mode():
            weights = load_weights(source, config, lambda share: progress("loading weights", share))
            self._decoder = Decoder(config, weights, info.max_model_len)
            self._cache = KVCache(
                config.num_layers, info.num_blocks, block_size, config.num_kv_heads, config.head_dim
            )
        self._windows = tuple(dict.fromkeys(config.sliding_windows))
        self._info = info

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        assert batch.num_seqs <= self._max_num_seqs, (batch.num_seqs, self._max_num_seqs)
        assert batch.num_tokens <= self._max_num_tokens, (batch.num_tokens, self._max_num_tokens)
        if not batch.num_tokens:
            return StepOutput(np.zeros((0, 1), np.int32), time.monotonic_ns())
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
            if not batch.sample_seqs.size:
                return StepOutput(np.zeros((0, 1), np.int32), time.monotonic_ns())
            last_rows = torch.from_numpy(batch.cu_seqlens[1:][batch.sample_seqs] - 1)
            logits = self._decoder.logits(hidden[last_rows])
            result = sample(logits, batch.rows[batch.sample_seqs], sampling)
        return StepOutput(
            token_ids=result.token_ids[:, None],
            time_ns=time.monotonic_ns(),
            logprobs=None if result.logprobs is None else result.logprobs[:, None],
            top=result.top,
            failed=result.failed,
        )

    def close(self) -> None:
        """Let weights and cache go."""
        del self._decoder, self._cache


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
        return config_from_hf(folder / "config.json"), SafetensorsSource(folder)
    raise ModelLoadError(
        f"{weights}: format {format!r} is not supported (supported: gguf, safetensors)"
    )


def sized(
    name: str,
    config: DecoderConfig,
    bytes_per_block: int,
    max_model_len: int | None,
    kv_cache_bytes: int,
    block_size: int,
) -> RunnerInfo:
    """What fits: block 0 is padding, the others hold the tokens of all sequences."""
    num_blocks = kv_cache_bytes // bytes_per_block
    capacity = (num_blocks - 1) * block_size
    if max_model_len is None:
        max_model_len = min(config.context_length, capacity)
    elif max_model_len > config.context_length:
        raise ModelLoadError(
            f"max_model_len {max_model_len} is beyond the model's context of {config.context_length} tokens"
        )
    if capacity < max(max_model_len, block_size):
        needed = (-(-max(max_model_len, block_size) // block_size) + 1) * bytes_per_block
        raise ModelLoadError(
            f"a KV cache of {kv_cache_bytes} bytes holds {max(capacity, 0)} tokens, but one sequence of "
            f"{max(max_model_len, block_size)} needs {needed} bytes"
        )
    return RunnerInfo(
        name=name,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
    )
