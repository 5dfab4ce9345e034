"""A front end in this process whose worker is the test: real rings, a real socket, and every record put in by hand.

For what no worker does on demand: records in an unlikely order, an end while a client is stuck, a counter that lies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shmserve.boards import http_board
from shmserve.config import Config, HttpConfig, RingConfig
from shmserve.http import app
from shmserve.http.admission import Admission
from shmserve.http.client import WorkerClient
from shmserve.http.front_end import FrontEnd
from shmserve.http.health import Boards
from shmserve.http.in_flight import InFlight, Signal
from shmserve.http.listener import Listener
from shmserve.http.occupancy import Occupancy
from shmserve.http.request_templates import RequestTemplates
from shmserve.http.slow_client import SlowClients
from shmserve.http.structured import Grammars
from shmserve.http.template import ChatTemplate
from shmserve.http.tokenizer import Tokenizer
from shmserve.http.turnstile import Turnstile
from shmserve.http.worker_link import WorkerLink
from shmserve.models import PreparedModel
from shmserve.request import FinishReason, SamplingParams
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.rings.segment import names
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.submit import Submit, unpack_submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, SubmitKind, submit_head
from shmserve.wire.tokens import FLAG_LAST_IS_STOP, TOKEN_SLOT_BYTES, TOKENS_DTYPE, TokenKind

_numbers = itertools.count()

SMALL_RINGS = RingConfig(token_slots=64, submit_slots=4, table_size=16, submit_deadline_s=0.05)


async def until(condition: Any, what: str) -> Any:
    """The first true value of `condition`, with turns of the loop between."""
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.002)
    return value


def tokens_record(
    req_id: int, token_ids: Sequence[int], index: int = 0, *, is_stop: bool = False
) -> bytes:
    record = np.zeros(1, TOKENS_DTYPE)
    record["req_id"] = req_id
    record["time_ns"] = time.monotonic_ns()
    record["index"] = index
    record["kind"] = TokenKind.TOKENS
    record["count"] = len(token_ids)
    record["flags"] = FLAG_LAST_IS_STOP if is_stop else 0
    record["token_ids"][0, : len(token_ids)] = token_ids
    return record.tobytes()


def finish_record(
    req_id: int, reason: FinishReason = FinishReason.LENGTH, message: str = "", **more: Any
) -> bytes:
    now = time.monotonic_ns()
    record = pack_finish(TokenKind.FINISH, req_id, time_ns=now, step=1, finish=reason, **more)
    return (pack_message(req_id, message, time_ns=now) if message else b"") + record


def started_record(req_id: int) -> bytes:
    now = time.monotonic_ns()
    return pack_finish(TokenKind.STARTED, req_id, time_ns=now, step=1, stamps=(now, now, now, 0, 0))


class Rings:
    """A channel, both its ends, and the client at the front end's. Needs a running loop."""

    def __init__(self, rings: RingConfig | None = None, http: int = 0) -> None:
        self.config = rings or RingConfig(token_slots=256, submit_slots=16)
        self.instance = f"test-puppet-{os.getpid()}-{next(_numbers)}"
        self.board = Board.create(
            Board.name(self.instance, 1, "http", http), http_board(self.config.table_size), 1
        )
        self.client = WorkerClient(http, self.config, self.board)
        self.link: WorkerLink = self.client.link(0)
        self._epoch = 0
        self._channels: list[Channel] = []
        self.connect()

    def connect(self) -> None:
        """A new life of the worker, on a new channel."""
        self._epoch += 1
        channel = Channel.create(
            self.instance,
            self._epoch,
            0,
            0,
            RingShape(SUBMIT_SLOT_BYTES, self.config.submit_slots),
            RingShape(TOKEN_SLOT_BYTES, self.config.token_slots),
        )
        self._channels.append(channel)
        self.channel = channel
        self.producer = channel.tokens.producer()
        self.consumer = channel.submit.consumer()
        fds = [os.dup(fd) for fd in channel.fds()]
        self.link.open(Channel.from_fds(self.instance, self._epoch, 0, 0, fds))
        self.link.state = "ready"

    def put(self, *records: bytes) -> None:
        """Publish records in one go."""
        whole = b"".join(records)
        assert self.producer.try_write(whole, len(whole) // TOKEN_SLOT_BYTES), "the ring is full"

    def take(self, most: int = 1 << 30) -> list[tuple[SubmitKind, int, Submit | None]]:
        """What the front end has written and was not taken yet: (kind, req_id, the SUBMIT), at most `most` records."""
        taken: list[tuple[SubmitKind, int, Submit | None]] = []
        self.consumer.poll()
        while self.consumer.owed and len(taken) < most:
            req_id, kind, count = submit_head(self.consumer.peek(0))
            assert count <= self.consumer.owed, "a unit is published whole"
            request = None
            if kind == SubmitKind.SUBMIT:
                request = unpack_submit([self.consumer.peek(i) for i in range(count)])
            taken.append((SubmitKind(kind), req_id, request))
            self.consumer.release(count)
        return taken

    async def submitted(self) -> Submit:
        """The one SUBMIT that comes."""
        ((kind, _, request),) = await until(self.take, "a SUBMIT")
        assert kind == SubmitKind.SUBMIT and request is not None
        return request

    async def fill(self, num_slots: int = 4) -> list[InFlight]:
        """Take so many slots of the submit ring."""
        return [await self.submit() for _ in range(num_slots)]

    async def submit(self, num_prompt: int = 1, **more: Any) -> InFlight:
        return await self.client.submit(
            np.full(num_prompt, 19556, np.int32),
            SamplingParams(max_tokens=8, **more),
            index=0,
            signal=Signal(),
            arrival_ns=time.monotonic_ns(),
        )

    async def __aenter__(self) -> Rings:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.link.close("the test is over")
        for channel in self._channels:
            channel.unlink()
            channel.close()
        self.board.segment.unlink()
        self.board.close()
        assert names(f"shmserve.{self.instance}.") == []


class Puppet(Rings):
    """The whole front end behind a socket."""

    def __init__(
        self,
        model: PreparedModel,
        http: HttpConfig | None = None,
        rings: RingConfig | None = None,
    ) -> None:
        super().__init__(rings)
        http = http or HttpConfig()
        config = Config(http=http, rings=self.config)
        tokenizer = Tokenizer(model, 1)
        assert model.chat_template is not None
        self.front = FrontEnd(
            config=config,
            model=model,
            served_name=model.name,
            tokenizer=tokenizer,
            template=ChatTemplate(model.chat_template, tokenizer.special_tokens),
            own_templates=RequestTemplates(tokenizer.special_tokens),
            grammars=Grammars(model),
            client=self.client,
            admission=Admission(self.client, 4, http),
            turnstile=Turnstile(self.client.is_behind),
            slow_clients=SlowClients(self.board),
            board=self.board,
            started_at=int(time.time()),
        )
        self._runner = app.runner_of(app.build(self.front, Boards(), self.instance))
        self._http = http
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Puppet:
        await self._runner.setup()
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        assert self._runner.server is not None
        self._listener = Listener(
            self._runner.server,
            sock,
            replace(self._http, backlog=16),
            self.front.turnstile,
            Occupancy(1_000, self.front.admission.refused),
        )
        return self

    async def __aexit__(self, *rest: object) -> None:
        for writer in self._writers:
            writer.close()
        self.link.close("the test is over")
        self._listener.close()
        await self._runner.cleanup()
        self.front.tokenizer.close()
        self.front.grammars.close()
        await super().__aexit__(*rest)

    async def ask(
        self,
        path: str = "/v1/completions",
        receive_buffer: int = 0,
        version: str = "1.1",
        **fields: Any,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        self._writers.append(writer)
        body = json.dumps({"prompt": "Hi"} | fields).encode()
        head = (
            f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(status, body without its framing) of a whole response."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    lower = head.lower()
    if b"transfer-encoding: chunked" not in lower:
        if b"content-length: " not in lower:
            return status, await reader.read()
        length = int(lower.partition(b"content-length: ")[2].split()[0])
        return status, await reader.readexactly(length)
    body = b""
    while True:
        size = int((await reader.readline()).strip(), 16)
        part = await reader.readexactly(size + 2)
        assert part.endswith(b"\r\n")
        if not size:
            return status, body
        body += part[:-2]


def events_of(body: bytes) -> list[Any]:
    """The JSON objects of a stream's events, and "[DONE]"."""
    events: list[Any] = []
    for block in body.split(b"\n\n"):
        if block.startswith(b"data: "):
            data = block[6:]
            events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        else:
            assert not block or block.startswith(b": "), block
    return events


def text_of(events: Sequence[Any]) -> str:
    return "".join(
        choice["text"]
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", ())
    )
