"""The worker's way out: one publish a step into each channel's token ring, under the policy that the operator chose.

Owns: the token ring's writer of one channel, and the list of sequences that are paused because too much of their output waits.
Never: waits (unless the policy is block), or looks at a token.

Law: a FINISH is never lost; it waits in the writer's backlog, one per request at most, so the table size bounds them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shmserve.config import RingConfig
from shmserve.rings.channel import Channel
from shmserve.rings.policy import Blocking, Coalescing, Dropping, RingWriter
from shmserve.wire.tokens import fold_tokens, stamp_publish, weigh_tokens


def token_writer(channel: Channel, config: RingConfig) -> RingWriter:
    """The writing end of a channel's token ring with the policy of `config`. Takes the producer's role."""
    producer = channel.tokens.producer()
    if config.token_policy == "drop":
        return Dropping(producer, weigh=weigh_tokens, stamp=stamp_publish)
    if config.token_policy == "block":
        return Blocking(
            producer,
            wait_credits=channel.tokens.wait_credits,
            deadline_s=config.block_deadline_s,
            fold=fold_tokens,
            weigh=weigh_tokens,
            stamp=stamp_publish,
        )
    return Coalescing(producer, fold=fold_tokens, weigh=weigh_tokens, stamp=stamp_publish)


class Emitter:
    """One channel's token ring, from the worker's side. Main thread only."""

    def __init__(self, channel: Channel, config: RingConfig) -> None:
        self.channel = channel
        self.writer = token_writer(channel, config)
        self._limit = config.coalesce_tokens
        self._kept: list[tuple[int, bytes]] = []
        # Who decodes together has the same array of records in every step.
        self._records: npt.NDArray[np.void] | None = None
        self._tokens = memoryview(b"")

    @property
    def is_starved(self) -> bool:
        return self.writer.is_starved

    @property
    def credit_fd(self) -> int:
        """Belongs in the poll set only while `is_starved` (it is level-triggered)."""
        return self.channel.tokens.credits.fd

    def keep(self, req_id: int, unit: bytes) -> None:
        """A unit (STARTED, MESSAGE + FINISH) that goes out with the next publish, behind the tokens."""
        self._kept.append((req_id, unit))

    def publish(
        self,
        records: npt.NDArray[np.void],
        units: list[tuple[int, bytes]],
        end_dropped: Callable[[int], bytes],
    ) -> None:
        """Write a step: its TOKENS records, then `units` (whole groups of slots) and what was kept; one publish if it fits.

        `end_dropped(req_id)` ends a request that the drop policy has dropped and returns its last unit.
        """
        kept, self._kept = self._kept, []
        size = self.writer.producer.slot_size
        if records is not self._records:
            self._records, self._tokens = records, memoryview(records.view(np.uint8).data)
        tokens = self._tokens
        rest = [unit for _, unit in units] + [unit for _, unit in kept]
        whole = b"".join((tokens, *rest)) if rest else tokens
        if self.writer.try_unit(whole, len(whole) // size):
            return
        keys: list[int] = records["req_id"].tolist()
        for req_id, unit in units:
            keys += [req_id] * (len(unit) // size)
        lost: dict[int, None] = {}
        if keys:
            # One write for all: the policy that waits does so once a step, not once a unit.
            lost = dict.fromkeys(self.writer.write(memoryview(whole)[: len(keys) * size], keys))
        for req_id, unit in kept:
            if req_id not in lost:
                self._write_kept(req_id, unit)
        for req_id in lost:
            self._write_kept(req_id, end_dropped(req_id))

    def flush(self) -> None:
        """Credits may have come: write what waits and what was kept."""
        self.writer.flush()
        kept, self._kept = self._kept, []
        for req_id, unit in kept:
            self._write_kept(req_id, unit)

    def _write_kept(self, req_id: int, unit: bytes) -> None:
        # A ring may be smaller than a MESSAGE and its FINISH; the order of one request's slots is kept anyway.
        most = self.writer.producer.capacity * self.writer.producer.slot_size
        for start in range(0, len(unit), most):
            self.writer.keep(req_id, unit[start : start + most])

    def overloaded(self, can_pause: Callable[[int], bool]) -> list[int]:
        """Requests to pause now: the heaviest that can be, while more waits outside the ring than --coalesce-tokens."""
        if self.writer.pending_weight <= self._limit:
            return []
        heaviest = self.writer.heaviest(len(self.writer.pending_keys))
        keys = [req_id for req_id in heaviest if can_pause(req_id)]
        return keys[: max(1, len(keys) // 4)]

    def is_relieved(self) -> bool:
        """True when paused requests may go on: less than half of the limit waits."""
        return self.writer.pending_weight * 2 <= self._limit

    def close(self) -> None:
        """Let the channel go. What waits is lost with the front end that died."""
        self.channel.close()
