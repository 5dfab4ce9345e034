"""Rank 0's way to a runner over several ranks: what it refuses, what it tells the others, how they meet.

Owns: the order of it. Never: leaves anything behind that has a name: the others get all they need over their links, as descriptors. Main
thread of the worker, while it loads.

    check that the model can be shared; start the others; meet (group.py); load, all at the same time; then step by step (team.py)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from shmserve.config import WorkerConfig
from shmserve.devices import share_of_cores
from shmserve.model_cache import ModelError
from shmserve.model_memory import (
    available_bytes,
    bfloat16_bytes,
    float32_bytes,
    refuse_without_room,
)
from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError
from shmserve.worker.parallel.group import (
    Group,
    default_group,
    gloo_group,
    nccl_group,
    store_in,
)
from shmserve.worker.parallel.plan import Partition
from shmserve.worker.parallel.ranks import Lost, Ranks, end_worker
from shmserve.worker.parallel.steps import StepWriter, words_needed
from shmserve.worker.parallel.team import Team
from shmserve.worker.runner import ModelRunner, Progress
from shmserve.worker.torch_runner import TorchRunner, open_model

if TYPE_CHECKING:
    from shmserve.child import Joined
    from shmserve.models import PreparedModel

log = logging.getLogger(__name__)

Kind = Literal["torch", "cuda", "hf"]


def shared_runner(
    joined: Joined, model: PreparedModel, limits: Mapping[str, Any], is_cuda: bool
) -> tuple[ModelRunner, Ranks]:
    """Rank 0's runner, and the others, which its `close` ends. `limits` are those of a runner that is alone, its `progress` among them.

    Raises ModelError, one line. A rank that ends before it is told to ends this process.
    """
    config, num_ranks = joined.config.worker, joined.config.worker.tensor_parallel
    progress: Progress = limits["progress"]
    kind = kind_for(model, config, is_cuda)
    options = {key: value for key, value in limits.items() if key != "progress"}
    options["num_token_ids"] = model.num_token_ids()
    # A rank has its share of the threads that the worker would have alone.
    told = config.num_threads and max(1, config.num_threads // num_ranks)
    options["num_threads"] = told or share_of_cores(joined.config.num_workers * num_ranks)
    options |= _of_cuda(config) if kind == "cuda" else _of_cpu(config, model, kind)
    plan = Plan(
        num_ranks=num_ranks,
        kind=kind,
        folder=str(model.folder),
        options=options,
        log=(f"worker[{joined.index}]", joined.config.log_level, joined.config.log_format),
    )
    return lead(model, plan, end_worker(joined.link.send), progress)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks are told alike. `options` are the runner's own, but for what each makes for itself; `log` is name, level, format."""

    num_ranks: int
    kind: Kind
    folder: str
    options: Mapping[str, Any]
    log: tuple[str, str, str]

    def welcome(self, rank: int) -> dict[str, Any]:
        name, level, form = self.log
        return {
            "type": "welcome",
            "rank": rank,
            "num_ranks": self.num_ranks,
            "kind": self.kind,
            "folder": self.folder,
            "options": dict(self.options),
            "log": [f"{name} rank {rank}", level, form],
        }


def lead(
    model: PreparedModel, plan: Plan, lost: Lost, progress: Progress
) -> tuple[ModelRunner, Ranks]:
    """Start the other ranks, and be the first of them; one that ends before it is told to is `lost`."""
    options, num_ranks = plan.options, plan.num_ranks
    max_model_len = options["max_model_len"] or model.context_length
    max_blocks = -(-max_model_len // options["block_size"])
    num_words = words_needed(options["max_num_batched_tokens"], options["max_num_seqs"], max_blocks)
    steps = StepWriter(num_ranks - 1, num_words)
    store_fd = os.memfd_create("shmserve ranks", os.MFD_CLOEXEC)
    ranks = Ranks(lost)
    try:
        progress("starting the other ranks", 0.0)
        others = range(1, num_ranks)
        fds = [[store_fd, *steps.fds_of(rank - 1)] for rank in others]
        ranks.start(list(zip(map(plan.welcome, others), fds, strict=True)), os.environ)
        group = group_of(plan.kind, store_fd, 0, num_ranks)
        log.info("%d ranks share the model; the others' pids: %s", num_ranks, ranks.pids)
        team = Team(group, steps, ranks.close)
        return runner_of(model, plan.kind, options, team, progress), ranks
    except ModelError:  # all ranks have found it: this one says it
        ranks.close()
        raise
    except Exception:
        ranks.await_death()
        ranks.close()
        raise


def group_of(kind: Kind, store_fd: int, rank: int, num_ranks: int) -> Group:
    """The group of all ranks; waits for them."""
    store = store_in(store_fd, num_ranks)
    if kind == "hf":
        return default_group(store, rank, num_ranks)
    if kind == "cuda":
        return nccl_group(store, rank, num_ranks, torch.device("cuda", torch.cuda.current_device()))
    return gloo_group(store, rank, num_ranks)


def runner_of(
    model: PreparedModel, kind: Kind, options: Mapping[str, Any], team: Team, progress: Progress
) -> Any:
    """The runner of this rank."""
    if kind == "cuda":
        from shmserve.worker.cuda.runner import CudaRunner

        return CudaRunner(model, **options, team=team, progress=progress)
    if kind == "hf":
        from shmserve.worker.hf_runner import HFRunner

        return HFRunner(model, **options, team=team, progress=progress)
    return TorchRunner(model, **options, team=team, progress=progress)


def kind_for(model: PreparedModel, config: WorkerConfig, is_cuda: bool) -> Kind:
    """Which runner computes. ModelLoadError, one line, if the model or the machine cannot be shared among so many ranks."""
    num_ranks = config.tensor_parallel
    flag = f"--tensor-parallel {num_ranks}"
    if config.runner == "hf":
        return "hf"
    try:
        decoder, _ = open_model(model.weights, model.format)
    except UnknownArchitectureError as error:
        is_told = config.runner != "auto" or config.cpu_precision not in ("auto", "fp32")
        if is_told or model.format != "safetensors":
            raise
        log.info("transformers' own class is tried, on the CPU: %s", error)
        return "hf"
    partition = Partition.of(decoder, 0, num_ranks, model.weights)
    if is_cuda and (found := torch.cuda.device_count()) < num_ranks:
        raise ModelLoadError(f"{flag} needs {num_ranks} GPUs, and torch sees {found}")
    if partition.remark:
        log.info("%s: %s", flag, partition.remark)
    return "cuda" if is_cuda else "torch"


def _of_cuda(config: WorkerConfig) -> dict[str, Any]:
    return {
        "kv_cache_bytes": config.kv_cache_bytes,
        "kv_cache_fraction": config.kv_cache_fraction,
        "attention_backend": config.attention_backend,
    }


def _of_cpu(config: WorkerConfig, model: PreparedModel, kind: Kind) -> dict[str, Any]:
    if config.attention_backend != "auto":
        raise ModelLoadError(
            f"--attention-backend {config.attention_backend}: there is no CUDA device to attend on"
        )
    keeps_bf16 = config.cpu_precision == "bf16"
    bytes_of = bfloat16_bytes if keeps_bf16 else float32_bytes
    refuse_without_room(model.weights, bytes_of, available_bytes())
    if kind == "hf":
        from shmserve.worker.hf_loading import config_of, folder_of, refuse_unshared

        if (
            model.format == "safetensors"
        ):  # else it is refused when it is loaded, as it is for one rank
            folder = folder_of(model)
            refuse_unshared(folder, config_of(folder), config.tensor_parallel)
        return {}
    log.info(
        "--tensor-parallel %d on the CPU: the torch runner computes, since the C kernels do not share a model",
        config.tensor_parallel,
    )
    return {"keeps_bf16": keeps_bf16}
