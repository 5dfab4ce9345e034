"""`shmserve start --print-limits`: the most memory that an instance of these settings takes, as a table on stdout.

Owns: where the numbers come from: the settings, the model's context, and for the KV cache what is free now. Starts nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shmserve.config import Config
from shmserve.devices import has_driver
from shmserve.memory_bounds import bounds_of, logprobs_bound, table
from shmserve.model_memory import available_bytes
from shmserve.models import PreparedModel

LEAST_BLOCK_BYTES: Final = 32 << 10
"""No model that is worth serving keeps less for a block of keys and values."""


def limits_table(config: Config) -> str:
    """Of a config whose model is prepared."""
    model = PreparedModel.load(Path(config.model.folder))
    max_model_len = config.model.max_model_len or model.context_length
    kv_bytes, num_blocks = _kv_cache(config, max_model_len)
    bounds = bounds_of(config, max_model_len, kv_bytes=kv_bytes, num_kv_blocks=num_blocks)
    return table(bounds, [logprobs_bound(config, max_model_len)])


def _kv_cache(config: Config, max_model_len: int) -> tuple[int, int]:
    """Bytes of one worker's cache in this host's memory, and blocks that it may have."""
    worker = config.worker
    if worker.runner == "simulated":  # memory that is not there
        blocks = -(-max_model_len // worker.block_size)
        return 0, 1 + max(blocks, -(-2048 // worker.block_size) * worker.max_num_seqs)
    if worker.runner == "cuda" or (worker.runner == "auto" and has_driver()):
        return 0, 1 << 20  # the device's memory
    free = available_bytes()
    kv_bytes = worker.kv_cache_bytes or int(free * worker.kv_cache_fraction)
    kv_bytes = kv_bytes or min(1 << 30, free // 4)
    return kv_bytes, kv_bytes // LEAST_BLOCK_BYTES
