"""One completion of a streamed response, and what its events look like to whoever writes them.

Owns: the tokens of one choice between the pump and its frames (what was taken, what waits for a congested client), and the two
protocols that every API's formats keep. Never: writes to a transport, or builds JSON. Event loop's thread only.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shmserve.http.direct import Direct
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight

if TYPE_CHECKING:
    from shmserve.http.detokenizer import Pieces, TextStream
    from shmserve.http.logprob_send import LogprobPath
    from shmserve.http.made_send import MadePath
    from shmserve.http.ways import Way


class ChoiceFormat(Protocol):
    """How one choice looks on the wire: whole SSE events as bytes."""

    @property
    def way(self) -> Way | None:
        """Which way the pump may write the next token, if it is whole text: what stands before and behind that text, JSON-escaped, if it
        is all that changes, or one of `ways.py`. None: only `delta` knows."""

    def opening(self) -> bytes:
        """Events before the first text."""

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        """The event for new tokens and the text they released (maybe none); b"" for no event."""

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        """The events that end the choice; `text` was held until now."""


class ResponseFormat(Protocol):
    """What stands around the choices."""

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        """Events after the last choice's end, [DONE] included."""

    def failing(self, error: ApiError) -> bytes:
        """Events that end a stream that could not go on."""


class Choice:
    """One completion of a streamed response."""

    def __init__(
        self, entry: InFlight, text: TextStream, pieces: Pieces, fmt: ChoiceFormat
    ) -> None:
        self.entry = entry
        self.text = text
        self.pieces = pieces
        self.format = fmt
        self.is_open = True
        self.way: Way | None = None  # that `direct` is made for
        self.direct: Direct | LogprobPath | MadePath | None = None
        # For a congested client, without an object per token: what waits is as large as it is counted.
        self.waiting_text = bytearray()
        self.waiting_ids = array("i")
        self.num_unwritten = 0  # tokens that came since the newest frame
        self.framed_ns = 0  # when the newest of them was ready for a frame
        self.held_ns = 0  # when the first of those was that wait, or have waited, for a congested client; 0: none
        self.has_events = False  # made, and not yet noted as written

    def take(self) -> list[tuple[str, list[int]]]:
        """What has come since the last call, token by token: (text, [id])."""
        entry = self.entry
        ids, entry.token_ids = entry.token_ids, []
        taken = []
        last = len(ids) - 1
        for i, token_id in enumerate(ids):
            has_text = not (entry.was_stop_token and i == last)
            taken.append((self.text.feed(token_id) if has_text else "", [token_id]))
        self.num_unwritten += len(taken)  # one token each
        if taken:
            self.framed_ns = time.monotonic_ns()
            if entry.timing is not None:
                entry.timing.framed(self.framed_ns)
        return taken

    def closing(self) -> bytes:
        """The events of its end, which has come."""
        entry = self.entry
        assert entry.finish is not None
        self.is_open = False
        return self.format.closing(self.text.finish(entry.finish.keep_bytes), (), entry)

    def take_joined(self) -> tuple[str, list[int]]:
        """What has come since the last call, as one delta."""
        taken = self.take()
        return "".join(text for text, _ in taken), [ids[0] for _, ids in taken]

    def waiting_frame(self) -> bytes:
        """The event of what waited for a congested client; b"" if nothing did."""
        if not self.waiting_ids:
            return b""
        text, ids = self.waiting_text.decode(), self.waiting_ids.tolist()
        self.drop_waiting()
        return self.format.delta(text, ids)

    def drop_waiting(self) -> None:
        self.waiting_text = bytearray()
        self.waiting_ids = array("i")
