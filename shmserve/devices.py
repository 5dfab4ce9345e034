"""What a worker gets of the machine when it is not the only one, or has several ranks: its GPUs, and its share of the cores.

Owns: the division. Never: imports torch, or asks a driver: devices are counted by CUDA_VISIBLE_DEVICES or by their nodes. The supervisor
divides the GPUs before it starts anybody; a worker its cores, and its GPUs among its ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from shmserve.cgroup import cores_of_quota
from shmserve.config import Config, ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER_NODES = ("nvidiactl", "nvhost-gpu", "nvgpu", "dxg")
"""In /dev: of NVIDIA's driver; of it on a Jetson, older or newer; of Windows', as WSL 2 hands it on."""


def has_driver(nodes: Path = Path("/dev")) -> bool:
    """Whether a driver is there, so that there may be a CUDA device."""
    return any((nodes / name).exists() for name in DRIVER_NODES)


def visible_devices(environ: Mapping[str, str], nodes: Path = Path("/dev")) -> list[str]:
    """The CUDA devices that a child would see, as CUDA_VISIBLE_DEVICES names them."""
    told = environ.get(VARIABLE)
    if told is not None:
        devices = []
        for word in map(str.strip, told.split(",")):
            if not word or word.startswith("-"):
                break  # CUDA ignores that one and all behind it
            devices.append(word)
        return devices
    num_nodes = sum(1 for each in nodes.glob("nvidia*") if re.fullmatch(r"nvidia\d+", each.name))
    return [str(number) for number in range(num_nodes)]


def check_devices(config: Config, devices: list[str]) -> None:
    """Raise ConfigError if workers or ranks are to compute on GPUs and there are too few: two on one would share its memory blindly."""
    num_ranks = config.worker.tensor_parallel
    needed = config.num_workers * num_ranks
    if needed == 1 or config.worker.runner not in ("auto", "cuda") or not devices:
        return
    if len(devices) < needed:
        flags = (("--workers", config.num_workers), ("--tensor-parallel", num_ranks))
        told = " with ".join(f"{flag} {count}" for flag, count in flags if count > 1)
        fewer = "workers" if num_ranks == 1 else "ranks" if config.num_workers == 1 else "of both"
        on_cpu = "cpu" if num_ranks == 1 else "torch"
        raise ConfigError(
            f"{told} needs {needed} GPUs, and {len(devices)} can be seen "
            f"({VARIABLE}); serve with fewer {fewer}, or on the CPU (--runner {on_cpu})"
        )


def environment_of(
    worker: int, config: Config, environ: Mapping[str, str], devices: list[str]
) -> Mapping[str, str]:
    """The environment of one worker: with others beside it, it sees only its own GPUs, one for each of its ranks."""
    num_each = config.worker.tensor_parallel
    own = devices[worker * num_each : (worker + 1) * num_each]
    if config.num_workers == 1 or len(own) < num_each:
        return environ
    return {**environ, VARIABLE: ",".join(own)}


def environment_of_rank(rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank of the worker whose environment this is: it sees one GPU, or what the worker sees if there are too
    few, which is none where the CPU computes."""
    devices = visible_devices(environ)
    return dict(environ) | ({VARIABLE: devices[rank]} if rank < len(devices) else {})


def share_of_cores(num_workers: int) -> int | None:
    """Threads of one worker among several; None for one alone that may use its cores at all times: its runner knows best.

    In a container with less time than cores, a thread on each would use up the time of all and stop, the front end with them.
    """
    num_cores = len(os.sched_getaffinity(0))
    quota = cores_of_quota()
    is_bound = quota is not None and quota < num_cores
    if quota is not None:
        num_cores = min(num_cores, quota)
    if num_workers > 1:
        return max(1, num_cores // num_workers)
    if not is_bound:
        return None
    return num_cores if num_cores <= 2 else num_cores - 1  # one is the front end's
