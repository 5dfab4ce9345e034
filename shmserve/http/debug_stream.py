"""GET /debug/stream: the boards and rings of the whole instance, four times a second, as server-sent events.

    event: hello     what does not change: version, model, policies, limits, the bounds of the histograms
    data: {...}      a sample: what each process and ring shows (instance_view.py), and the workers as this front end sees them

Owns: one thread that reads shared memory for all listeners, and lives only while there are any; and the listeners. What waits for one
of them is one sample: the next replaces it and is counted (num_debug_skipped), so who reads slowly sees fewer. One that takes nothing
for --slow-client-seconds is cut; one more than MOST_LISTENERS gets a 503. Everything but the thread's body runs in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from typing import Any, Final

import msgspec
from aiohttp import web

from shmserve import __version__
from shmserve.boards import HTTP_BOARD, REFUSALS, WORKER_BOARD
from shmserve.http.errors import ApiError
from shmserve.http.front_end import FrontEnd
from shmserve.http.instance_view import InstanceView

MOST_LISTENERS: Final = 16
LOOK_S: Final = 0.025
LOOKS_PER_SAMPLE: Final = 10
SAMPLE_S: Final = LOOK_S * LOOKS_PER_SAMPLE


class Listener:
    """One client that looks on; `newest` is what it has not been sent."""

    def __init__(self) -> None:
        self.newest = b""
        self.awake = asyncio.Event()


class DebugStream:
    """The listeners of one front end, and their one reader."""

    def __init__(self, front: FrontEnd, instance: str) -> None:
        self._front = front
        self._instance = instance
        self._listeners: set[Listener] = set()
        self._enough: threading.Event | None = None  # ends the thread that runs
        self._is_closing = False
        self._hello = b"event: hello\ndata: " + msgspec.json.encode(self._constants()) + b"\n\n"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """One listener, until it leaves or the server ends."""
        if len(self._listeners) >= MOST_LISTENERS or self._is_closing:
            raise ApiError(
                503,
                f"/debug/stream has {len(self._listeners)} listeners, the limit is {MOST_LISTENERS}.",
                type="overloaded_error",
                code="too_many_listeners",
                retry_after_s=5,
            )
        listener = Listener()
        self._listeners.add(listener)
        self._front.board["debug_listeners"] = len(self._listeners)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                "X-Content-Type-Options": "nosniff",
            }
        )
        patience_s = self._front.config.http.slow_client_seconds
        try:
            if self._enough is None:
                self._start()
            await response.prepare(request)
            await response.write(self._hello)
            while not self._is_closing:
                await listener.awake.wait()
                listener.awake.clear()
                sample, listener.newest = listener.newest, b""
                if sample:
                    async with asyncio.timeout(patience_s):
                        await response.write(sample)
            await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._forget(listener)
        return response

    async def close(self, application: web.Application) -> None:
        """Every stream ends well, before the server waits for its connections."""
        self._is_closing = True
        self._end_reading()
        for listener in self._listeners:
            listener.awake.set()

    def _forget(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        self._front.board["debug_listeners"] = len(self._listeners)
        if not self._listeners:
            self._end_reading()

    def _start(self) -> None:
        self._enough = threading.Event()
        arguments = (asyncio.get_running_loop(), self._enough)
        threading.Thread(
            target=self._read, args=arguments, name="debug-stream", daemon=True
        ).start()

    def _end_reading(self) -> None:
        if self._enough is not None:
            self._enough.set()
            self._enough = None

    def _read(self, loop: asyncio.AbstractEventLoop, enough: threading.Event) -> None:
        """The thread: the only one that touches its view."""
        view = InstanceView(self._instance)
        try:
            while not enough.is_set():
                view.refresh()
                for _ in range(LOOKS_PER_SAMPLE):
                    if enough.wait(LOOK_S):
                        return
                    view.look()
                sample = msgspec.json.encode(view.snapshot())
                with contextlib.suppress(RuntimeError):  # the loop has ended, and so do we
                    loop.call_soon_threadsafe(self._publish, sample, enough)
        finally:
            view.close()

    def _publish(self, sample: bytes, enough: threading.Event) -> None:
        if enough.is_set():
            return  # of a reader whose listeners have left
        event = b'data: {"here":' + msgspec.json.encode(self._here()) + b"," + sample[1:] + b"\n\n"
        for listener in self._listeners:
            if listener.newest:
                self._front.board.add("num_debug_skipped")
            listener.newest = event
            listener.awake.set()

    def _here(self) -> dict[str, Any]:
        """What only this process knows."""
        links = self._front.client.links.values()
        return {
            "listeners": len(self._listeners),
            "is_draining": self._front.admission.is_draining,
            "workers": [
                {
                    "worker": link.worker,
                    "state": link.state,
                    "phase": link.phase,
                    "fraction": round(link.fraction, 3),
                }
                for link in links
            ],
        }

    def _constants(self) -> dict[str, Any]:
        config = self._front.config
        rings, http = config.rings, config.http
        return {
            "version": __version__,
            "instance": self._instance,
            "model": self._front.served_name,
            "sample_s": SAMPLE_S,
            "look_s": LOOK_S,
            "num_http": config.num_http,
            "num_workers": config.num_workers,
            "runner": config.worker.runner,
            "policies": {
                "token": rings.token_policy,
                "submit": rings.submit_policy,
                "slow_client": http.slow_client,
            },
            "limits": {
                **{
                    name: value
                    for name, value in dataclasses.asdict(rings).items()
                    if name[-1] == "s"
                },
                "run_slots": config.worker.run_slots * config.num_workers,
                "max_queued_requests": http.max_queued_requests,
                "slow_client_bytes": http.slow_client_bytes,
            },
            "refusals": REFUSALS,
            "bounds_us": {**WORKER_BOARD.histograms, **HTTP_BOARD.histograms},
        }
