"""What the handlers of one front end share, and the life of one generation.

Owns: the `FrontEnd` context and `Generation`: from validated prompts to entries in flight, and back to nothing, whatever happens
to the handler. Event loop's thread only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt
from aiohttp import web

from shmserve.config import Config
from shmserve.http.admission import Admission
from shmserve.http.client import WorkerClient
from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.structured import Grammars
from shmserve.http.template import ChatTemplate
from shmserve.http.tokenizer import Tokenizer
from shmserve.http.turnstile import Turnstile
from shmserve.models import PreparedModel
from shmserve.request import SamplingParams
from shmserve.rings.board import Board

ARRIVAL: web.RequestKey[int] = web.RequestKey("arrival_ns", int)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Built once, when the process starts. `template` is None if the model has none."""

    config: Config
    model: PreparedModel
    served_name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: Grammars
    client: WorkerClient
    admission: Admission
    turnstile: Turnstile
    board: Board
    started_at: int  # wall clock, s: the "created" of the model

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and completion together, that the worker takes; the model's own context until it has said."""
        for link in self.client.links.values():
            if "max_model_len" in link.info:
                return int(link.info["max_model_len"])
        return self.config.model.max_model_len or self.model.context_length

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served; none named means ours."""
        if name is not None and name not in (self.served_name, "unknown"):
            raise ApiError(
                404,
                f"The model `{name[:200]}` does not exist. This server serves `{self.served_name}`.",
                param="model",
                code="model_not_found",
            )

    def room_for(self, num_prompt_tokens: int, param: str) -> int:
        """How many tokens may follow a prompt. 400 if none may: a prompt is never cut unasked."""
        limit = self.max_model_len
        if num_prompt_tokens == 0:
            raise ApiError(400, f"{param} holds no tokens", param=param, code="empty_prompt")
        if num_prompt_tokens >= limit:
            raise ApiError(
                400,
                f"Input length ({num_prompt_tokens}) exceeds model's maximum context length ({limit}): "
                "a prompt and at least one new token must fit.",
                param=param,
                code="context_length_exceeded",
            )
        return limit - num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """One completion to generate. `params` holds its own seed."""

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    cache_salt: bytes = b""
    shows: frozenset[int] = frozenset()
    """Special tokens that are part of its text though the others are skipped."""


class Generation:
    """Completions in flight for one HTTP request: `async with` submits them all, and aborts what is left at the end."""

    def __init__(
        self, front: FrontEnd, request: web.Request, wanted: Sequence[Wanted], external_id: str = ""
    ) -> None:
        self.entries: list[InFlight] = []
        self.signal = Signal()
        self.wanted = wanted
        self.arrival_ns = request[ARRIVAL]
        self._front = front
        self._digest = digest_of(external_id) if external_id else b""

    async def __aenter__(self) -> Generation:
        self._front.admission.admit(len(self.wanted))
        try:
            for index, wanted in enumerate(self.wanted):
                self.entries.append(
                    await self._front.client.submit(
                        wanted.prompt_ids,
                        wanted.params,
                        index=index,
                        signal=self.signal,
                        arrival_ns=self.arrival_ns,
                        digest=self._digest,
                        cache_salt=wanted.cache_salt,
                    )
                )
        except BaseException:
            self._release()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        histograms = self._front.board.histograms
        if self.entries and all(entry.finish is not None for entry in self.entries):
            # Refused, failed and abandoned requests would make the server look fast.
            histograms["e2e_us"].observe_one((time.monotonic_ns() - self.arrival_ns) // 1000)
        for entry in self.entries:
            if entry.finish is not None:
                self._front.admission.note_finish()
                if entry.finish.scheduled_ns:
                    queued_ns = entry.finish.scheduled_ns - self.arrival_ns
                    histograms["queue_us"].observe_one(queued_ns // 1000)
            self._front.client.abort(entry)

    async def finish(self) -> None:
        """Wait until every completion has ended. Raises ApiError if one failed."""
        while True:
            for entry in self.entries:
                if entry.error is not None:
                    raise entry.error
            if all(entry.is_over for entry in self.entries):
                return
            await self.signal.wait()

    def parts_of(self, index: int) -> list[tuple[str, list[int]]]:
        """Text and tokens of a completion that has ended, as a stream of it would have come."""
        entry, text = self.entries[index], self.text_stream(index)
        last = len(entry.token_ids) - 1
        parts = [
            ("" if entry.was_stop_token and i == last else text.feed(token_id), [token_id])
            for i, token_id in enumerate(entry.token_ids)
        ]
        assert entry.finish is not None
        return [*parts, (text.finish(entry.finish.keep_bytes), [])]

    def text_of(self, index: int) -> str:
        """The whole text of a completion that has ended."""
        return "".join(text for text, _ in self.parts_of(index))

    def text_stream(self, index: int) -> TextStream:
        params = self.wanted[index].params
        text = TextStream(self.pieces(index), params.stop, params.min_tokens, params.stop_regex)
        self.entries[index].text = text
        return text

    def pieces(self, index: int) -> Pieces:
        """The texts of its tokens."""
        wanted = self.wanted[index]
        if wanted.shows and wanted.params.skip_special_tokens:
            return self._front.tokenizer.pieces_showing(wanted.shows)
        return self._front.tokenizer.pieces_for(wanted.params.skip_special_tokens)


def digest_of(external_id: str) -> bytes:
    """What workers know of a client's own request id: 16 bytes."""
    return hashlib.blake2b(external_id.encode(), digest_size=16).digest()


def choices_of(
    prompt_ids: npt.NDArray[np.int32],
    params: SamplingParams,
    seeds: Sequence[int],
    cache_salt: bytes,
) -> list[Wanted]:
    """The n completions of one prompt, each with its own random stream."""
    return [Wanted(prompt_ids, replace(params, seed=seed), cache_salt) for seed in seeds]
