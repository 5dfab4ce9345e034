"""The congested phase of one stream: from the write that its client did not take whole, until the client has read it.

Owns: what is done meanwhile, by the stream's policy, and how the stream ends if it lasts too long. Never: runs while the client keeps
up, or builds a frame (`stream.py` does).

    coalesce   tokens wait as text, and become one frame per choice when the client reads on
    block      and its sequences are paused in the scheduler meanwhile, so that hardly anything comes
    drop       the stream is cut at once

A stream that is cut, by `drop` or by the bound on bytes, has its requests aborted at that moment. What the transport holds is not
taken back: a client that reads on gets it, then an error event and a proper end, never a text with a hole. One that has read nothing
for the bound on seconds, or has not read to that end by then, loses its connection. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from shmserve.http.errors import ApiError
from shmserve.http.slow_client import Backlog, SlowClientRules, SlowClients

if TYPE_CHECKING:
    from shmserve.http.choice import Choice
    from shmserve.http.client import WorkerClient

ID_BYTES: Final = 4
LOGPROB_BYTES: Final = 120
"""A token id and its logprob while they wait: a pair, its number, and their places."""


class Congestion:
    """One stream's. `choices` share its connection, whose transport calls `drain` finished when it holds nothing any more."""

    def __init__(
        self,
        slow_clients: SlowClients,
        client: WorkerClient,
        rules: SlowClientRules,
        transport: asyncio.Transport,
        drain: Callable[[], Awaitable[None]],
        choices: Sequence[Choice],
    ) -> None:
        self._slow_clients = slow_clients
        self._client = client
        self._rules = rules
        self._transport = transport
        self._drain = drain
        self._choices = choices
        self._backlog: Backlog | None = None
        self._cut: ApiError | None = None

    @property
    def is_on(self) -> bool:
        return self._backlog is not None

    @property
    def name(self) -> str:
        """For the log."""
        return f"request {self._choices[0].entry.req_id:016x}"

    def begin(self) -> None:
        """The transport did not take everything: from here on tokens wait."""
        if self._backlog is not None:
            return
        self._backlog = self._slow_clients.watch(
            self._transport,
            self._rules,
            self.name,
            self._on_end,
            req_id=self._choices[0].entry.req_id,
        )
        for choice in self._choices:
            choice.entry.direct = None
        if self._rules.policy == "drop" and any(choice.is_open for choice in self._choices):
            self._client.board.add("num_clients_dropped")
            self._cut_off("it does not keep up, and the policy is drop")
        self._choices[0].entry.signal.set()

    def hold(self, choice: Choice, text: str, token_ids: Sequence[int]) -> None:
        """Tokens for a congested client."""
        assert self._backlog is not None
        encoded = text.encode()
        choice.held_ns = choice.held_ns or choice.framed_ns
        choice.waiting_text += encoded
        choice.waiting_ids.extend(token_ids)
        size = len(encoded) + ID_BYTES * len(token_ids)
        if choice.entry.logprobs is not None:
            size += LOGPROB_BYTES * choice.entry.logprobs.width * len(token_ids)
        waiting = self._backlog.text_bytes + size
        self._slow_clients.note_text(self._backlog, waiting)
        self._client.board.add("num_client_coalesced_tokens", len(token_ids))
        if waiting > self._rules.most_bytes:
            self._cut_off(f"more than {self._rules.most_bytes} bytes waited for it")

    async def relieve(self) -> None:
        """Wait until the client has read what was written, as long as it may take. Raises ApiError for a stream that was cut."""
        paused = []
        if self._rules.policy == "block" and self._cut is None:
            paused = [choice.entry for choice in self._choices if choice.is_open]
        for entry in paused:
            if self._client.set_paused(entry, True):
                self._client.board.add("num_clients_paused")
        await self._drain()
        if self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self.end()
        if self._cut is not None:
            raise self._cut
        for entry in paused:
            self._client.set_paused(entry, False)

    def end(self) -> None:
        """Nothing waits for this client any more, or its connection is closed."""
        if self._backlog is not None:
            self._slow_clients.release(self._backlog)
            self._backlog = None

    def _cut_off(self, reason: str) -> None:
        """The stream goes on no more: what waits in front of the transport is given up, and the requests are aborted."""
        assert self._backlog is not None
        if self._cut is not None:
            return
        self._slow_clients.count_ended(self.name, reason)
        self._cut = ApiError(
            408, f"The client reads too slowly: {reason}.", type="timeout_error", code="slow_client"
        )
        self._give_up_text()
        self._backlog.end_by(asyncio.get_running_loop().time() + self._rules.most_seconds)

    def _on_end(self, is_stuck: bool) -> None:
        """Called by the look at congested clients. The closed connection cancels the handler."""
        if is_stuck and self._cut is None:
            seconds = self._rules.most_seconds
            self._slow_clients.count_ended(self.name, f"it has read nothing for {seconds:g} s")
        self._give_up_text()
        self._backlog = None
        self._transport.abort()

    def _give_up_text(self) -> None:
        for choice in self._choices:
            choice.drop_waiting()
            self._client.abort(choice.entry)
        if self._backlog is not None:
            self._slow_clients.note_text(self._backlog, 0)
