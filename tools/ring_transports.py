"""Five ways to carry a step's tokens from one process to an asyncio loop in another, each with its usual encoding.

Owns: the two ends of each transport, as a user of it would write them. Never: measures, or gives one of them work that another
is spared: every record carries req id, token id, time_ns, index and finish, and every receiver ends in usable values.

    rings         shmserve.rings + shmserve.wire     columns in, columns out; "values" are their .tolist()
    zmq_msgpack   ZeroMQ PUSH/PULL over ipc          one msgspec Struct per request and step, array-like, as vLLM's engine core
    zmq_pickle    ZeroMQ PUSH/PULL over ipc          one object of Python lists, pickle 5, as SGLang's scheduler
    mp_queue      multiprocessing.Queue              the same object; a thread reads and hands over to the loop
    mp_pipe       multiprocessing.Pipe               the same object; the loop watches the descriptor

A transport is made in the parent, then forked into both processes: each calls its own end only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from shmserve.rings.channel import Ring, RingShape
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TOKENS_DTYPE, TokenKind

RING_SLOTS = 16_384  # the server's default
FIELDS = ("req_id", "token_id", "time_ns", "index", "finish")
Ids = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]
Send = Callable[[Tokens, int, int, int], None]
"""send(token ids, index, finish, time_ns): one step of the whole batch."""
Take = Callable[[int, Sequence[int], Any], None]
"""take(number of records, time_ns of each step in them, the values): called once the values are usable."""


class Transport:
    """One way across. `form` says in what the receiver ends: Python values, or numpy columns."""

    name = ""
    form = "values"

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.req_ids: Ids = np.arange(batch, dtype=np.uint64) + np.uint64(1 << 24)

    def sender(self) -> Send:
        raise NotImplementedError

    async def listen(self, take: Take) -> None:
        """Starts to call `take`; returns at once."""
        raise NotImplementedError

    @staticmethod
    def columns_of(values: Any) -> list[list[int]]:
        """The received values as five lists, to compare them with what was sent."""
        return [list(column) for column in values]

    def close(self) -> None:
        """Parent only, after both processes have ended."""


class RingTransport(Transport):
    """Our token ring. The producer fills columns of whole slots; the consumer reads columns and gives the slots back."""

    name = "rings"

    def __init__(self, batch: int, form: str = "values") -> None:
        super().__init__(batch)
        self.form = form
        name = f"/shmserve.bench-{os.getpid()}.0.0-0.tokens"
        self._ring = Ring.create(name, RingShape(TOKEN_SLOT_BYTES, RING_SLOTS), epoch=0)

    def sender(self) -> Send:
        ring, batch, ids = self._ring, self.batch, self.req_ids
        producer = ring.producer()
        slots = np.zeros(batch, TOKENS_DTYPE)
        slots["kind"] = TokenKind.TOKENS
        slots["count"] = 1
        req_id, token_id, time_col = slots["req_id"], slots["token_ids"][:, 0], slots["time_ns"]
        index_col, finish_col = slots["index"], slots["finish"]
        data = slots.data.cast("B")

        def send(tokens: Tokens, index: int, finish: int, time_ns: int) -> None:
            req_id[:] = ids
            token_id[:] = tokens
            time_col[:] = time_ns
            index_col[:] = index
            finish_col[:] = finish
            while not producer.try_write(data, batch):
                ring.wait_credits(1.0)

        return send

    async def listen(self, take: Take) -> None:
        consumer = self._ring.consumer()
        batch, as_values = self.batch, self.form == "values"

        def on_data() -> None:
            consumer.poll()
            while consumer.owed:
                slots = np.frombuffer(consumer.view(consumer.owed), TOKENS_DTYPE)
                columns = (
                    slots["req_id"],
                    slots["token_ids"][:, 0],
                    slots["time_ns"],
                    slots["index"],
                    slots["finish"],
                )
                # Copies, not views: the slots are the producer's again after release.
                values: list[Any] = (
                    [c.tolist() for c in columns] if as_values else [c.copy() for c in columns]
                )
                consumer.release(len(slots))
                times = values[2][::batch]
                take(len(slots), times if as_values else times.tolist(), values)

        asyncio.get_running_loop().add_reader(self._ring.data.fd, on_data)

    @staticmethod
    def columns_of(values: Any) -> list[list[int]]:
        return [column if isinstance(column, list) else column.tolist() for column in values]

    def close(self) -> None:
        self._ring.segment.unlink()
        self._ring.close()


class ZmqTransport(Transport):
    """ZeroMQ PUSH/PULL over ipc with the high-water marks off, as both engines have it."""

    def __init__(self, batch: int, folder: str) -> None:
        super().__init__(batch)
        self._address = f"ipc://{folder}/{self.name}"

    def _encode(self) -> Callable[[Tokens, int, int, int], bytes]:
        raise NotImplementedError

    def _decode(self) -> Callable[[bytes], tuple[int, Any]]:
        raise NotImplementedError

    def sender(self) -> Send:
        socket = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(self._address)
        encode = self._encode()

        def send(tokens: Tokens, index: int, finish: int, time_ns: int) -> None:
            socket.send(encode(tokens, index, finish, time_ns))

        return send

    async def listen(self, take: Take) -> None:
        socket = zmq.asyncio.Context().socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(self._address)
        decode, batch = self._decode(), self.batch

        async def receive() -> None:
            while True:
                time_ns, values = decode(await socket.recv())
                take(batch, [time_ns], values)

        self._task = asyncio.create_task(receive())


class Row(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One request's share of a step."""

    req_id: int
    token_id: int
    time_ns: int
    index: int
    finish: int = 0


class MsgpackTransport(ZmqTransport):
    name = "zmq_msgpack"

    def _encode(self) -> Callable[[Tokens, int, int, int], bytes]:
        encode = msgspec.msgpack.Encoder().encode
        ids = self.req_ids.tolist()

        def rows(tokens: Tokens, index: int, finish: int, time_ns: int) -> bytes:
            pairs = zip(ids, tokens.tolist(), strict=True)
            return encode([Row(req_id, token, time_ns, index, finish) for req_id, token in pairs])

        return rows

    def _decode(self) -> Callable[[bytes], tuple[int, Any]]:
        decode = msgspec.msgpack.Decoder(list[Row]).decode

        def rows(data: bytes) -> tuple[int, Any]:
            values = decode(data)
            return values[0].time_ns, values

        return rows

    @staticmethod
    def columns_of(values: Any) -> list[list[int]]:
        return [[getattr(row, field) for row in values] for field in FIELDS]


@dataclass(slots=True)
class TokenLists:
    """A step as one object of Python lists."""

    req_id: list[int]
    token_id: list[int]
    time_ns: list[int]
    index: list[int]
    finish: list[int]

    def columns(self) -> list[list[int]]:
        return [self.req_id, self.token_id, self.time_ns, self.index, self.finish]


def list_maker(req_ids: Ids) -> Callable[[Tokens, int, int, int], TokenLists]:
    """Makes the object of one step, as the peers do it from the sampler's array."""
    ids, batch = req_ids.tolist(), len(req_ids)

    def make(tokens: Tokens, index: int, finish: int, time_ns: int) -> TokenLists:
        return TokenLists(
            ids, tokens.tolist(), [time_ns] * batch, [index] * batch, [finish] * batch
        )

    return make


class PickleTransport(ZmqTransport):
    name = "zmq_pickle"

    def _encode(self) -> Callable[[Tokens, int, int, int], bytes]:
        make = list_maker(self.req_ids)
        return lambda *step: pickle.dumps(make(*step), 5)

    def _decode(self) -> Callable[[bytes], tuple[int, Any]]:
        def lists(data: bytes) -> tuple[int, Any]:
            values = pickle.loads(data)
            return values.time_ns[0], values

        return lists

    @staticmethod
    def columns_of(values: Any) -> list[list[int]]:
        return values.columns()


class QueueTransport(Transport):
    name = "mp_queue"
    columns_of = staticmethod(PickleTransport.columns_of)

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._queue: Any = multiprocessing.get_context("fork").Queue()

    def sender(self) -> Send:
        put, make = self._queue.put, list_maker(self.req_ids)
        return lambda *step: put(make(*step))

    async def listen(self, take: Take) -> None:
        loop, get, batch = asyncio.get_running_loop(), self._queue.get, self.batch

        def taken(values: TokenLists) -> None:
            take(batch, values.time_ns[:1], values)

        def read() -> None:
            while True:
                loop.call_soon_threadsafe(taken, get())

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        self._queue.close()


class PipeTransport(Transport):
    name = "mp_pipe"
    columns_of = staticmethod(PickleTransport.columns_of)

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self._reader, self._writer = multiprocessing.get_context("fork").Pipe(duplex=False)

    def sender(self) -> Send:
        send, make = self._writer.send, list_maker(self.req_ids)
        return lambda *step: send(make(*step))

    async def listen(self, take: Take) -> None:
        recv, batch = self._reader.recv, self.batch

        def on_data() -> None:
            values = recv()
            take(batch, values.time_ns[:1], values)

        asyncio.get_running_loop().add_reader(self._reader.fileno(), on_data)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def makers(folder: str) -> list[Callable[[int], Transport]]:
    """Every transport and form, by a function of the batch size."""
    return [
        RingTransport,
        lambda batch: RingTransport(batch, "columns"),
        lambda batch: MsgpackTransport(batch, folder),
        lambda batch: PickleTransport(batch, folder),
        QueueTransport,
        PipeTransport,
    ]
