"""Streams through a router, many at once, and what became of each.

Owns: the requests and the reading. Never: judges. One asyncio loop, connections of their own, aiohttp's client.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"


@dataclass(slots=True)
class Told:
    """One answer. `is_whole`: the body ended as HTTP says it must; 0 as a status: there was no answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    finish: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    has_done: bool = False
    is_whole: bool = False
    has_timing: bool = False
    num_reads: int = 0
    num_frames: int = 0
    ended_at: float = 0.0
    body: bytes = b""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_complete(self) -> bool:
        """Everything came: a finish, [DONE] and the body's end, and no error."""
        return bool(self.finish and self.has_done and self.is_whole and not self.error)

    @property
    def code(self) -> str:
        """Of the error that ended it: shmserve's code, or a router's type; "" if none."""
        return str(self.error.get("code") or self.error.get("type") or "")


def question(number: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    """A chat request of its own seed. The number comes first, so that routers by prefix take no two of them for alike."""
    words = f"{number * 7919 % 10_007} is a number. Say something about it."
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": words}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": 1000 + number,
        "stream": True,
    }
    return body | more


_numbers = itertools.count(100)


def questions(count: int, num_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Such as nobody has asked yet: a router by prefix would send all that it knows to where it sent them before."""
    return [question(next(_numbers), num_tokens, **more) for _ in range(count)]


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=120),
    )


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    path: str = CHAT,
    started: asyncio.Event | None = None,
    headers: dict[str, str] | None = None,
) -> Told:
    """One request to its end. `started` is set with its first token."""
    told = Told()
    try:
        async with client.post(url + path, json=body, headers=headers) as answer:
            told.status = answer.status
            told.headers = {name.lower(): value for name, value in answer.headers.items()}
            if answer.status != 200 or not body.get("stream"):
                told.body = await answer.read()
            else:
                await _read(answer, told, started)
            told.is_whole = True
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        told.is_whole = False
    told.ended_at = time.monotonic()
    return told


async def _read(answer: aiohttp.ClientResponse, told: Told, started: asyncio.Event | None) -> None:
    left = b""
    async for data in answer.content.iter_any():
        told.num_reads += 1
        *frames, left = (left + data).split(b"\n\n")
        for frame in frames:
            _note(frame, told)
        if started is not None and told.texts:
            started.set()


def _note(frame: bytes, told: Told) -> None:
    for line in frame.split(b"\n"):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            told.has_done = True
            continue
        event = json.loads(data)
        told.num_frames += 1
        told.has_timing = told.has_timing or b'"timing"' in data
        if "error" in event:
            told.error = event["error"]
            continue
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                told.texts.append(text)
            told.finish = choice.get("finish_reason") or told.finish


async def ask_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[Told]:
    """All at once."""
    async with session() as client:
        return list(await asyncio.gather(*(ask(client, url, body) for body in bodies)))


class Streams:
    """Streams that run while something is done to the fleet: `async with Streams(...) as streams`, then `await streams.told()`."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        self._url = url
        self._bodies = bodies
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Streams:
        self._client = session()
        started = [asyncio.Event() for _ in self._bodies]
        self._tasks = [
            asyncio.create_task(ask(self._client, self._url, body, started=event))
            for body, event in zip(self._bodies, started, strict=True)
        ]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in started))
        return self

    async def told(self) -> list[Told]:
        return list(await asyncio.gather(*self._tasks))

    async def leave(self) -> None:
        """Close every connection in the middle of its answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        await self._client.close()
