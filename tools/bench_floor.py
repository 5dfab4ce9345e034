"""The floor of a front end: a bare aiohttp handler that writes ready-made frames, with no ring, no text and no JSON.

Owns: the least that an aiohttp server can do per token, which is one transport.write of bytes that lie ready. Never: parses a
body, wakes a task per token, or builds a frame in the tick. `bench_frontend.py` runs it as its own process beside the server.

    tick    a timerfd on the absolute grid of T, armed only while streams are open: asyncio's own timers are rounded up to a
            whole millisecond by epoll, which would hand the server that is compared with this one half a step
    late    a tick that covers n periods writes n frames to each stream: every token is its own frame, as in the server
    log     the format of `--emission-log`, a tick's time being its start; written once no stream is open, not inside a tick
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import re
import struct
import time
from pathlib import Path

from aiohttp import web

CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = 1
TFD_NONBLOCK = os.O_NONBLOCK
ID_PATTERN = re.compile(rb'("id":\s*"[^"]*?)([0-9a-f]{16})"')
DEFAULT_FRAME = (
    b'data: {"id":"chatcmpl-0000000000000000","object":"chat.completion.chunk","created":1700000000,"model":"floor",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class GridTimer:
    """A timer descriptor that is readable at every multiple of the period on CLOCK_MONOTONIC, while armed."""

    def __init__(self, period_ns: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._period_ns = period_ns
        self.fd = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def _set(self, interval_ns: int, first_ns: int) -> None:
        spec = struct.pack("qqqq", *divmod(interval_ns, 10**9), *divmod(first_ns, 10**9))
        if self._libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, spec, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def arm(self) -> None:
        self._set(self._period_ns, (time.monotonic_ns() // self._period_ns + 1) * self._period_ns)

    def disarm(self) -> None:
        self._set(0, 0)

    def take(self) -> int:
        """Periods that passed since the last take; 0 if a disarming overtook the wake-up."""
        try:
            return int.from_bytes(os.read(self.fd, 8), "little")
        except BlockingIOError:
            return 0


class FloorStream:
    """One response: the chunk that it repeats, and how often it still does."""

    __slots__ = ("chunk", "done", "first_tick", "left", "req_id", "write")

    def __init__(self, req_id: str, chunk: bytes, num_tokens: int, transport: asyncio.Transport):
        self.req_id = req_id
        self.chunk = chunk
        self.left = num_tokens
        self.write = transport.write
        self.first_tick = -1
        self.done = asyncio.get_running_loop().create_future()


class Floor:
    """The open streams and the tick that feeds them."""

    def __init__(self, frame: bytes, num_tokens: int, period_ns: int, log: Path | None) -> None:
        found = ID_PATTERN.search(frame)
        if found is None:
            raise SystemExit("the frame has no id that ends in 16 hex digits")
        self._before, self._after = frame[: found.start(2)], frame[found.end(2) :]
        self._num_tokens = num_tokens
        self._timer = GridTimer(period_ns)
        self._log = log
        self._streams: list[FloorStream] = []
        self._ended: list[FloorStream] = []
        self._tick_ns: list[int] = []
        self._num_requests = 0

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._timer.fd, self._on_timer)

    def _on_timer(self) -> None:
        for _ in range(self._timer.take()):
            self._tick()

    def _tick(self) -> None:
        tick = len(self._tick_ns)
        self._tick_ns.append(time.monotonic_ns())
        has_ended = False
        for stream in self._streams:
            if stream.left:
                stream.write(stream.chunk)
                stream.left -= 1
                if stream.first_tick < 0:
                    stream.first_tick = tick
                has_ended |= not stream.left
        if has_ended:
            for stream in self._streams:
                if not stream.left:
                    self._ended.append(stream)
                    stream.done.set_result(None)
            self._streams = [stream for stream in self._streams if stream.left]
            if not self._streams:
                self._timer.disarm()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        self._num_requests += 1
        req_id = f"{self._num_requests:016x}"
        frame = self._before + req_id.encode() + self._after
        chunk = b"%x\r\n%b\r\n" % (len(frame), frame)
        transport = request.transport
        assert transport is not None, "the connection is gone before its response began"
        stream = FloorStream(req_id, chunk, self._num_tokens, transport)
        if not self._streams:
            self._timer.arm()
        self._streams.append(stream)
        await stream.done
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        if not self._streams:
            self._write_log()
        return response

    def _write_log(self) -> None:
        """One line per tick, as the server's own log has it. Called while no stream is open."""
        ended, self._ended = self._ended, []
        if self._log is None:
            return
        starts = {stream.req_id: stream.first_tick for stream in ended}
        with self._log.open("a") as file:
            for tick in range(min(starts.values(), default=0), len(self._tick_ns) if starts else 0):
                ids = [i for i, first in starts.items() if 0 <= tick - first < self._num_tokens]
                if ids:
                    indices = [tick - starts[i] for i in ids]
                    line = {"step": tick, "time_ns": self._tick_ns[tick]}
                    file.write(json.dumps({**line, "req_ids": ids, "indices": indices}) + "\n")


async def serve(floor: Floor, port: int, unix_path: str | None) -> None:
    """Serves until it is killed; any POST gets the stream, GET /health says that it is up."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/{path:.*}", floor.handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=True)
    await runner.setup()
    if unix_path:
        await web.UnixSite(runner, unix_path, backlog=1024).start()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    floor.start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A bare aiohttp server that streams ready-made frames on a grid."
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--uds", help="listen on this Unix socket too")
    parser.add_argument("--frame-file", type=Path, help="one whole SSE frame, blank line included")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=4.48)
    parser.add_argument("--emission-log", type=Path)
    args = parser.parse_args()
    frame = args.frame_file.read_bytes() if args.frame_file else DEFAULT_FRAME
    floor = Floor(frame, args.tokens, round(args.step_ms * 1e6), args.emission_log)
    try:
        asyncio.run(serve(floor, args.port, args.uds))
    except (KeyboardInterrupt, web.GracefulExit):
        return


if __name__ == "__main__":
    main()
