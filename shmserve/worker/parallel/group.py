"""What the ranks of one worker compute together: sums, and tensors put side by side.

Owns: the process group, of gloo on the CPU and of NCCL between GPUs, and how it is told where the others are. Never: knows a model, or
waits longer than the others take: a rank that hangs or dies is noticed elsewhere (ranks.py, health.py). The main thread of each rank only.

Every rank makes the same calls in the same order, or all of them wait for ever. Calls on a GPU go into its current stream, and can be
recorded with what stands around them.

The ranks find each other through a store, a file without a name that all of them have inherited: nothing of it stays behind, whoever
dies. gloo listens on the loopback interface only, at ports that the kernel chooses and that are gone with the process.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST = timedelta(days=7)
"""A prompt may take what it takes: how long is too long is judged by the supervisor, from the steps of its kind."""


class Group:
    """This process as `rank` of `size`, over a process group of torch."""

    def __init__(self, backend: dist.ProcessGroup, device: torch.device) -> None:
        self._backend: Any = backend
        self.rank, self.size, self.device = backend.rank(), backend.size(), device

    def all_reduce(self, tensor: Tensor) -> None:
        """`tensor` becomes the sum of all ranks' tensors."""
        self._backend.allreduce(tensor).wait()

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """`out` becomes all ranks' `part` behind one another, in the order of the ranks."""
        self._backend._allgather_base(out, part).wait()

    def broadcast(self, tensor: Tensor) -> None:
        """`tensor` becomes that of rank 0."""
        self._backend.broadcast(tensor, 0).wait()

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._backend.allreduce(tensor, dist.ReduceOp.MIN).wait()
        return int(tensor)


def store_in(fd: int, size: int) -> dist.Store:
    """The store in an inherited file without a name."""
    return dist.FileStore(f"/proc/self/fd/{fd}", size)


def gloo_group(store: dist.Store, rank: int, size: int) -> Group:
    """Ranks on the CPU. Waits until all of them are there."""
    device = torch.device("cpu")
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(interface="lo")]
    options._timeout = LONGEST
    return Group(
        _wrapped(store, rank, size, "GLOO", kind(store, rank, size, options), device), device
    )


def default_group(store: dist.Store, rank: int, size: int) -> Group:
    """Ranks on the CPU, as `gloo_group` has them; torch's default group of this process besides, which is where libraries look for one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LONGEST)
    world = dist.group.WORLD
    assert world is not None, "just made"
    return Group(world, torch.device("cpu"))


def nccl_group(store: dist.Store, rank: int, size: int, device: torch.device) -> Group:
    """Ranks on GPUs of this host, one each. Waits until all of them are there."""
    os.environ.setdefault(
        "NCCL_SOCKET_IFNAME", "lo"
    )  # it only meets there: data goes over NVLink, PCIe or memory
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = LONGEST
    backend = kind(store, rank, size, options)
    torch.cuda.set_device(device)
    backend.eager_connect_single_device(device)
    return Group(_wrapped(store, rank, size, "NCCL", backend, device), device)


def _wrapped(
    store: dist.Store, rank: int, size: int, kind: str, backend: Any, device: torch.device
) -> dist.ProcessGroup:
    """The group that calls `backend`; as torch itself makes one, but for the names that a whole process knows of."""
    backend._set_sequence_number_for_group()
    group: Any = dist.ProcessGroup(store, rank, size)
    backend_type = getattr(dist.ProcessGroup.BackendType, kind)
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    result: dist.ProcessGroup = group
    return result
