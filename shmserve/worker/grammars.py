"""Grammars of running sequences: compiled off the step's path, their masks filled for a whole batch at once.

Owns: the compiling thread, its cache, and the way from matchers to token masks. Never: decides which token is sampled. A sequence
waits, unscheduled, until its grammar is compiled; nobody else waits for it.

The compile queue is bounded by the sequences that the scheduler holds; `num_compiling` is its gauge. A matcher belongs to its
sequence and survives a preemption: it has consumed exactly the tokens that were generated. Main thread, but for `_compile`.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from shmserve.rings.wakeup import Counter

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_KEPT: Final = 64
"""Compiled grammars that are kept, least recently used first to go; a copy of one takes 10 us."""


class GrammarCompiler:
    """`tokenizer` makes the vocabulary, once, when the first grammar comes (0.15 s)."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        self._new_tokenizer = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._running: dict[int, tuple[str, Future[LLMatcher]]] = {}
        # Those of `_running`, by grammar: a burst of one compiles it once.
        self._coming: dict[str, Future[LLMatcher]] = {}
        self._done = Counter.create()

    @property
    def fd(self) -> int:
        """Readable when a grammar is ready."""
        return self._done.fd

    @property
    def num_compiling(self) -> int:
        return len(self._running)

    def begin(self, req_id: int, grammar: str) -> LLMatcher | None:
        """A matcher at its beginning, if this grammar is known; else None, and `ready` will give it."""
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            return kept.deep_copy()
        future = self._coming.get(grammar)
        if future is None:
            future = self._coming[grammar] = self._thread.submit(self._compile, grammar)
            future.add_done_callback(self._tell)
        self._running[req_id] = (grammar, future)
        return None

    def _tell(self, _: Future[LLMatcher]) -> None:
        self._done.add(1)

    def forget(self, req_id: int) -> None:
        """The request has ended before its grammar was ready."""
        if req_id not in self._running:
            return
        grammar, future = self._running.pop(req_id)
        if all(other is not future for _, other in self._running.values()):
            self._coming.pop(grammar, None)
            future.cancel()

    def drop(self, grammar: str) -> None:
        """A copy of it has failed. All copies share a lexer, and what that has run out of: the next request gets a new one."""
        self._kept.pop(grammar, None)

    def ready(self) -> list[tuple[int, LLMatcher | None, str]]:
        """(req_id, matcher, "") or (req_id, None, why not) of those that were compiled since the last call."""
        if not self._done.take():  # before the look: what ends from here on says so again
            return []
        found: list[tuple[int, LLMatcher | None, str]] = []
        for req_id, (grammar, future) in list(self._running.items()):
            if not future.done():
                continue
            del self._running[req_id]
            self._coming.pop(grammar, None)
            matcher = future.result()
            if matcher.is_error():
                found.append((req_id, None, " ".join(matcher.get_error().split())))
                continue
            self._kept[grammar] = matcher
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            found.append((req_id, matcher.deep_copy(), ""))
        return found

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            self._tokenizer = self._new_tokenizer()
        # Its errors go to the client: without the state of the parser, and what was generated up to there.
        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._done.close()


def fill_masks(matchers: Sequence[LLMatcher], vocab_size: int) -> npt.NDArray[np.int32]:
    """i4[len(matchers), ceil(vocab_size / 32)]: bit b of word w is set where token 32 w + b may come next.

    About 50 us a matcher, on all cores, without the interpreter lock.
    """
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    masks = np.zeros((len(matchers), -(-vocab_size // 32)), np.int32)
    if len(matchers) == 1:
        fill_next_token_bitmask(matchers[0], masks, 0)
        return masks
    fill_next_token_bitmask_par(_executor(), [(m, i) for i, m in enumerate(matchers)], masks)
    return masks


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(4, len(os.sched_getaffinity(0))))


def allowed(masks: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """The masks as bool[len(masks), vocab_size]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
    return bits.view(np.bool_)
