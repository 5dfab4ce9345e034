"""Which runner computes a model: the one that the operator named, or the fastest that this machine and this model allow.

Owns: the choice, and the limits that every runner is told. Never: keeps a runner, or loads torch (or transformers) for one that does not
need it: each is imported where it is chosen. Main thread of the worker, while it loads.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from shmserve.devices import has_driver, share_of_cores, visible_devices
from shmserve.model_memory import (
    available_bytes,
    bfloat16_bytes,
    float32_bytes,
    packed_bytes,
    refuse_without_room,
)

if TYPE_CHECKING:
    from shmserve.child import Joined
    from shmserve.config import WorkerConfig
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.ranks import Ranks
    from shmserve.worker.runner import ModelRunner, Progress

log = logging.getLogger(__name__)


def build_runner(
    joined: Joined, model: PreparedModel, progress: Progress
) -> tuple[ModelRunner, Ranks | None]:
    """The runner that the configuration names, loaded, and the other ranks if it has some. May raise anything."""
    runner, ranks = _built(joined, model, progress)
    info = runner.info
    if info.max_model_len < model.context_length and not joined.config.model.max_model_len:
        is_full = info.max_model_len == (info.num_blocks - 1) * info.block_size
        log.warning(
            "a prompt and its answer may have %d tokens, of the %d of the model's context: %s",
            info.max_model_len,
            model.context_length,
            "the KV cache holds no more (--kv-cache-bytes)"
            if is_full
            else f"{info.name} computes no more",
        )
    return runner, ranks


def _built(
    joined: Joined, model: PreparedModel, progress: Progress
) -> tuple[ModelRunner, Ranks | None]:
    config, num_workers = joined.config.worker, joined.config.num_workers
    told_len = joined.config.model.max_model_len
    max_model_len = told_len or model.context_length
    if config.runner == "simulated":
        return _simulated_runner(config, model, max_model_len), None
    limits: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        # A prompt that is not cut may come on top of a step that is almost full.
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs)
        + (0 if config.chunked_prefill else max_model_len),
        # None: what the KV cache holds of the context. But a step with a whole prompt has buffers for the longest one, which is then told.
        "max_model_len": told_len or (None if config.chunked_prefill else max_model_len),
        "kv_cache_bytes": config.kv_cache_bytes
        or kv_cache_bytes(config.kv_cache_fraction, num_workers),
        "block_size": config.block_size,
        "num_threads": config.num_threads or share_of_cores(num_workers),
        "progress": progress,
    }
    if config.tensor_parallel > 1:
        from shmserve.worker.parallel.lead import shared_runner

        is_cuda = config.runner == "cuda" or (config.runner == "auto" and has_cuda())
        return shared_runner(joined, model, limits, is_cuda)
    if config.runner != "hf":
        from shmserve.worker.models.config import UnknownArchitectureError

        try:
            return own_runner(config, model, limits), None
        except UnknownArchitectureError as error:
            is_told = config.runner != "auto" or config.cpu_precision not in ("auto", "fp32")
            if is_told or model.format != "safetensors":
                raise
            log.info("transformers' own class is tried, on the CPU: %s", error)
    from shmserve.worker.hf_runner import HFRunner

    refuse_without_room(model.weights, float32_bytes, available_bytes())
    return HFRunner(model, **limits, num_token_ids=model.num_token_ids()), None


def _simulated_runner(
    config: WorkerConfig, model: PreparedModel, max_model_len: int
) -> ModelRunner:
    from shmserve.worker.simulated_runner import SimulatedRunner, load_script

    # Memory that is not there costs nothing: every sequence has room for 2,048 tokens on average.
    per_sequence = -(-min(max_model_len, 2048) // config.block_size)
    least = -(-max_model_len // config.block_size)
    return SimulatedRunner(
        model.token_bytes(),
        model.special_token_ids,
        model.eos_token_ids[0],
        step_ms=config.step_ms,
        max_model_len=max_model_len,
        num_blocks=1 + max(least, per_sequence * config.max_num_seqs),
        block_size=config.block_size,
        script=load_script(config.script, model.vocab_size) if config.script else None,
    )


def own_runner(config: WorkerConfig, model: PreparedModel, limits: dict[str, Any]) -> ModelRunner:
    """A runner over our own decoder: CUDA, the C kernels or torch."""
    if config.runner == "cuda" or (config.runner == "auto" and has_cuda()):
        from shmserve.worker.cuda.runner import CudaRunner

        # Its memory is the device's: how much of it is free is known when the weights are there.
        own = {**limits, "kv_cache_bytes": config.kv_cache_bytes}
        return CudaRunner(
            model,
            **own,
            kv_cache_fraction=config.kv_cache_fraction,
            num_token_ids=model.num_token_ids(),
            attention_backend=config.attention_backend,
        )
    if config.attention_backend != "auto":
        from shmserve.worker.models.config import ModelLoadError

        raise ModelLoadError(
            f"--attention-backend {config.attention_backend}: there is no CUDA device to attend on"
        )
    precision = config.cpu_precision
    if config.runner in ("auto", "cpu") and precision in ("auto", "int8"):
        from shmserve.worker.cpu.build import KernelsError
        from shmserve.worker.cpu.runner import CpuRunner

        refuse_without_room(model.weights, packed_bytes, available_bytes())
        try:
            return CpuRunner(
                model, **limits, num_token_ids=model.num_token_ids(), may_use_amx=config.amx
            )
        except KernelsError as error:
            if config.runner == "cpu" or precision == "int8":
                raise
            log.warning("the torch runner computes, several times slower: %s", error)
    from shmserve.worker.torch_runner import TorchRunner

    keeps_bf16 = precision == "bf16"
    bytes_of = bfloat16_bytes if keeps_bf16 else float32_bytes
    refuse_without_room(model.weights, bytes_of, available_bytes())
    return TorchRunner(model, **limits, num_token_ids=model.num_token_ids(), keeps_bf16=keeps_bf16)


def has_cuda() -> bool:
    """Whether torch finds a CUDA device that our kernels run on; says what it does not like. Without a driver it is not asked: importing it takes
    seconds."""
    if not has_driver():
        return False
    import torch

    if not torch.cuda.is_available():
        is_hidden = not visible_devices(os.environ)
        build = torch.version.cuda or "no CUDA at all"
        log.log(
            logging.INFO if is_hidden else logging.WARNING,
            "the CPU computes: torch %s sees no CUDA device, though there is a driver (torch is built for %s)",
            torch.__version__,
            build,
        )
        return False
    from shmserve.worker.cuda.runner import LEAST_CAPABILITY

    found, least = torch.cuda.get_device_capability(), LEAST_CAPABILITY
    if found < least:
        log.warning(
            "the CPU computes: the GPU has compute capability %d.%d, the kernels need %d.%d",
            *found,
            *least,
        )
        return False
    return True


def kv_cache_bytes(fraction: float, num_workers: int = 1) -> int:
    """On the CPU: `fraction` of the memory that is free; by default 1 GiB, or a quarter of it, whichever is less.

    Several workers share what is free; one that loads when another has does with less than its part.
    """
    free = available_bytes() // num_workers
    return int(free * fraction) if fraction else min(1 << 30, free // 4)
