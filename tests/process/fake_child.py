"""A child that speaks the control link, keeps its board, and does nothing else: for tests of the supervisor alone.

    fake_child.py ROLE MODE --control fd:N|unix:PATH [--index I]

As a front end it answers every connection with one JSON object: what it was told so far. MODE: "" (well-behaved), "fails"
(reports failed while loading), "crashes" (exits 3 while loading), "crashes_when_ready", "never_ready", "deaf" (ignores
drain and stop), "slow_drain" (drains only after SIGUSR1).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time

from shmserve.boards import Phase
from shmserve.control import ControlLink
from shmserve.rings.board import Board, BoardReader
from shmserve.rings.channel import Channel
from shmserve.rings.segment import Segment, SegmentError


def main() -> int:
    role, mode, _, control, *rest = sys.argv[1:]
    link = ControlLink.connect(control)
    if control.startswith("unix:"):
        link.send({"type": "join", "role": role, "index": int(rest[1]) if rest else 0})
    received = link.receive()
    if received is None or received[0]["type"] != "welcome":
        print(f"fake {role}: not welcome: {received and received[0]}", file=sys.stderr)
        return 4
    welcome, fds = received
    name = Board.name(welcome["instance"], welcome["epoch"], role, welcome["index"])
    board = Board(Segment.from_fd(name, fds[0]))
    board["pid"] = os.getpid()

    def beat() -> None:
        while True:
            board["heartbeat_ns"] = time.monotonic_ns()
            time.sleep(0.1)

    threading.Thread(target=beat, daemon=True).start()
    if mode == "crashes":
        return 3
    if mode == "fails":
        link.send({"type": "loading", "phase": "weights", "fraction": 0.5})
        link.send({"type": "failed", "error": "the weights are made of cheese"})
        return 1
    told: dict[str, object] = {
        "pid": os.getpid(),
        "epoch": welcome["epoch"],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "omp": os.environ.get("OMP_WAIT_POLICY"),
        "notify": os.environ.get("NOTIFY_SOCKET"),
        "workers": {},
        "states": [],
        "channels": {},
        "closed": [],
        "boards": {},
        "draining": False,
    }
    selector = selectors.DefaultSelector()
    selector.register(link, selectors.EVENT_READ)
    channels: dict[tuple[int, int], Channel] = {}
    if role == "worker" and mode != "never_ready":
        link.send({"type": "loading", "phase": "weights", "fraction": 0.5})
        board["phase"] = Phase.IDLE
        board["phase_since_ns"] = time.monotonic_ns()
        link.send({"type": "ready", "info": {"max_model_len": 77}})
        if mode == "crashes_when_ready":
            return 5
    signal.signal(signal.SIGUSR1, lambda *_: link.send({"type": "drained"}))
    while True:
        # Not for ever: a signal that comes just before the wait does not end it.
        ready = [key for key, _ in selector.select(0.1)]
        # Who asks hears of everything that came before: connections wait while the link has more to read.
        for key in [key for key in ready if key.fileobj is link] or ready:
            if key.fileobj is not link:
                _answer(key.fileobj, told)
                continue
            received = link.receive()
            if received is None:
                for channel in channels.values():
                    channel.unlink()
                board.segment.unlink()
                return 0
            message, fds = received
            kind = message["type"]
            if kind == "listen":
                for fd in fds:
                    selector.register(socket.socket(fileno=fd), selectors.EVENT_READ)
                if mode != "never_ready":
                    link.send({"type": "ready", "info": {}})
            elif kind == "worker":
                told["workers"][str(message["worker"])] = message
                told["states"].append(message["state"])
            elif kind == "board":
                if message["name"]:  # else its process has died; it may have since, too
                    with contextlib.suppress(SegmentError):
                        BoardReader.attach(message["name"]).close()
                told["boards"][f"{message['role']}{message['index']}"] = message["name"]
            elif kind == "channel":
                pair = message["http"], message["worker"]
                channel = Channel.from_fds(welcome["instance"], message["epoch"], *pair, fds)
                if role == "http":
                    channel.submit.producer()
                    channel.tokens.consumer()
                else:
                    channel.submit.consumer()
                    channel.tokens.producer()
                channels[pair] = channel
                told["channels"]["{}-{}".format(*pair)] = message["epoch"]
            elif kind == "close_channel":
                channels.pop((message["http"], message["worker"])).close()
                told["closed"].append(message["epoch"])
            elif kind == "drain" and mode != "deaf":
                told["draining"] = True
                board["in_flight"] = 1 if mode == "slow_drain" else 0
                if mode != "slow_drain":
                    link.send({"type": "drained"})
            elif kind == "stop" and mode != "deaf":
                return 0


def _answer(listener: object, told: dict[str, object]) -> None:
    assert isinstance(listener, socket.socket)
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return
    with connection:
        connection.settimeout(1.0)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(told).encode())
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):  # unread bytes at the close would be a reset
            while connection.recv(4096):
                continue


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
