"""The worker process: `python -m shmserve.worker --control fd:N|unix:PATH`.

Loads the model, says ready, then runs the step loop until it is told to stop. Owns the GPU (or the CPU) and token ids; imports
torch only for a runner that needs it.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve import child
from shmserve.boards import Phase
from shmserve.grammar import tokenizer_of
from shmserve.model_cache import ModelError
from shmserve.models import PreparedModel
from shmserve.rings.channel import Channel
from shmserve.token_text import Decoding
from shmserve.worker.batch import Batch
from shmserve.worker.constraints import Constraints
from shmserve.worker.control_thread import ControlThread
from shmserve.worker.deadlines import Deadlines
from shmserve.worker.emission_log import EmissionLog
from shmserve.worker.engine import Engine
from shmserve.worker.grammars import GrammarCompiler
from shmserve.worker.runner import ModelRunner
from shmserve.worker.runner_choice import build_runner
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.stopping import StopConditions

if TYPE_CHECKING:
    from shmserve.worker.parallel.ranks import Ranks

log = logging.getLogger(__name__)

STEPS_BETWEEN_COLLECTIONS = 1_000


class Worker:
    """One worker process from its welcome to its end."""

    def __init__(self, joined: child.Joined) -> None:
        self.joined = joined
        self.board = joined.board
        self.model = PreparedModel.load(Path(joined.config.model.folder))
        self.channels: dict[int, Channel] = {}
        self.control = ControlThread(joined.link, joined.board, self._unlink)
        self._steps_at_collection = 0
        self.ranks: Ranks | None = None  # the others, if there are any

    def _unlink(self) -> None:
        for channel in list(self.channels.values()):
            channel.unlink()
        self.board.segment.unlink()

    def progress(self, what: str, fraction: float) -> None:
        """Told by the runner while it loads. What gets on is not hung, however long it takes in all (health.py)."""
        self.board["phase_since_ns"] = time.monotonic_ns()
        self.board["loading_permille"] = int(1000 * fraction)
        self.joined.link.send({"type": "loading", "phase": what, "fraction": fraction})

    def accuse(self, channel: Channel, fault: str) -> None:
        """Tell the supervisor of a front end whose records or counters cannot be: it is started anew."""
        message = {
            "type": "broken",
            "http": channel.http,
            "worker": channel.worker,
            "epoch": channel.epoch,
            "fault": fault,
        }
        try:
            self.joined.link.send(message)
        except OSError as error:  # the supervisor is gone: the control thread ends this process
            log.warning("nobody hears of the broken channel: %s", error)

    def load(self) -> Engine:
        """Build the runner and the engine, and compute one step of each kind. May raise anything: the caller reports it."""
        config = self.joined.config
        self.board["phase"] = Phase.LOADING
        self.board["phase_since_ns"] = time.monotonic_ns()
        runner, self.ranks = build_runner(self.joined, self.model, self.progress)
        if runner.info.num_blocks - 1 < config.worker.max_num_seqs:
            raise ModelError(
                f"the KV cache holds {runner.info.num_blocks - 1} blocks of {runner.info.block_size} tokens, fewer than "
                f"one for each of {config.worker.max_num_seqs} sequences; give it more memory (--kv-cache-bytes) "
                "or serve fewer at once (--max-num-seqs)"
            )
        self.board["phase"] = Phase.WARMING_UP
        chunk_tokens, chunk_ns = warm_up(runner)
        scheduler = Scheduler(
            runner.info,
            max_num_seqs=config.worker.run_slots,
            max_num_batched_tokens=config.worker.max_num_batched_tokens,
            eos_ids=self.model.eos_token_ids,
            caches_prefixes=config.worker.prefix_cache,
            chunks_prompts=config.worker.chunked_prefill,
        )
        conditions = StopConditions(
            self.model.token_bytes(),
            self.model.special_token_ids,
            Decoding(
                self.model.strips_leading_space,
                None if self.model.token_bytes_exact else self.model.tokenizer(),
            ),
        )
        path = config.worker.emission_log
        if path and config.num_workers > 1:
            path = f"{path}.{self.joined.index}"
        emission_log = EmissionLog(path) if path else None
        self.board["kv_blocks_total"] = runner.info.num_blocks - 1
        self.board["max_num_seqs"] = config.worker.run_slots
        self.board["max_model_len"] = scheduler.capacity_tokens
        compiler = GrammarCompiler(lambda: tokenizer_of(self.model))
        constraints = Constraints(compiler, self.model.vocab_size)
        engine = Engine(
            runner,
            scheduler,
            conditions,
            config.rings,
            self.board,
            emission_log,
            constraints,
            Deadlines(config.worker),
        )
        engine.channels.on_broken = self.accuse
        engine.step_times.warmed_up(chunk_tokens, chunk_ns)
        # What lives now lives until the end: the collector need not look at it again, nor run inside a step.
        gc.collect()
        gc.freeze()
        gc.disable()
        return engine

    def ready_info(self, engine: Engine) -> dict[str, Any]:
        """What "ready" tells the supervisor and the front ends."""
        info = engine.runner.info
        return {
            "runner": info.name,
            "max_model_len": engine.scheduler.capacity_tokens,
            "max_num_seqs": engine.scheduler.max_num_seqs,
            "num_blocks": info.num_blocks - 1,
            "block_size": info.block_size,
            "vocab_size": info.vocab_size,
            "rank_pids": [] if self.ranks is None else self.ranks.pids,
        }

    def serve(self, engine: Engine) -> None:
        """The loop: control messages, then a step; sleep when there is nothing to compute."""
        engine.show_idle()
        while True:
            while self.control.messages:
                if not self._heed(engine, *self.control.messages.popleft()):
                    return
            if not engine.step() and not self.control.messages:
                engine.show_idle()
                self._collect(engine)
                self._wait(engine)

    def _heed(self, engine: Engine, message: dict[str, Any], fds: list[int]) -> bool:
        kind = message["type"]
        if kind == "channel":
            channel = Channel.from_fds(
                self.joined.instance, message["epoch"], message["http"], message["worker"], fds
            )
            self.channels[channel.http] = channel
            engine.open_channel(channel)
        elif kind == "close_channel":
            if self.channels.pop(message["http"], None) is not None:
                engine.close_channel(message["http"])
        elif kind == "stop":
            return False
        elif kind != "drain":  # a drain is the front end's affair: the worker finishes what it has
            log.warning("control message of unknown type %r", kind)
        return True

    def _wait(self, engine: Engine) -> None:
        poll = select.poll()
        poll.register(self.control.wake.fd, select.POLLIN)
        for fd in engine.poll_fds():
            poll.register(fd, select.POLLIN)
        poll.poll(engine.wait_ms())
        self.control.wake.take()

    def _collect(self, engine: Engine) -> None:
        if engine.step_count - self._steps_at_collection >= STEPS_BETWEEN_COLLECTIONS:
            self._steps_at_collection = engine.step_count
            gc.collect()


def warm_up(runner: ModelRunner) -> tuple[int, int]:
    """Compute a prompt chunk and a decode step in the padding block, so that the first request pays for neither.

    Returns how many tokens the chunk has, and how many ns it takes once everything is warm.
    """
    state = SamplingState(1)
    state.temperature[:] = 0.0
    chunk = min(runner.info.block_size, runner.info.max_model_len)
    begin_ns = 0
    for count in (1, chunk, chunk):
        begin_ns = time.monotonic_ns()
        positions = np.arange(count, dtype=np.int32)
        runner.run(
            Batch(
                step=0,
                rows=np.zeros(1, np.int32),
                token_ids=np.zeros(count, np.int32),
                positions=positions,
                kv_slots=positions,
                cu_seqlens=np.array([0, count], np.int32),
                block_table=np.zeros((1, 1), np.int32),
                kv_lens=np.array([count], np.int32),
                sample_seqs=np.zeros(1, np.int32),
                is_decode=count == 1,
            ),
            state,
        )
    return chunk, time.monotonic_ns() - begin_ns


def main(argv: list[str]) -> int:
    joined = child.join("worker", argv)
    if "fd:" in " ".join(argv):
        child.die_with_parent()
    worker = Worker(joined)
    worker.control.start()
    try:
        engine = worker.load()
    except Exception as error:
        if worker.ranks is not None:  # a rank that is gone is a better reason than what came of it
            worker.ranks.await_death()
        # Whatever it is, the operator gets one line and the supervisor does not retry.
        log.debug("loading failed", exc_info=True)
        line = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModelError) and str(worker.model.weights) not in line:
            line = f"{worker.model.weights}: {line}"
        joined.link.send({"type": "failed", "error": line})
        return 1
    joined.link.send({"type": "ready", "info": worker.ready_info(engine)})
    try:
        worker.serve(engine)
    except Exception as error:
        if worker.ranks is not None:
            worker.ranks.await_death()
        # A fault of the whole step: clients and operators are told of it, and a new worker starts.
        log.exception("the step loop failed")
        line = " ".join(f"{type(error).__name__}: {error}".split())
        joined.link.send({"type": "failed", "error": f"the step loop failed: {line[:500]}"})
        return 1
    worker.control.stopped()
    engine.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()  # what was said is written, if stderr takes it
    sys.stderr.flush()
    os._exit(code)  # torch's exit handlers have nothing to do that the kernel does not do better
