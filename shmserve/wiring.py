"""Boards and channels between the children of one instance: made, handed out, taken down.

Owns: every segment of the instance, and which child was told of which. Never: starts or judges a process. Supervisor only.

    one channel per living (http, worker) pair; when either end dies the channel is closed and unlinked at once, and the
    successor gets a new one of a greater epoch: nobody resets a live ring
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from shmserve import __version__
from shmserve.boards import SUPERVISOR_BOARD, http_board
from shmserve.children import BOARD_SPECS, HTTP, WORKER, Child
from shmserve.config import Config
from shmserve.ledger import Ledger
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.sockets import Listeners
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKEN_SLOT_BYTES


class Wiring:
    """`next_epoch` gives a number never used by this instance before."""

    def __init__(self, config: Config, listeners: Listeners, next_epoch: Callable[[], int]) -> None:
        self._config = config
        self._instance = config.instance_name
        self._listeners = listeners
        self.next_epoch = next_epoch
        self._submit = RingShape(SUBMIT_SLOT_BYTES, config.rings.submit_slots)
        self._tokens = RingShape(TOKEN_SLOT_BYTES, config.rings.token_slots)
        self._channels: dict[tuple[int, int], Channel] = {}
        self._supervisor_epoch = next_epoch()
        self.board = Board.create(self._board_name("supervisor", 0), SUPERVISOR_BOARD, self.epoch)
        self.board["pid"] = os.getpid()
        self._ledger = Ledger(self.board)

    @property
    def epoch(self) -> int:
        return self._supervisor_epoch

    def _board_name(self, role: str, index: int, epoch: int | None = None) -> str:
        return Board.name(self._instance, epoch or self._supervisor_epoch, role, index)

    def new_board(self, role: str, index: int, epoch: int) -> Board:
        """The board of a child that is about to be started. Raises SegmentError."""
        table_size = self._config.rings.table_size
        is_http = role == HTTP
        spec = http_board(table_size, self._config.num_workers) if is_http else BOARD_SPECS[role]
        return Board.create(self._board_name(role, index, epoch), spec, epoch)

    def reserve(self, epoch: int, num_http: int, num_workers: int) -> None:
        """Make all channels of a start, so that a /dev/shm without room is found before anything is started."""
        for http in range(num_http):
            for worker in range(num_workers):
                self._open(http, worker, epoch)

    def _open(self, http: int, worker: int, epoch: int) -> Channel:
        channel = Channel.create(self._instance, epoch, http, worker, self._submit, self._tokens)
        self._channels[http, worker] = channel
        return channel

    def welcome(self, child: Child, others: Iterable[Child]) -> None:
        """Say to a new child who it is, and to it and to the others what they may read of one another."""
        config: dict[str, Any] = msgspec.to_builtins(self._config)
        child.send(
            {
                "type": "welcome",
                "role": child.role,
                "index": child.index,
                "instance": self._instance,
                "epoch": child.epoch,
                "version": __version__,
                "config": config,
            },
            [child.board.segment.fd],
        )
        if child.role == HTTP:
            sockets = self._listeners.groups[child.index]
            child.send({"type": "listen", "sockets": len(sockets)}, [s.fileno() for s in sockets])
            self._tell_board(child, "supervisor", 0, self.board.segment.name)
            self._tell_board(child, child.role, child.index, child.board.segment.name)
        for other in others:
            if child.role == HTTP:
                self._tell_board(child, other.role, other.index, other.board.segment.name)
            if other.role == HTTP:
                self._tell_board(other, child.role, child.index, child.board.segment.name)

    @staticmethod
    def _tell_board(reader: Child, role: str, index: int, name: str) -> None:
        reader.send({"type": "board", "role": role, "index": index, "name": name})

    def connect(self, child: Child, others: Iterable[Child]) -> None:
        """Give `child` and each living child of the other role their channel."""
        for other in others:
            if other.role == child.role:
                continue
            http, worker = (child, other) if child.role == HTTP else (other, child)
            pair = http.index, worker.index
            channel = self._channels.get(pair)
            if channel is None:
                channel = self._open(*pair, child.epoch)
            message = {
                "type": "channel",
                "http": http.index,
                "worker": worker.index,
                "epoch": channel.epoch,
            }
            http.send(message, channel.fds())
            worker.send(message, channel.fds())

    def disconnect(self, child: Child, others: Iterable[Child]) -> None:
        """Tell the peers that `child` is gone, and remove its channels and its board."""
        peers = {(other.role, other.index): other for other in others}
        for other in peers.values():
            if other.role == HTTP:
                self._tell_board(other, child.role, child.index, "")
        for pair in list(self._channels):
            http, worker = pair
            if child.index != (http if child.role == HTTP else worker):
                continue
            peer = peers.get((WORKER, worker) if child.role == HTTP else (HTTP, http))
            channel = self._channels.pop(pair)
            if peer is not None:
                peer.send(
                    {
                        "type": "close_channel",
                        "http": http,
                        "worker": worker,
                        "epoch": channel.epoch,
                    }
                )
            channel.unlink()
            channel.close()
        with self._ledger.taking_over(child.role, child.board):
            child.close()

    def is_open(self, http: int, worker: int, epoch: int) -> bool:
        """Whether the channel of this pair is still the one of this epoch."""
        channel = self._channels.get((http, worker))
        return channel is not None and channel.epoch == epoch

    def rings_of(self, child: Child) -> list[str]:
        """Names of the rings between `child` and all others."""
        ends = [
            (channel, pair[0] if child.role == HTTP else pair[1])
            for pair, channel in self._channels.items()
        ]
        rings = [(c.submit, c.tokens) for c, index in ends if index == child.index]
        return [ring.segment.name for pair in rings for ring in pair]

    def channels(self) -> list[dict[str, Any]]:
        """The open channels, for `status`."""
        return [
            {
                "http": c.http,
                "worker": c.worker,
                "epoch": c.epoch,
                "submit": c.submit.segment.name,
                "tokens": c.tokens.segment.name,
            }
            for c in self._channels.values()
        ]

    def close(self) -> None:
        """Remove what is left: the channels and the supervisor's own board."""
        for channel in self._channels.values():
            channel.unlink()
            channel.close()
        self._channels.clear()
        self.board.segment.unlink()
        self.board.close()
