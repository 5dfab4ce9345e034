"""A model of the llama family run by the C kernels on the CPU.

Owns: weights, KV cache, threads, and the step from a `Batch` to its `StepOutput`. Never: knows a request, chooses blocks, or
draws from a global random generator. Worker process, main thread only.

Law: the logits of a row, and so its token, do not depend on its batch, on how its prompt was cut into chunks, on its blocks or
on the number of threads, to the last bit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shmserve.model_cache import cache_root
from shmserve.worker.batch import F4, I4, Batch, StepOutput
from shmserve.worker.cpu.build import KernelsError, compiled_library
from shmserve.worker.cpu.library import KV_TILE, Engine, Library, block_bytes
from shmserve.worker.cpu.loading import load_model, open_source
from shmserve.worker.cpu.selftest import check
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampler import GREEDY_BELOW, sample
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import sized

if TYPE_CHECKING:
    from shmserve.models import PreparedModel


class CpuRunner:
    """`ModelRunner` over the C kernels.

    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold; `num_threads` None all cores but
    one, which the front end needs. Raises KernelsError, one line, where the kernels cannot be had or do not fit the
    block size, and ModelLoadError for a model that cannot be loaded or a KV cache too small for one sequence.
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
        cache: Path | None = None,
    ) -> None:
        if block_size % KV_TILE:
            raise KernelsError(f"block size {block_size} is not a multiple of {KV_TILE} tokens")
        progress("compiling the CPU kernels", 0.0)
        library = Library(compiled_library(cache or cache_root()))
        check(library)
        # The sampler's products are small: more threads would only wait for each other.
        torch.set_num_threads(1)
        config, source = open_source(model.weights, model.format)
        per_block = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, block_size)
        name = f"cpu-{library.variant}"
        info = sized(name, config, per_block, max_model_len, kv_cache_bytes, block_size)
        packed = load_model(
            source, config, info.max_model_len, lambda share: progress("loading weights", share)
        )
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max(max_num_batched_tokens, max_num_seqs)
        self._info = info
        self._engine = Engine(
            library,
            packed,
            num_blocks=info.num_blocks,
            block_size=block_size,
            max_tokens=self._max_num_tokens,
            max_samples=max_num_seqs,
            num_threads=num_threads or default_num_threads(),
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        assert batch.num_seqs <= self._max_num_seqs, (batch.num_seqs, self._max_num_seqs)
        assert batch.num_tokens <= self._max_num_tokens, (batch.num_tokens, self._max_num_tokens)
        if not batch.num_tokens:
            return StepOutput(np.zeros((0, 1), np.int32), time.monotonic_ns())
        logits, greedy = self._engine.run(batch)
        rows = batch.rows[batch.sample_seqs]
        others = np.flatnonzero(~_is_plain_greedy(rows, sampling))
        if others.size:
            return _sampled(logits, greedy, rows, others, sampling)
        return StepOutput(
            token_ids=np.maximum(greedy, 0)[:, None],
            time_ns=time.monotonic_ns(),
            failed=tuple(np.flatnonzero(greedy < 0).tolist()),
        )

    def close(self) -> None:
        """End the threads, and let weights and cache go."""
        self._engine.close()
        del self._engine


def default_num_threads() -> int:
    """All cores that this process may use but one, and at least one."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _is_plain_greedy(rows: I4, state: SamplingState) -> np.ndarray:
    """Rows whose token is the first of the largest raw logits, and of which nobody asked more."""
    is_greedy = (state.temperature[rows] < GREEDY_BELOW) | (state.top_k[rows] == 1)
    is_plain = (
        (state.num_logprobs[rows] < 0)
        & (state.frequency_penalty[rows] == 0)
        & (state.presence_penalty[rows] == 0)
        & (state.repetition_penalty[rows] == 1)
    )
    result: np.ndarray = is_greedy & is_plain
    if state.bias or state.banned_early:
        has_edit = [row in state.bias or row in state.banned_early for row in rows.tolist()]
        result &= ~np.array(has_edit, np.bool_)
    return result


def _sampled(
    logits: F4, greedy: I4, rows: I4, others: np.ndarray, state: SamplingState
) -> StepOutput:
    """The step's output where the rows `others` go through the sampler."""
    result = sample(torch.from_numpy(logits[others]), rows[others], state)
    token_ids, failed = np.maximum(greedy, 0), set(np.flatnonzero(greedy < 0).tolist())
    token_ids[others] = result.token_ids
    failed = (failed - set(others.tolist())) | {int(others[index]) for index in result.failed}
    logprobs = None
    if result.logprobs is not None:
        logprobs = np.full((rows.shape[0], 1), np.nan, np.float32)
        logprobs[others, 0] = result.logprobs
    top = result.top and {int(others[index]): value for index, value in result.top.items()}
    return StepOutput(
        token_ids=token_ids[:, None],
        time_ns=time.monotonic_ns(),
        logprobs=logprobs,
        top=top,
        failed=tuple(sorted(failed)),
    )
