"""One sequence: what is known of it outside the columns.

A Python object that is touched when it arrives, is admitted, crosses a block boundary, or leaves; never once per token.
Worker process only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmserve.request import SamplingParams
from shmserve.worker.ngram import NgramIndex
from shmserve.worker.prefix_cache import Parent

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from shmserve.stop import StopMatcher
    from shmserve.stop_regex import StopScan
    from shmserve.token_text import TokenText


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable. `row` is its row slot while it runs, -1 while it waits; `blocks` are the KV blocks it holds."""

    req_id: int
    channel: int
    params: SamplingParams
    prompt_ids: npt.NDArray[np.int32]
    arrival_order: int
    received_ns: int
    digest: bytes = b""
    """Of the client's own request id: whoever knows that may abort it."""
    row: int = -1
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """All its tokens while it waits: the prompt, and after a preemption what it had generated."""
    blocks: list[int] = field(default_factory=list)
    cache_salt: bytes = b""
    """Requests with different salts share no KV blocks."""
    cache_parent: Parent = b""
    """What its next block stands behind in the prefix cache."""
    stop_ids: frozenset[int] = frozenset()
    matcher: StopMatcher | StopScan | None = None
    text: TokenText | None = None
    """What its matcher is fed, where the byte table alone does not say it."""
    grammar: LLMatcher | None = None
    """It has consumed exactly the tokens that were generated. None while it is compiled, and for who has none."""
    guesser: NgramIndex | None = None
    """Of one that speculates, from its first admission on."""
    is_paused: bool = False
    yields: bool = False
    """Paused by its client, for who knows how long: whoever waits may have its row and blocks."""
    is_prefilling: bool = False
    num_retractions: int = 0
    cached_tokens: int = 0
    """Of its prompt, found in the prefix cache; what it finds of its own after a preemption does not count."""
    num_scored: int = 1
    """Of its prompt, whose logprobs were given (the first has none): not given again after a preemption."""
    admitted_ns: int = 0
    scheduled_ns: int = 0
    prefill_end_ns: int = 0
    first_token_ns: int = 0
    deadline_ns: int = 0
    """Its client's own; 0: none."""
    last_time_ns: int = 0
    """Of its newest token, while it waits after a preemption."""
    admit_order: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def skips_cache(self) -> bool:
        """Every position of its prompt must be computed, since each has an answer; what it leaves may be found."""
        return self.params.prompt_logprobs >= 0

    def stamps(self) -> tuple[int, int, int, int, int]:
        """For the FINISH record: received, admitted, first scheduled, prefill end, first token (ns)."""
        return (
            self.received_ns,
            self.admitted_ns,
            self.scheduled_ns,
            self.prefill_end_ns,
            self.first_token_ns,
        )
