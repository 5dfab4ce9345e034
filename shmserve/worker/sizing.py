"""How many KV blocks a memory of given size holds, how long a sequence may be, and how much one step may compute.

Owns: the numbers, and the refusal that names them. Never: allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shmserve.worker.batch import Batch
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.runner import RunnerInfo


class Sizes(Protocol):
    """Of a model, what bounds a request."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a runner's buffers are made for; the scheduler keeps to it."""

    max_num_seqs: int
    max_num_tokens: int

    def check(self, batch: Batch) -> None:
        assert batch.num_seqs <= self.max_num_seqs, (batch.num_seqs, self.max_num_seqs)
        assert batch.num_tokens <= self.max_num_tokens, (batch.num_tokens, self.max_num_tokens)


def sized(
    name: str,
    config: Sizes,
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
            f"{max(max_model_len, block_size)} needs {needed} bytes (--max-model-len, --kv-cache-bytes)"
        )
    return RunnerInfo(
        name=name,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
    )
