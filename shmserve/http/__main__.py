"""The front end process: `python -m shmserve.http --control fd:N|unix:PATH`.

Speaks HTTP on the sockets that the supervisor bound, and rings to the workers. Imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shmserve import child
from shmserve.boards import Phase
from shmserve.config import ConfigError, HttpConfig
from shmserve.http import app
from shmserve.http.admission import Admission
from shmserve.http.client import WorkerClient
from shmserve.http.front_end import FrontEnd
from shmserve.http.health import Boards
from shmserve.http.heartbeat import Heartbeat
from shmserve.http.listener import Listener
from shmserve.http.neighbours import Neighbours
from shmserve.http.occupancy import occupancy_of
from shmserve.http.request_book import RequestBook, RequestRecord
from shmserve.http.request_log import RequestLog
from shmserve.http.request_templates import RequestTemplates
from shmserve.http.routing import Router
from shmserve.http.security import bound_addresses, warning_of
from shmserve.http.slow_client import SlowClients
from shmserve.http.step_send import StepSender
from shmserve.http.structured import Grammars
from shmserve.http.template import ChatTemplate
from shmserve.http.tokenizer import Tokenizer
from shmserve.http.tracing import Traces, exporter_to
from shmserve.http.turnstile import Turnstile
from shmserve.http.uring import SendRing
from shmserve.log_writer import Lines
from shmserve.models import PreparedModel
from shmserve.orphan import PATIENCE_S, OrphanGuard, remove_leftovers
from shmserve.rings.channel import Channel

log = logging.getLogger(__name__)


def _template_in(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None


class HttpProcess:
    """One front end from its welcome to its end."""

    def __init__(self, joined: child.Joined) -> None:
        config = joined.config
        self.joined = joined
        self.board = joined.board
        self.boards = Boards()
        self.client = WorkerClient(joined.index, config.rings, joined.board)
        self.client.on_broken = self._accuse
        for worker in range(config.num_workers):
            self.client.link(worker)
        neighbours = Neighbours(joined.index, self.boards) if config.num_http > 1 else None
        self.client.router = Router(
            self.client.links,
            joined.board,
            policy=config.http.routing,
            margin=config.affinity_margin,
            block_size=config.worker.block_size,
            neighbours=neighbours,
        )
        self._traces: Traces | None = None
        model = PreparedModel.load(Path(config.model.folder))
        tokenizer = Tokenizer(model, config.http.tokenizer_threads)
        self.client.vocab_size = tokenizer.vocab_size
        self.client.step_sender = self._open_step_sender(config.http, tokenizer)
        source = model.chat_template
        if config.model.chat_template:
            source = _template_in(config.model.chat_template)
        self.front = FrontEnd(
            config=config,
            model=model,
            served_name=config.model.served_name or model.name,
            tokenizer=tokenizer,
            template=ChatTemplate(source, tokenizer.special_tokens) if source else None,
            own_templates=RequestTemplates(tokenizer.special_tokens),
            grammars=Grammars(model),
            client=self.client,
            admission=Admission(self.client, config.worker.run_slots, config.http, neighbours),
            turnstile=Turnstile(self.client.is_behind),
            slow_clients=SlowClients(joined.board),
            board=joined.board,
            started_at=int(time.time()),
            book=self._open_book(),
        )
        self._occupancy = occupancy_of(config, self.front.admission.refused)
        self._stopped = asyncio.Event()
        self._orphaned = False
        self._listening = asyncio.Event()
        self._sockets: list[socket.socket] = []

    def _open_step_sender(self, config: HttpConfig, tokenizer: Tokenizer) -> StepSender | None:
        if not config.io_uring:
            return None
        try:
            ring = SendRing()
        except OSError as error:
            log.info("no io_uring (%s): tokens are sent one by one", error.strerror)
            return None
        return StepSender(ring, self.client.table, self.client.times, tokenizer.pieces.direct)

    async def run(self) -> int:
        """Serve until told to stop; the exit code."""
        loop = asyncio.get_running_loop()
        self.joined.link.set_nonblocking()
        loop.add_reader(self.joined.link.fileno(), self._on_control)
        heartbeat = Heartbeat(self.front, self._traces)
        await self._listening.wait()
        bound = bound_addresses(self._sockets)
        if warning := warning_of(self.joined.config.http, bound):
            log.warning("%s", warning)
        runner = app.runner_of(app.build(self.front, self.boards, self.joined.instance, bound))
        await runner.setup()
        server = runner.server
        assert server is not None, "set up just now"
        config, turnstile = self.joined.config.http, self.front.turnstile
        listeners = [
            Listener(server, sock, config, turnstile, self._occupancy) for sock in self._sockets
        ]
        heartbeat.serves(server)
        self._show(Phase.IDLE)
        if not self._stopped.is_set():
            self.joined.link.send({"type": "ready", "info": {}})
        await self._stopped.wait()
        self._tell_cut()
        # Streams that still run get a well-formed end before their connections close.
        for link in list(self.client.links.values()):
            link.state = "dead"
            link.close(
                "the server is shutting down" if not self._orphaned else "the supervisor is gone"
            )
        await asyncio.sleep(0)
        for listener in listeners:
            listener.close()
        self._occupancy.close()
        await runner.cleanup()
        heartbeat.stop()
        if self.front.book is not None:
            self.front.book.settle(is_last=True)
        if self._traces is not None:
            self._traces.close()
        self.front.tokenizer.close()
        self.front.grammars.close()
        if self._orphaned:
            remove_leftovers(self.board.segment, os.environ, PATIENCE_S)
        return 0

    def _open_book(self) -> RequestBook | None:
        """Who wants to hear of every request; None if nobody does."""
        joined, config = self.joined, self.joined.config
        tells: list[Callable[[Sequence[RequestRecord]], None]] = []
        if config.log_requests and config.log_level in ("debug", "info"):
            lines = Lines(f"http[{joined.index}]", config.log_format)
            tells.append(RequestLog(lines, joined.log.write).tell)
        if config.otlp_traces_endpoint:
            exporter = exporter_to(config.otlp_traces_endpoint)
            name = config.model.served_name
            self._traces = Traces(exporter, name, joined.instance, self.board)
            tells.append(self._traces.tell)
        if not tells:
            return None
        return RequestBook(self.client.times, self.client.table.size, tells)

    def _on_control(self) -> None:
        while True:
            try:
                received = self.joined.link.receive()
            except BlockingIOError:
                return
            if received is None:
                log.warning("the supervisor is gone: ending every stream")
                self._orphaned = True
                asyncio.get_running_loop().remove_reader(self.joined.link.fileno())
                self._stop()
                return
            self._heed(*received)

    def _heed(self, message: dict[str, Any], fds: list[int]) -> None:
        kind = message["type"]
        if kind == "listen":
            self._sockets = [socket.socket(fileno=fd) for fd in fds]
            self._listening.set()
        elif kind == "channel":
            link = self.client.link(message["worker"])
            link.close("it was replaced")
            channel = Channel.from_fds(
                self.joined.instance, message["epoch"], message["http"], message["worker"], fds
            )
            link.open(channel)
        elif kind == "close_channel":
            link = self.client.link(message["worker"])
            if link.channel is not None and link.channel.epoch == message["epoch"]:
                link.close(message.get("reason") or "it died")
        elif kind == "board":
            self.boards.attach(message["role"], message["index"], message["name"])
        elif kind == "worker":
            self._note_worker(message)
        elif kind == "drain":
            self._drain()
        elif kind == "stop":
            self._stop()
        else:
            log.warning("control message of unknown type %r", kind)

    def _note_worker(self, message: dict[str, Any]) -> None:
        link = self.client.link(message["worker"])
        link.state = message["state"]
        link.phase = message.get("phase") or ""
        link.fraction = message.get("fraction") or 0.0
        if message.get("info"):
            link.info = message["info"]
        if link.state == "dead":
            link.close(message.get("reason") or "it died")

    def _accuse(self, worker: int, epoch: int, fault: str) -> None:
        """Tell the supervisor of a worker whose records or counters cannot be: it is started anew."""
        http = self.joined.index
        message = {
            "type": "broken",
            "http": http,
            "worker": worker,
            "epoch": epoch,
            "fault": fault,
        }
        try:
            self.joined.link.send(message)
        except OSError as error:  # the supervisor is gone, and so are we, or it does not read
            log.warning("nobody hears of the broken channel: %s", error)

    def _tell_cut(self) -> None:
        """How many requests our end does not wait for: only this process knows at this moment."""
        num = len({id(entry.signal) for entry in self.client.in_flight.values()})
        try:
            self.joined.link.send({"type": "cut", "num": num})
        except OSError as error:
            log.warning("%d requests are cut: %s", num, error)

    def _drain(self) -> None:
        self.front.admission.is_draining = True
        self._show(Phase.DRAINING)
        self.client.on_drained = self._drained
        if not self.client.in_flight:
            self._drained()

    def _drained(self) -> None:
        self.client.on_drained = None
        # The last handlers have yet to write their last chunks: this turn of the loop is theirs.
        asyncio.get_running_loop().call_later(0.05, self.joined.link.send, {"type": "drained"})

    def _stop(self) -> None:
        self.front.admission.is_draining = True
        self._listening.set()
        self._stopped.set()

    def _show(self, phase: Phase) -> None:
        self.board["phase"] = phase
        self.board["phase_since_ns"] = time.monotonic_ns()


def main(argv: list[str]) -> int:
    joined = child.join("http", argv)
    if "fd:" in " ".join(argv):
        child.wake_with_parents_end()
    OrphanGuard(joined.link, joined.board.segment, os.environ)
    # The tokenizer's own pool would take every core, whatever --tokenizer-threads says.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    joined.board["phase"] = Phase.LOADING

    async def serve() -> int:
        try:
            process = HttpProcess(joined)
        except Exception as error:
            log.debug("starting failed", exc_info=True)
            joined.link.send({"type": "failed", "error": " ".join(str(error).split())})
            return 1
        return await process.run()

    return asyncio.run(serve())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()  # what was said is written, if stderr takes it
    sys.stderr.flush()
    os._exit(code)
