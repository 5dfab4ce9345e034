"""Which part of a model each rank has: heads, rows of the feed-forward, ids of the vocabulary.

Owns: the division, and the refusal of what cannot be divided, by name and number. Never: reads a tensor, or imports torch.

    q, k, v, gate, up        rows      a rank computes its own heads and its own part of the feed-forward from the whole hidden state
    output, down             columns   what each rank gets from its part is a summand of the whole: ranks add up
    embedding, head          rows      a rank knows its own ids: embeddings are added up (all but one are 0), logits put side by side
    norms                    whole     output's bias is rank 0's alone, or it would be added once for each rank

KV heads go with the query heads that share them. They need not divide evenly: of 3 KV heads rank 0 of 2 has one and rank 1 two, and
the slower one is waited for. Where there are more ranks than KV heads, a KV head is kept by each rank that has queries of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shmserve.worker.models.config import DecoderConfig, ModelLoadError

UNITS = (128, 64, 32, 16, 8)
"""Rows of the feed-forward that stay together, the most that fit: kernels have tiles."""


@dataclass(frozen=True, slots=True)
class Span:
    """Of some things in a row, those from `start` to before `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def times(self, count: int) -> Span:
        return Span(self.start * count, self.end * count)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows (dim 0) or columns (dim 1) of a tensor; behind them zeros up to `size` of them."""

    dim: int
    span: Span
    size: int


@dataclass(frozen=True, slots=True)
class Partition:
    """What one rank of `num_ranks` has of the model `whole`. `num_ids` ids of the vocabulary have a place at every rank, and `ids`
    is those that exist."""

    rank: int
    num_ranks: int
    whole: DecoderConfig
    heads: Span
    kv_heads: Span
    ffn: Span
    ids: Span
    num_ids: int

    @classmethod
    def of(cls, whole: DecoderConfig, rank: int, num_ranks: int, weights: Path) -> Partition:
        """Raises ModelLoadError, one line that begins with `weights`, if the model cannot be shared among so many."""
        reason = refusal(whole, num_ranks)
        if reason:
            raise ModelLoadError(f"{weights}: --tensor-parallel {num_ranks}: {reason}")
        num_kv, group = whole.num_kv_heads, whole.num_heads // whole.num_kv_heads
        if num_kv >= num_ranks:
            kv_heads = _share(num_kv, rank, num_ranks)
            heads = kv_heads.times(group)
        else:
            kv_heads = Span(rank * num_kv // num_ranks, rank * num_kv // num_ranks + 1)
            heads = _share(whole.num_heads, rank, num_ranks)
        unit = _unit(whole.ffn_size, num_ranks)
        num_ids = -(-whole.vocab_size // num_ranks)
        first = min(rank * num_ids, whole.vocab_size)
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            whole=whole,
            heads=heads,
            kv_heads=kv_heads,
            ffn=_share(whole.ffn_size // unit, rank, num_ranks).times(unit),
            ids=Span(first, min(first + num_ids, whole.vocab_size)),
            num_ids=num_ids,
        )

    @property
    def own(self) -> DecoderConfig:
        """The sizes of this rank's layers; the vocabulary's is the whole model's."""
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            ffn_size=len(self.ffn),
        )

    @property
    def num_kv_heads_of_all(self) -> int:
        """KV heads that the ranks keep together."""
        return max(self.whole.num_kv_heads, self.num_ranks)

    @property
    def remark(self) -> str:
        """What is not as good as it could be, in words; "" if nothing is."""
        num_kv = self.whole.num_kv_heads
        if num_kv < self.num_ranks:
            return f"each of {num_kv} kv heads is kept by {self.num_ranks // num_kv} ranks"
        if num_kv % self.num_ranks:
            least, most = num_kv // self.num_ranks, -(-num_kv // self.num_ranks)
            return f"{num_kv} kv heads do not divide evenly: a rank has {least} or {most} of them"
        return ""

    def cut(self, part: str) -> Cut | None:
        """What this rank has of the tensor that is `part` of the model or of a layer; None for all of it."""
        dim = self.whole.head_dim
        if part in ("embedding", "head"):
            return Cut(0, self.ids, self.num_ids)
        if part in ("gate", "up"):
            return Cut(0, self.ffn, len(self.ffn))
        if part == "down":
            return Cut(1, self.ffn, len(self.ffn))
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads, "output": self.heads}
        span = heads.get(part.removesuffix("_bias"))
        if span is None or part == "output_bias":
            return None
        rows = span.times(dim)
        return Cut(1 if part == "output" else 0, rows, len(rows))


def refusal(config: DecoderConfig, num_ranks: int) -> str | None:
    """Why a model cannot be shared among so many, with numbers; None if it can be."""
    num_kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if num_kv < num_ranks and (num_ranks % num_kv or group % (num_ranks // num_kv)):
        more = [str(num_kv * count) for count in range(2, group + 1) if group % count == 0]
        also = f", or {' or '.join(more)} ranks" if more else ""
        return (
            f"the model's {config.num_heads} heads over {num_kv} kv heads cannot be shared among {num_ranks} ranks "
            f"(up to {num_kv}{also})"
        )
    for count, what in (
        (config.ffn_size, "rows of the feed-forward"),
        (config.vocab_size, "token ids"),
    ):
        if (num_ranks - 1) * -(-count // num_ranks) >= count:  # one would have none
            return f"the model's {count} {what} cannot be shared among {num_ranks} ranks"
    return None


def _share(count: int, rank: int, num_ranks: int) -> Span:
    """As even as can be, in order."""
    return Span(rank * count // num_ranks, (rank + 1) * count // num_ranks)


def _unit(ffn_size: int, num_ranks: int) -> int:
    """Rows that stay together: as many as the ranks can have evenly, else as many as each can have some of."""
    even = (unit for unit in UNITS if ffn_size % (unit * num_ranks) == 0)
    some = (unit for unit in UNITS if ffn_size % unit == 0 and ffn_size // unit >= num_ranks)
    return next(even, None) or next(some, 1)
