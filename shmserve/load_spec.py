"""What a load is: which requests, to whom, and when each is due.

Owns: the bodies, the due times and the lengths, all drawn beforehand from a seed. Never: sends anything. Clients only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shmserve.target import Target

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
WORDS = (
    "anchor basalt cedar delta ember fjord granite harvest island juniper kettle lantern meadow "
    "needle orchard pebble quarry river saddle timber umbrella valley willow yarrow zephyr"
)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to send where and when. Exactly one of `rate` and `concurrency` is set.

    Request i takes prompts[i % len] and max_tokens[i % len]. A prompt is text, or token ids (completions only).
    The first `num_warmup` requests are sent as the others are and not counted; `num_requests` and `duration_s` bound the
    counted ones, whichever is reached first. Every `timing_every`-th counted request asks when its tokens were made (0: none does).
    `extra` is merged into every body, last.
    """

    base_url: str
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    num_requests: int | None
    rate: float | None = None  # requests per second
    concurrency: int | None = None
    path: str = CHAT_PATH
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    duration_s: float | None = None
    num_warmup: int = 0
    timing_every: int = 0
    uds: str = ""
    ca_file: str = ""

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError("give a rate (open loop) or a concurrency (closed loop), not both")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("give num_requests or duration_s")
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"num_requests must be at least 1, got {self.num_requests}")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ValueError(f"duration_s must be above 0, got {self.duration_s}")
        if self.num_warmup < 0 or self.timing_every < 0:
            raise ValueError("num_warmup and timing_every must not be negative")
        if not self.prompts or not self.max_tokens:
            raise ValueError("prompts and max_tokens must not be empty")
        if self.path not in (CHAT_PATH, COMPLETIONS_PATH):
            raise ValueError(f"path must be {CHAT_PATH} or {COMPLETIONS_PATH}, got {self.path}")
        if self.path == CHAT_PATH and not all(isinstance(p, str) for p in self.prompts):
            raise ValueError(f"prompts of token ids need {COMPLETIONS_PATH}")

    @property
    def target(self) -> Target:
        return Target(self.base_url, self.uds, self.api_key or "", self.ca_file)

    def is_counted(self, index: int) -> bool:
        return index >= self.num_warmup

    def indices(self) -> Iterator[int]:
        """Of all requests, warm-up first; without end where only the duration bounds them."""
        index = 0
        while self.num_requests is None or index < self.num_warmup + self.num_requests:
            yield index
            index += 1

    def body(self, index: int) -> dict[str, Any]:
        """The JSON body of request `index`."""
        prompt = self.prompts[index % len(self.prompts)]
        options: dict[str, Any] = {"include_usage": True}
        if self.timing_every and (index - self.num_warmup) % self.timing_every == 0:
            options["include_timing"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens[index % len(self.max_tokens)],
            "stream": True,
            "stream_options": options,
        }
        if self.path == CHAT_PATH:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return body | dict(self.extra)

    def due_times_s(self) -> list[float]:
        """Open loop: when each request is due, from the start; the same for the same seed.

        The duration begins when the first request that counts is due.
        """
        assert self.rate is not None, "a closed loop has no due times"
        draw = random.Random(self.seed)
        times: list[float] = []
        at = counted_from = 0.0
        for index in self.indices():
            if index == self.num_warmup:
                counted_from = at
            is_over = self.duration_s is not None and at - counted_from >= self.duration_s
            if is_over and self.is_counted(index):
                break
            times.append(at)
            at += draw.expovariate(self.rate)
        return times


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts or answers are: one of `values`, in turn; or, with `is_range`, drawn between the two, both included."""

    values: tuple[int, ...]
    is_range: bool = False

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "64", "32,64,512" or "16-256". Raises ValueError."""
        low, dash, high = text.partition("-")
        words = [low, high] if dash else text.split(",")
        values = tuple(int(word) for word in words)
        if min(values) < 1:
            raise ValueError("lengths are 1 or more")
        if dash and values[0] > values[1]:
            raise ValueError(f"the range {text} begins above its end")
        return cls(values, bool(dash))

    def draw(self, count: int, seed: int) -> tuple[int, ...]:
        if not self.is_range:
            return tuple(self.values[i % len(self.values)] for i in range(count))
        draw = random.Random(seed)
        return tuple(draw.randint(*self.values) for _ in range(count))


def random_prompts(lengths: tuple[int, ...], seed: int) -> tuple[str, ...]:
    """Prompts of that many random words, each different from its first word on, so that no prefix cache helps."""
    draw, words = random.Random(seed), WORDS.split()
    return tuple(
        " ".join([f"{draw.randrange(1 << 32):x}", *draw.choices(words, k=length - 1)])
        for length in lengths
    )
