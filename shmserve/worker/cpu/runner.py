"""A model of the llama family run by the C kernels on the CPU.

Owns: weights, KV cache, threads, and the step from a `Batch` to its `StepOutput`. Never: knows a request, chooses blocks, or
draws from a global random generator. Worker process, main thread only.

Law: the logits of a row, and so its token, do not depend on its batch, on how its prompt was cut into chunks, on its blocks or
on the number of threads, to the last bit.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shmserve.model_cache import cache_root
from shmserve.worker.batch import I4, Batch, PromptPart, PromptScores, StepOutput
from shmserve.worker.cpu import amx
from shmserve.worker.cpu.build import KernelsError, compiled_library
from shmserve.worker.cpu.library import KV_TILE, Engine, Library, block_bytes
from shmserve.worker.cpu.loading import load_model, open_source
from shmserve.worker.cpu.sampling import RowSampler
from shmserve.worker.cpu.selftest import check
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sizing import StepLimits, sized
from shmserve.worker.verification import kept_of, places_of

if TYPE_CHECKING:
    from shmserve.models import PreparedModel


SCORED_TOGETHER = 64
"""Rows of logits of a prompt that are in memory at once."""

MOST_GUESSES = 64
"""Of one step; each has a row of logits."""


class CpuRunner:
    """`ModelRunner` over the C kernels.

    `max_model_len` None means as much of the model's context as `kv_cache_bytes` can hold; `num_threads` None as
    `default_num_threads` says; `num_token_ids` is how many ids have a token, where the model's vocabulary is padded. Raises
    KernelsError, one line, where the kernels cannot be had, do not compute this model or do not fit the block size, and ModelLoadError for a model that cannot be loaded or a KV cache too small for one sequence.
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
        cache: Path | None = None,
        may_use_amx: bool = True,
    ) -> None:
        if block_size % KV_TILE:
            raise KernelsError(f"block size {block_size} is not a multiple of {KV_TILE} tokens")
        # First: a model that is not ours needs no compiler.
        config, source = open_source(model.weights, model.format)
        progress("compiling the CPU kernels", 0.0)
        library = Library(compiled_library(cache or cache_root()))
        check(library)
        if may_use_amx:
            amx.switch_on(library)
        per_block = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, block_size)
        name = f"cpu-{library.variant}"
        info = sized(name, config, per_block, max_model_len, kv_cache_bytes, block_size)
        packed = load_model(
            source,
            config,
            info.max_model_len,
            lambda share: progress("loading weights", share),
            num_token_ids,
        )
        self._limits = StepLimits(max_num_seqs, max(max_num_batched_tokens, max_num_seqs))
        self._info = replace(info, vocab_size=packed.vocab_size, max_guesses=MOST_GUESSES)
        self._engine = Engine(
            library,
            packed,
            num_blocks=info.num_blocks,
            block_size=block_size,
            max_tokens=self._limits.max_num_tokens,
            max_samples=max_num_seqs + MOST_GUESSES,
            num_threads=num_threads or default_num_threads(),
        )
        self._sampler = RowSampler(
            library,
            packed.vocab_size,
            engine=self._engine.handle,
            num_threads=num_threads or default_num_threads(),
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self._limits.check(batch)
        if not batch.num_tokens:
            return StepOutput.of_nothing()
        places = places_of(batch)
        logits, greedy = self._engine.run(batch, places.token_rows)
        rows = places.rows
        token_ids, logprobs, top = greedy.copy(), None, {}
        others = np.flatnonzero(~_is_plain_greedy(rows, sampling))
        if others.size:
            ahead = None if places.ahead is None else places.ahead[others]
            drawn, drawn_logprobs, found = self._sampler.sample(
                logits, rows[others], sampling, others, ahead
            )
            token_ids[others] = drawn
            top = {int(others[index]): likely for index, likely in found.items()}
            if (sampling.num_logprobs[rows] >= 0).any():
                logprobs = np.full(rows.shape[0], np.nan, np.float32)
                logprobs[others] = drawn_logprobs
        kept = kept_of(batch, places, token_ids, logprobs, top)
        return StepOutput(
            token_ids=kept.token_ids,
            time_ns=time.monotonic_ns(),
            counts=kept.counts,
            logprobs=kept.logprobs,
            top=kept.top,
            failed=kept.failed,
            prompt_scores=tuple(map(self._score, batch.prompt_parts)),
        )

    def _score(self, part: PromptPart) -> PromptScores:
        """What the step that was just computed says of a part of a prompt."""
        found = []
        room = self._engine.logits_room(min(SCORED_TOGETHER, len(part.token_ids)))
        for start in range(0, len(part.token_ids), SCORED_TOGETHER):
            targets = part.token_ids[start : start + SCORED_TOGETHER]
            token_rows = part.first_row + start + np.arange(len(targets), dtype=np.int32)
            logits = self._engine.logits_of(token_rows, room)
            found.append(self._sampler.score(logits, targets, part.num_top))
        logprobs, ids, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return PromptScores(part, logprobs, ids, values)

    def close(self) -> None:
        """End the threads, and let weights and cache go."""
        self._engine.close()
        del self._engine


def default_num_threads() -> int:
    """All cores that this process may use but one, which the front end needs; of two cores both.

    On two cores with front end and clients on them, two threads against one gave 1.4 times the tokens/s at B = 1, 1.7 times
    at B = 8 and at B = 16 (tools/bench_engine.py, 512 in, 128 out): the pool never waits for a thread whose core is taken,
    and the front end takes less of a core than a second thread gives.
    """
    num_cores = len(os.sched_getaffinity(0))
    return num_cores if num_cores <= 2 else num_cores - 1


def _is_plain_greedy(rows: I4, state: SamplingState) -> np.ndarray:
    """Rows whose token is the first of the largest raw logits, and of which nobody asked more."""
    result: np.ndarray = state.is_greedy(rows) & (state.num_logprobs[rows] < 0)
    if state.has_edits:
        result &= ~state.is_edited(rows)
    return result
