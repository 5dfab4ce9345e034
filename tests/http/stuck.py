"""One response of a Puppet, in a loop of its own, and a client that stops reading it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from puppet import Puppet, tokens_record

from shmserve.config import HttpConfig, RingConfig
from shmserve.models import PreparedModel

WORLD, DOG = 905, 2767  # " world", " dog"
RINGS = RingConfig(token_slots=4096, submit_slots=16)


def run(scenario: Callable[[Puppet], Awaitable[None]], model: PreparedModel, **http: Any) -> None:
    """Run scenario(puppet) behind a front end with these settings."""

    async def whole() -> None:
        async with Puppet(model, HttpConfig(**http), RINGS) as puppet, asyncio.timeout(40):
            await scenario(puppet)

    asyncio.run(whole())


async def stick(
    puppet: Puppet, word: str = "mailbox_bytes", **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int, int]:
    """A stream whose client reads nothing, until `word` of the board grows for it: (reader, writer, req_id, tokens put so far)."""
    before = puppet.board[word]
    reader, writer = await puppet.ask(stream=True, receive_buffer=4096, **fields)
    req_id = (await puppet.submitted()).req_id
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    count = 0
    while puppet.board[word] <= before:
        assert count < 3000
        puppet.put(*(tokens_record(req_id, [WORLD], count + i) for i in range(20)))
        count += 20
        await asyncio.sleep(0.002)
    return reader, writer, req_id, count
