"""One rank's place in its worker: what it has of a model, and how it computes it together with the others.

Owns: `Team`, of a process, and `Share`, of a model that it loads. Never: starts or ends a process (ranks.py). A runner that is given a
team computes its part; without one it has the whole model. Main thread of each rank only.

Only rank 0 samples: it has the rings, the requests' parameters and the tokens. The others hear of each step what shapes its forward pass,
and of logits which rows they are wanted of.

Sums over ranks are in another order than one rank's: a row of an output or a down product is summed within each rank and then over the
ranks. Logits differ in the last bits of float32 (on GPUs of bfloat16) from those of one rank, greedy tokens only where two are as likely
as each other to that precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from shmserve.worker.batch import I4, Batch
from shmserve.worker.models.config import DecoderConfig
from shmserve.worker.parallel.group import Group
from shmserve.worker.parallel.plan import Partition
from shmserve.worker.parallel.steps import StepWriter


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a model, and what makes the parts a whole."""

    partition: Partition
    group: Group

    def embedded(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """f32[T, hidden_size] of ids of the whole vocabulary; `table` has the rows of this rank's ids."""
        ids = self.partition.ids
        own = token_ids.long() - ids.start
        is_elsewhere = (own < 0) | (own >= len(ids))
        rows = F.embedding(own.masked_fill(is_elsewhere, 0), table).float()
        rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        self.group.all_reduce(rows)  # exact: all summands but one are 0
        return rows

    def summed(self, part: Tensor) -> Tensor:
        """The sum of what all ranks have computed, in the memory of `part`."""
        self.group.all_reduce(part)
        return part

    def joined(self, part: Tensor) -> Tensor:
        """f32[R, vocab_size] of each rank's logits f32[R, num_ids]."""
        num_rows, num_ids = part.shape
        every = part.new_empty((self.partition.num_ranks * num_rows, num_ids))
        self.group.all_gather(every, part.contiguous())
        by_row = every.view(-1, num_rows, num_ids).permute(1, 0, 2)
        return by_row.reshape(num_rows, -1)[:, : self.partition.whole.vocab_size]


class Team:
    """The ranks of this worker, as this process sees them. `steps` at rank 0 only, as is `end`, which ends the others."""

    def __init__(
        self,
        group: Group,
        steps: StepWriter | None = None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.group = group
        self._steps, self._end = steps, end

    def share_of(self, config: DecoderConfig, weights: Path) -> Share:
        """This rank's part of a model. Raises ModelLoadError if it cannot be shared among so many."""
        partition = Partition.of(config, self.group.rank, self.group.size, weights)
        return Share(partition, self.group)

    def compute(self, batch: Batch, carried: I4 | None = None) -> None:
        """Tell the others to compute `batch`; whoever calls it does the same."""
        if self._steps is not None:
            self._steps.compute(batch, carried)

    def logits(self, rows: I4) -> None:
        """Tell the others to compute logits of tokens `rows` of the last batch; whoever calls it does the same."""
        if self._steps is not None:
            self._steps.logits(rows)

    def close(self) -> None:
        """End the others, at rank 0. Called once, when nothing is being computed."""
        self._end()
        if self._steps is not None:
            self._steps.close()
