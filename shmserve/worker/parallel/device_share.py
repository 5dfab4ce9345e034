"""A rank's share on a GPU: the sums and gathers of a step over buffers that are made once, so that they can be recorded.

Owns: the buffers in which parts become a whole. Never: waits for the device, or looks at a value. What it calls goes into the current
stream like the kernels around it; where a step is recorded, NCCL's kernels are recorded with it. Worker's main thread only.

Only rank 0 draws tokens. The next step may be launched before the host has seen them, so every rank needs them on its device: they are
broadcast behind the draw, in the same recorded step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmserve.worker.cuda.buffers import Inputs
from shmserve.worker.cuda.ops import Ops
from shmserve.worker.parallel.team import Share


class DeviceShare:
    """`share` over buffers for steps of up to `max_num_tokens` tokens and `max_num_seqs` sequences, in the dtype of the weights."""

    def __init__(
        self,
        share: Share,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.partition, self._group = share.partition, share.group
        self._share = share
        ids, ranks = self.partition.num_ids, self.partition.num_ranks
        self._nowhere = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=device)
        self._part = torch.zeros((max_num_seqs, ids), dtype=dtype, device=device)
        self._every = torch.zeros((ranks * max_num_seqs, ids), dtype=dtype, device=device)

    @property
    def draws(self) -> bool:
        """Whether this rank chooses the tokens."""
        return self.partition.rank == 0

    def embed(
        self,
        ops: Ops,
        inputs: Inputs,
        sampled_ids: Tensor,
        table: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        """As `ops.embed`, of ids of the whole vocabulary; `table` has the rows of this rank's ids."""
        carried = sampled_ids[inputs.carried.clamp(min=0).long()]
        own = torch.where(inputs.carried >= 0, carried, inputs.token_ids) - self.partition.ids.start
        is_elsewhere = (own < 0) | (own >= len(self.partition.ids))
        own.masked_fill_(is_elsewhere, 0)
        ops.embed(own, self._nowhere[: len(own)], sampled_ids, table, out, scale)
        out.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self._group.all_reduce(out)

    def sum(self, part: Tensor) -> None:
        """`part` becomes the sum of all ranks' parts."""
        self._group.all_reduce(part)

    def part_of_logits(self, num_rows: int) -> Tensor:
        """Where this rank's logits of so many rows are to be put, before `join`."""
        return self._part[:num_rows]

    def join(self, logits: Tensor) -> None:
        """`logits` T[R, V] become those of all ranks, as far as V goes."""
        rows, vocab_size = logits.shape
        ids, ranks = self.partition.num_ids, self.partition.num_ranks
        every = self._every[: ranks * rows]
        self._group.all_gather(every, self._part[:rows])
        for rank in range(ranks):
            first = rank * ids
            width = min(ids, vocab_size - first)
            if width > 0:
                part = every[rank * rows : (rank + 1) * rows, :width]
                logits[:, first : first + width].copy_(part)

    def joined(self, part: Tensor) -> Tensor:
        """f32[R, vocab_size] of each rank's logits f32[R, num_ids]; allocates."""
        return self._share.joined(part)

    def tell_drawn(self, sampled_ids: Tensor) -> None:
        """All ranks know the ids that rank 0 has drawn."""
        self._group.broadcast(sampled_ids)
