"""The protocol behind which a model runs: CPU, CUDA, transformers' classes, or a simulated GPU.

A runner owns the weights and the KV cache memory; it knows nothing of requests, rings or text. The engine calls it from
the worker's main thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shmserve.worker.batch import Batch, StepOutput
    from shmserve.worker.sampling_state import SamplingState

Progress = Callable[[str, float], None]
"""Told what is being done and how far it is (0..1) while a runner loads."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What the scheduler must know of a runner.

    num_blocks counts KV blocks of block_size tokens; block 0 is kept for padding and never allocated.
    max_tokens_per_step is 1 unless the runner makes tokens of its own accord, without being given guesses (the scheduler
    then keeps that many KV slots ahead).
    max_guesses: so many guessed tokens it verifies in one step (`Batch.num_drafts`); 0: it cannot, and is given none.
    supports_prefix_cache: rows may share blocks of earlier tokens, those computed in the same step included (block_tables.py).
    """

    name: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_tokens_per_step: int = 1
    supports_prefix_cache: bool = True
    max_guesses: int = 0


class ModelRunner(Protocol):
    """Computes one step at a time."""

    @property
    def info(self) -> RunnerInfo: ...

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute `batch` and sample a token for each of `batch.sample_seqs`. Blocks until the tokens are on the host.

        Raises only for faults of the whole step (the worker then ends); a fault of one sequence is in `StepOutput.failed`.
        """

    def close(self) -> None:
        """Give memory and threads back. Called once."""
