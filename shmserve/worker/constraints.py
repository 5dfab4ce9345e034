"""Sequences that must follow a grammar: who waits for its compiling, and the masks of each step.

Owns: the constrained sequences of all channels, and the thread that fills their masks while the forward pass runs. Never: ends a
sequence (the engine does), or lets one be scheduled before its grammar is ready. Worker's main thread only.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import Batch
from shmserve.worker.grammars import GrammarCompiler, fill_masks
from shmserve.worker.sequence import Sequence

if TYPE_CHECKING:
    from llguidance import LLMatcher

Masks = dict[int, npt.NDArray[np.int32]]


class Constraints:
    """`compiler` None: this worker knows no vocabulary, and a grammar is a fault of its request."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._sequences: dict[int, Sequence] = {}
        self._compiling: set[int] = set()
        self._refused: list[tuple[Sequence, str]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def poll_fds(self) -> list[int]:
        """What wakes an idle engine: a grammar that is ready."""
        return [self._compiler.fd] if self._compiling and self._compiler is not None else []

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def is_compiling(self, req_id: int) -> bool:
        return req_id in self._compiling

    def add(self, sequence: Sequence) -> None:
        """A sequence with a grammar: it has its matcher now, or is compiling until `ready` names it."""
        if self._compiler is None:
            self._refused.append((sequence, "this worker cannot follow a grammar"))
            self._compiling.add(sequence.req_id)
            return
        self._sequences[sequence.req_id] = sequence
        sequence.grammar = self._compiler.begin(sequence.req_id, sequence.params.grammar)
        if sequence.grammar is None:
            self._compiling.add(sequence.req_id)

    def ready(self) -> list[tuple[Sequence, str]]:
        """Sequences that need not wait any more, each with what is wrong with its grammar, or ""."""
        if not self._compiling:
            return []
        found, self._refused = self._refused, []
        for req_id, matcher, fault in self._compiler.ready() if self._compiler is not None else ():
            sequence = self._sequences.get(req_id)
            if sequence is not None:
                sequence.grammar = matcher
                found.append((sequence, fault))
        self._compiling -= {sequence.req_id for sequence, _ in found}
        return found

    def forget(self, req_id: int) -> None:
        """The sequence has ended."""
        sequence = self._sequences.pop(req_id, None)
        if sequence is not None and self._compiler is not None:
            self._compiler.forget(req_id)
            if sequence.grammar is not None and sequence.grammar.is_error():
                self._compiler.drop(sequence.params.grammar)
        self._compiling.discard(req_id)

    def begin_masks(self, batch: Batch) -> Future[Masks] | None:
        """Masks by row of the constrained sequences that sample in this step; None if there are none."""
        if not self._sequences:
            return None
        sampled = set(batch.rows[batch.sample_seqs].tolist())
        matchers = {
            s.row: s.grammar
            for s in self._sequences.values()
            if s.row in sampled and s.grammar is not None
        }
        return self._thread.submit(self._fill, matchers) if matchers else None

    def _fill(self, matchers: dict[int, LLMatcher]) -> Masks:
        masks = fill_masks(list(matchers.values()), self._vocab_size)
        return dict(zip(matchers, masks, strict=True))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._compiler is not None:
            self._compiler.close()
