"""The life of one generation: from validated prompts to entries in flight, and back to nothing, whatever happens to its handler.

Owns: the entries of one HTTP request, its party in the waiting line and its timer, from `async with` to its end. Never: knows what an answer
looks like, or writes one. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web
from msgspec.structs import replace

from shmserve.http.admission import PARTY
from shmserve.http.deadlines import (
    ARRIVAL,
    DEADLINE,
    PARSED,
    Overdue,
    deadline_exceeded,
    failure_of,
)
from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.request_book import RECORD, RequestRecord
from shmserve.http.routing import RANK
from shmserve.http.timing import Entrance, TokenTimes
from shmserve.request import SamplingParams

if TYPE_CHECKING:
    from shmserve.http.front_end import FrontEnd


PER_TURN: Final = 16
"""Sequences of one request, 0.1 to 0.2 ms each, that are made or submitted in one turn of the event loop."""


class Wanted(msgspec.Struct, frozen=True):
    """One completion to generate. `params` holds its own seed."""

    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    cache_salt: bytes = b""
    is_timed: bool = False  # its client is told its times
    external_id: str = ""  # its client's name for it, if it has one of its own in the request


class Generation:
    """Completions in flight for one HTTP request: `async with` submits them all, and aborts what is left at the end."""

    def __init__(
        self, front: FrontEnd, request: web.Request, wanted: Sequence[Wanted], external_id: str = ""
    ) -> None:
        self.entries: list[InFlight] = []
        self.signal = Signal()
        self.wanted = wanted
        self.arrival_ns = request[ARRIVAL]
        self._entrance = Entrance(
            self.arrival_ns, request.get(PARSED, self.arrival_ns), time.monotonic_ns()
        )
        self._front = front
        self._party = request.get(PARTY)
        self._deadline_ns = request.get(DEADLINE, 0)
        self._rank = request.get(RANK)
        self._overdue: Overdue | None = None
        self._record = request.get(RECORD)
        self._external_id = external_id

    async def __aenter__(self) -> Generation:
        admission = self._front.admission
        party = self._party = self._party or admission.enter(len(self.wanted))
        try:
            admission.settle(party, sum(len(wanted.prompt_ids) for wanted in self.wanted))
            if 0 < self._deadline_ns <= time.monotonic_ns():
                admission.refused("deadline")
                raise deadline_exceeded("before it was submitted")
            for index, wanted in enumerate(self.wanted):
                external_id = wanted.external_id or self._external_id
                self.entries.append(
                    await self._front.client.submit(
                        wanted.prompt_ids,
                        wanted.params,
                        index=index,
                        signal=self.signal,
                        arrival_ns=self.arrival_ns,
                        digest=digest_of(external_id) if external_id else b"",
                        cache_salt=wanted.cache_salt,
                        deadline_ns=self._deadline_ns,
                        party=party,
                        rank=self._rank,
                        timing=TokenTimes(self._entrance) if wanted.is_timed else None,
                    )
                )
                if self._record is not None:
                    self._enter_record(self._record)
                await let_others_go(index + 1, 1)
                if party.error is not None:  # somebody better came while it waited for the ring
                    raise party.error
            self._watch()
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

    def _enter_record(self, record: RequestRecord) -> None:
        """The book hears of the newest completion, and with the first of the request."""
        entry, book = self.entries[-1], self._front.book
        if len(self.entries) == 1:
            record.entries = self.entries
            record.params = self.wanted[0].params
            # The completions of one prompt share its array.
            prompts = {id(wanted.prompt_ids): len(wanted.prompt_ids) for wanted in self.wanted}
            record.num_prompt_tokens = sum(prompts.values())
            record.parsed_ns = self._entrance.parsed_ns
            record.tokenised_ns = self._entrance.tokenised_ns
        if book is not None:
            book.entered(record, entry, entry.place)

    def _watch(self) -> None:
        waiting_s = self._front.config.worker.waiting_timeout_s
        if waiting_s or self._deadline_ns:
            until_ns = self.arrival_ns + int(waiting_s * 1e9) if waiting_s else 0
            self._overdue = Overdue(
                self._front.client,
                self._front.admission,
                self.entries,
                self._deadline_ns,
                until_ns,
            )

    def _release(self) -> None:
        self.signal.close()
        if self._overdue is not None:
            self._overdue.stop()
        if self._party is not None:
            self._front.admission.close(self._party)
        histograms = self._front.board.histograms
        if self.entries and all(
            entry.finish is not None
            and entry.error is None
            and entry.expiry is None
            and not entry.is_aborted
            for entry in self.entries
        ):
            # Refused, failed and abandoned requests would make the server look fast.
            histograms["e2e_us"].observe_one((time.monotonic_ns() - self.arrival_ns) // 1000)
        for entry in self.entries:
            if entry.finish is not None and entry.finish.scheduled_ns:
                queued_ns = entry.finish.scheduled_ns - self.arrival_ns
                histograms["queue_us"].observe_one(queued_ns // 1000)
            self._front.client.abort(entry)

    async def finish(self) -> None:
        """Wait until every completion has ended. Raises ApiError if one failed."""
        while True:
            failure = failure_of(self.entries)
            if failure is not None:
                raise failure
            if all(entry.is_over for entry in self.entries):
                self._note_first_token()
                return
            await self.signal.wait()

    def _note_first_token(self) -> None:
        """Of an answer that is not streamed; a stream's is its first frame (stream.py)."""
        popped_ns = [entry.first_popped_ns for entry in self.entries if entry.has_tokens]
        if popped_ns:
            ttft_us = (min(popped_ns) - self.arrival_ns) // 1000
            self._front.board.histograms["ttft_us"].observe_one(ttft_us)

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
        text = TextStream(
            self.pieces(index),
            params.stop,
            params.min_tokens,
            params.stop_regex,
            params.include_stop,
        )
        self.entries[index].text = text
        return text

    def pieces(self, index: int) -> Pieces:
        """The texts of its tokens."""
        params = self.wanted[index].params
        if params.shown_ids and params.skip_special_tokens:
            return self._front.tokenizer.pieces_showing(frozenset(params.shown_ids))
        return self._front.tokenizer.pieces_for(params.skip_special_tokens)


async def let_others_go(num_sequences: int, num_new: int) -> None:
    """Give running streams a turn if the newest of a request's sequences have filled another PER_TURN: a batch is no burst of requests."""
    if num_sequences // PER_TURN > (num_sequences - num_new) // PER_TURN:
        await asyncio.sleep(0)


def external_id_of(request: web.Request, request_id: str | None) -> str:
    """Its client's name for a request, as it is: from the body, or X-Request-Id."""
    header: str = request.headers.get("X-Request-Id", "")
    return request_id or header


def digest_of(external_id: str) -> bytes:
    """What workers know of a client's own request id: 16 bytes."""
    return hashlib.blake2b(external_id.encode(), digest_size=16).digest()


def choices_of(
    prompt_ids: npt.NDArray[np.int32],
    params: SamplingParams,
    seeds: Sequence[int],
    cache_salt: bytes,
    is_timed: bool = False,
    external_id: str = "",
) -> list[Wanted]:
    """The n completions of one prompt, each with its own random stream."""
    return [
        Wanted(prompt_ids, replace(params, seed=seed), cache_salt, is_timed, external_id)
        for seed in seeds
    ]
