"""The answer of an API whose responses have one completion: submitted, then streamed or whole. Event loop's thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from shmserve.http.choice import Choice, ChoiceFormat, ResponseFormat
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation import Generation, Wanted
from shmserve.http.in_flight import InFlight
from shmserve.http.slow_client import SlowClientRules
from shmserve.http.stream import SseStream


class SingleFormat(ChoiceFormat, Protocol):
    def whole(self, parts: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """The object of an answer that is not streamed."""


async def answer_single(
    front: FrontEnd,
    request: web.Request,
    want: Wanted,
    external_id: str,
    headers: dict[str, str],
    is_streamed: bool,
    rules: SlowClientRules,
    formats_of: Callable[[InFlight], tuple[SingleFormat, ResponseFormat]],
) -> web.StreamResponse:
    """`formats_of(entry)`: how the completion looks, and what stands around it."""
    async with Generation(front, request, [want], external_id) as generation:
        (entry,) = generation.entries
        single, around = formats_of(entry)
        if is_streamed:
            choice = Choice(entry, generation.text_stream(0), generation.pieces(0), single)
            stream = SseStream(
                request,
                front,
                rules,
                generation.signal,
                [choice],
                around,
                headers,
            )
            return await stream.run()
        await generation.finish()
        whole = single.whole(generation.parts_of(0))
    return web.Response(
        body=msgspec.json.encode(whole), content_type="application/json", headers=headers
    )
