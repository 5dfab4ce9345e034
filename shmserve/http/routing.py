"""Which worker computes a request: the choice between data-parallel workers, and what it knows of their prefix caches.

Owns: the rule, the index of prompts that were sent, and the reading of a client's own choice. Never: asks a worker, or waits. Event loop's
thread only.

    load      sequences in flight to a worker: this front end's table, exact, and the other front ends' boards
    affinity  of the workers that are busier than the least busy one by no more than margin * share, rounded, where share is the part of the
              prompt that a worker's cache should hold, the one with the longest prefix; of equals the least busy, of those the one
              whose turn is longest ago

So a worker that holds a whole prompt gets it unless it is busier by more than the margin, and one that holds a tenth of it gets it as
good as only when nobody is less busy. The index is a guess about the workers' caches: where it is wrong, a prompt is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from aiohttp import web

from shmserve.config import MOST_ROUTING_BLOCKS
from shmserve.http.errors import ApiError, bad_field

if TYPE_CHECKING:
    from shmserve.config import Routing
    from shmserve.http.neighbours import Neighbours
    from shmserve.http.worker_link import WorkerLink
    from shmserve.rings.board import Board

RANK: Final[web.RequestKey[int]] = web.RequestKey("data_parallel_rank", int)
"""The worker that a request's client wants; not there: whichever."""

MOST_LIVES: Final = 256
"""Lives of workers that the index tells apart; past it, it begins anew."""

FIELD: Final = "data_parallel_rank"
HEADER: Final = "X-data-parallel-rank"


def rank_of(request: web.Request, value: int | None, num_workers: int) -> int | None:
    """The worker that the body's field or the header names. Raises ApiError (400) for one that there is not."""
    asked: dict[str, int] = {} if value is None else {FIELD: value}
    text = request.headers.get(HEADER)
    if text is not None:
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise bad_field(HEADER, f"{HEADER} must be the number of a worker, got {text[:40]!r}")
        asked[HEADER] = int(text)
    for name, rank in asked.items():
        if not 0 <= rank < num_workers:
            raise bad_field(name, f"{name} must be 0 to {num_workers - 1}, got {rank}")
    if len(set(asked.values())) > 1:
        raise bad_field(FIELD, f"{FIELD} is {asked[FIELD]}, but {HEADER} is {asked[HEADER]}")
    return next(iter(asked.values()), None)


class PrefixIndex:
    """Which worker was sent which prompt, in whole blocks: a block is known by its tokens and all that stood before it.

    Bounded: past `most_blocks` what was not used for longest is forgotten, the end of a prompt before its beginning.
    """

    def __init__(self, block_size: int, most_blocks: int = MOST_ROUTING_BLOCKS) -> None:
        self._num_bytes = 4 * block_size
        self._most = most_blocks
        # Key of a block -> the workers, a bit for each life of one. In order of use: the first is the next to go.
        self._workers: OrderedDict[int, int] = OrderedDict()
        self._bits: dict[int, int] = {}  # of the workers that live
        self._num_lives = 0

    def __len__(self) -> int:
        return len(self._workers)

    def keys_of(self, prompt_ids: npt.NDArray[np.int32], salt: bytes) -> list[int]:
        """The keys of its full blocks. Two prompts share a key where they are alike up to there (or, once in 2**64, are not)."""
        data, size = prompt_ids.tobytes(), self._num_bytes
        key = hash(salt)
        keys = []
        for start in range(0, min(len(data) // size, self._most) * size, size):
            key = hash((key, data[start : start + size]))
            keys.append(key)
        return keys

    def match(self, keys: Sequence[int], workers: Sequence[int]) -> dict[int, int]:
        """How many blocks from the beginning each of `workers` was sent."""
        found = {}
        left = {worker: bit for worker in workers if (bit := self._bits.get(worker, 0))}
        wanted = sum(left.values())
        for depth, key in enumerate(keys):
            if not wanted:
                break
            mask = self._workers.get(key, 0) & wanted
            if mask != wanted:
                for worker in [worker for worker, bit in left.items() if not bit & mask]:
                    found[worker] = depth
                    del left[worker]
                wanted = mask
        return dict.fromkeys(workers, 0) | found | dict.fromkeys(left, len(keys))

    def note(self, keys: Sequence[int], worker: int) -> None:
        """`worker` was sent these."""
        if worker not in self._bits:
            if self._num_lives == MOST_LIVES:
                self.clear()
            self._bits[worker] = 1 << self._num_lives
            self._num_lives += 1
        known, bit, alive = self._workers, self._bits[worker], sum(self._bits.values())
        for key in reversed(keys):  # the beginning last: it goes last
            known[key] = known.get(key, 0) & alive | bit
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def forget(self, worker: int) -> None:
        """Its cache is empty: its next life gets another bit. Blocks that only it had stay until they are the next to go."""
        self._bits.pop(worker, None)

    def clear(self) -> None:
        self._workers.clear()
        self._bits.clear()
        self._num_lives = 0


class Router:
    """Chooses among `links`. `margin` is how many sequences busier a worker may be that holds a whole prompt."""

    def __init__(
        self,
        links: Mapping[int, WorkerLink],
        board: Board,
        *,
        policy: Routing = "affinity",
        margin: int = 4,
        block_size: int = 16,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._links = links
        self._board = board
        self._policy = policy
        self._margin = margin
        self._neighbours = neighbours
        self._num_chosen = 0
        self._last_turn: dict[int, int] = {}
        self.index = PrefixIndex(block_size)

    def load_of(self, link: WorkerLink) -> int:
        """Sequences in flight to it, of all front ends."""
        own = len(link.in_flight)
        return own + (self._neighbours.in_flight_to(link.worker) if self._neighbours else 0)

    def choose(
        self, prompt_ids: npt.NDArray[np.int32], salt: bytes = b"", rank: int | None = None
    ) -> WorkerLink | None:
        """The worker for a prompt, or the one that `rank` names; None if none serves, or that one does not."""
        if len(self._links) < 2:
            return next((link for link in self._links.values() if link.is_serving), None)
        is_affine = self._policy == "affinity"
        keys = self.index.keys_of(prompt_ids, salt) if is_affine else []
        if rank is not None:
            named = self._links.get(rank)
            chosen = named if named is not None and named.is_serving else None
        else:
            chosen = self._free_choice(keys)
        if chosen is not None:
            self._num_chosen += 1
            self._last_turn[chosen.worker] = self._num_chosen
            if is_affine:
                self.index.note(keys, chosen.worker)
                self._board["routing_blocks"] = len(self.index)
        return chosen

    def _free_choice(self, keys: list[int]) -> WorkerLink | None:
        ready = [link for link in self._links.values() if link.is_serving]
        if not ready:
            return None
        turns = self._last_turn
        if self._policy == "round-robin":
            return min(ready, key=lambda link: turns.get(link.worker, 0))
        loads = {link.worker: self.load_of(link) for link in ready}
        found = self.index.match(keys, list(loads))
        least = min(loads.values())
        num_keys = max(1, len(keys))
        allowed = {w: least + round(self._margin * depth / num_keys) for w, depth in found.items()}
        chosen = min(
            (link for link in ready if loads[link.worker] <= allowed[link.worker]),
            key=lambda link: (
                -found[link.worker],
                loads[link.worker],
                turns.get(link.worker, 0),
            ),
        )
        if longest := max(found.values()):
            is_longest = found[chosen.worker] == longest
            self._board.add("num_routed_by_prefix" if is_longest else "num_routed_by_load")
        return chosen

    def forget(self, worker: int) -> None:
        """It died: whoever takes its place has computed nothing."""
        self.index.forget(worker)

    def clear(self) -> None:
        """The workers' caches were flushed."""
        self.index.clear()
        self._board["routing_blocks"] = 0


def not_serving(link: WorkerLink) -> ApiError:
    """503: the worker that the client chose does not serve."""
    return ApiError(
        503,
        f"Worker {link.worker}, which {FIELD} names, is {link.state}.",
        code="no_worker",
        retry_after_s=1,
    )
