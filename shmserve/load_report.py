"""What the clients of a load felt: one result a request, and the figures of them all.

Owns: the definitions of the figures. Never: sends anything, prints. Clients only.

    TTFT       first text - due              e2e        end - due
    ITL        the gap between two frames with text; frames that came in one read have gaps of 0
    TPOT       (last text - first text) / (tokens - 1) of one request; tokens are the server's usage if it gives one, else frames
    lag        of a token whose making the server told: see stream_reading.py
    lateness   sent - due: how late the generator itself was; it is part of TTFT and e2e, so it never flatters a server
    goodput    requests per second that were whole and met every objective

Latencies count whole responses only; errors are counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
SERIES = ("ttft", "itl", "tpot", "e2e", "lag", "lateness")
OBJECTIVES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. Times are CLOCK_MONOTONIC ns; `error` is None exactly if the response was whole.

    An error is the status of a refusal ("503"), or "connect", "timeout", "broken stream", or "error in stream". `lags` are
    (read at, ms) of its tokens, where the server told when it made them.
    """

    index: int
    due_ns: int
    sent_ns: int
    end_ns: int
    status: int | None
    error: str | None
    arrivals_ns: tuple[int, ...] = ()
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None
    lags: tuple[tuple[int, float], ...] = ()
    message: str = ""

    @property
    def ttft_ms(self) -> float | None:
        return (self.arrivals_ns[0] - self.due_ns) / 1e6 if self.arrivals_ns else None

    @property
    def e2e_ms(self) -> float:
        return (self.end_ns - self.due_ns) / 1e6

    @property
    def tpot_ms(self) -> float | None:
        if self.num_tokens < 2 or len(self.arrivals_ns) < 2:
            return None
        return (self.arrivals_ns[-1] - self.arrivals_ns[0]) / 1e6 / (self.num_tokens - 1)

    @property
    def itls_ms(self) -> list[float]:
        return [gap / 1e6 for gap in np.diff(self.arrivals_ns).tolist()]

    @property
    def lateness_ms(self) -> float:
        """How much later than due the generator sent it."""
        return (self.sent_ns - self.due_ns) / 1e6

    def values_of(self, series: str) -> list[float]:
        """Its part of a series, in ms: one value, one a token, or none."""
        if series == "itl":
            return self.itls_ms
        if series == "lag":
            return [lag for _, lag in self.lags]
        value = getattr(self, f"{series}_ms")
        return [] if value is None else [value]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in ms that a good request keeps; of its ITLs the longest counts."""

    limits_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """ "ttft=200,itl=50". Raises ValueError."""
        limits: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name.strip() not in OBJECTIVES:
                raise ValueError(f"{name.strip()!r} is none of {', '.join(OBJECTIVES)}")
            limits[name.strip()] = float(value)
            if not 0 < limits[name.strip()] < float("inf"):
                raise ValueError(f"{part.strip()}: a limit is above 0 ms")
        return cls(limits)

    def are_met_by(self, result: RequestResult) -> bool:
        if result.error is not None or not result.arrivals_ns:
            return False
        return all(
            max(result.values_of(name), default=0.0) <= limit
            for name, limit in self.limits_ms.items()
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The results that count of one run, in the order of their index; `wall_s` from the first due time to the last end."""

    results: tuple[RequestResult, ...]
    wall_s: float

    @classmethod
    def of(cls, results: Iterable[RequestResult]) -> LoadReport:
        ordered = tuple(sorted(results, key=lambda result: result.index))
        end_ns = max((result.end_ns for result in ordered), default=0)
        begin_ns = min((result.due_ns for result in ordered), default=0)
        return cls(ordered, (end_ns - begin_ns) / 1e9)

    @property
    def begin_ns(self) -> int:
        """When the first of them was due."""
        return min((result.due_ns for result in self.results), default=0)

    @property
    def whole(self) -> list[RequestResult]:
        return [result for result in self.results if result.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """How many requests ended in each error."""
        return dict(Counter(result.error for result in self.results if result.error is not None))

    def series(self, name: str) -> list[float]:
        """All values of a series in ms: lateness of every request, the others of whole responses."""
        results: Sequence[RequestResult] = self.results if name == "lateness" else self.whole
        return [value for result in results for value in result.values_of(name)]

    def summary(self, objectives: Objectives | None = None) -> dict[str, Any]:
        """One flat row: counts, rates, percentiles; None where there is nothing to count."""
        whole = self.whole
        num_tokens = sum(result.num_tokens for result in whole)
        prompts = [r.num_prompt_tokens for r in whole if r.num_prompt_tokens is not None]
        row: dict[str, Any] = {
            "requests": len(self.results),
            "ok": len(whole),
            "errors": self.errors,
            "wall_s": self.wall_s,
            "requests_per_s": _per(len(whole), self.wall_s),
            "prompt_tokens_mean": _per(sum(prompts), len(prompts)) if prompts else None,
            "output_tokens": num_tokens,
            "tokens_per_s": _per(num_tokens, self.wall_s),
        }
        if objectives is not None:
            num_good = sum(objectives.are_met_by(result) for result in self.results)
            row["good"] = num_good
            row["goodput_per_s"] = _per(num_good, self.wall_s)
        for name in SERIES:
            row |= figures(name, self.series(name))
        return row


def figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and maximum of a series in ms, under its name."""
    quantiles = np.percentile(values, PERCENTILES).tolist() if values else [None] * len(PERCENTILES)
    row: dict[str, float | None] = {f"{name}_mean_ms": float(np.mean(values)) if values else None}
    row |= {f"{name}_p{p}_ms": q for p, q in zip(PERCENTILES, quantiles, strict=True)}
    return row | {f"{name}_max_ms": max(values, default=None)}


def _per(count: float, unit: float) -> float:
    return count / unit if unit > 0 else 0.0
