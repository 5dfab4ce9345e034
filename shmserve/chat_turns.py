"""A conversation with a server: its messages, and one streamed answer at a time.

Owns: what is sent, and what of an answer that was stopped stays in the conversation. Never: reads a key or prints. `shmserve chat` only.

A turn that is cancelled closes its connection, and that is how the server learns that nobody wants the rest: it frees the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shmserve.load_report import RequestResult
from shmserve.load_spec import CHAT_PATH
from shmserve.loadgen import result_of
from shmserve.stream_reading import Piece, Reading, events
from shmserve.target import Target

Message = dict[str, str]


class TurnError(RuntimeError):
    """A turn that came to no end; the text is one line. What was said before it still stands."""


@dataclass(slots=True)
class Conversation:
    """`fields` go into every body: model, max_tokens, temperature and their like."""

    target: Target
    fields: Mapping[str, Any]
    system: str = ""
    messages: list[Message] = field(default_factory=list)
    _taken_back: str = field(default="", init=False)  # a question that got no answer

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.messages.clear()
        self._taken_back = ""

    def whole(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def last_question(self) -> str:
        """The last question, taken back together with its answer if it got one; "" if there is none."""
        if self._taken_back:
            return self._taken_back
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return ""

    async def turn(
        self, session: aiohttp.ClientSession, question: str, show: Callable[[Piece], None]
    ) -> RequestResult:
        """Ask, and show the answer piece by piece. Raises TurnError.

        A question that got no text at all is taken back; an answer that was stopped, or broke, stays as far as it came.
        """
        self.messages.append({"role": "user", "content": question})
        self._taken_back = ""
        reading = Reading()
        texts: list[str] = []
        try:
            error = await self._read(session, reading, texts, show)
            if error is not None:
                raise TurnError(reading.message or f"the answer ended early ({error})")
        except (aiohttp.ClientError, OSError) as broken:
            raise TurnError(self.target.why(broken)) from None
        except (ValueError, AttributeError, TypeError):
            raise TurnError(f"{self.target.name} sent what is no stream of chunks") from None
        finally:
            answer = "".join(texts)
            if answer or reading.finish_reason is not None:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
                self._taken_back = question
        return result_of(reading, 0, reading.sent_ns, None)

    async def _read(
        self,
        session: aiohttp.ClientSession,
        reading: Reading,
        texts: list[str],
        show: Callable[[Piece], None],
    ) -> str | None:
        body = {
            "messages": self.whole(),
            "stream": True,
            "stream_options": {"include_usage": True},
        } | dict(self.fields)
        async with session.post(self.target.url(CHAT_PATH), json=body) as response:
            reading.status = response.status
            if response.status != 200:
                reading.refused(await response.read())
                return reading.error()
            async for event, at_ns in events(response.content):
                piece = reading.take(event, at_ns)
                if piece.text or piece.reasoning:
                    texts.append(piece.text)
                    show(piece)
            return reading.error()
