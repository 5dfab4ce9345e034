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
from shmserve.config import WorkerConfig
from shmserve.devices import share_of_cores
from shmserve.grammar import tokenizer_of
from shmserve.model_cache import ModelError
from shmserve.model_memory import (
    available_bytes,
    bfloat16_bytes,
    float32_bytes,
    packed_bytes,
    refuse_without_room,
)
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
        """Told by the runner while it loads."""
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
        runner = build_runner(self)
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
        engine.on_broken = self.accuse
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


def build_runner(worker: Worker) -> ModelRunner:
    """The runner that the configuration names. torch is imported here and only for a runner that computes."""
    config, model = worker.joined.config.worker, worker.model
    num_workers = worker.joined.config.num_workers
    max_model_len = worker.joined.config.model.max_model_len or model.context_length
    if config.runner == "simulated":
        from shmserve.worker.simulated_runner import SimulatedRunner, load_script

        # Memory that is not there costs nothing: every sequence has room for 2,048 tokens on average.
        per_sequence = -(-min(max_model_len, 2048) // config.block_size)
        least = -(-max_model_len // config.block_size)
        return SimulatedRunner(
            model.token_bytes(),
            model.special_token_ids,
            model.eos_token_ids[0],
            step_ms=config.step_ms,
            max_model_len=max_model_len,
            num_blocks=1 + max(least, per_sequence * config.max_num_seqs),
            block_size=config.block_size,
            script=load_script(config.script, model.vocab_size) if config.script else None,
        )
    limits: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        # A prompt that is not cut may come on top of a step that is almost full.
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs)
        + (0 if config.chunked_prefill else max_model_len),
        "max_model_len": max_model_len,
        "kv_cache_bytes": config.kv_cache_bytes
        or kv_cache_bytes(config.kv_cache_fraction, num_workers),
        "block_size": config.block_size,
        "num_threads": config.num_threads or share_of_cores(num_workers),
        "progress": worker.progress,
    }
    if config.tensor_parallel > 1:
        from shmserve.worker.parallel.lead import shared_runner

        is_cuda = config.runner == "cuda" or (config.runner == "auto" and has_cuda())
        runner, worker.ranks = shared_runner(worker.joined, model, limits, is_cuda)
        return runner
    if config.runner != "hf":
        from shmserve.worker.models.config import UnknownArchitectureError

        try:
            return own_runner(config, model, limits)
        except UnknownArchitectureError as error:
            is_told = config.runner != "auto" or config.cpu_precision not in ("auto", "fp32")
            if is_told or model.format != "safetensors":
                raise
            log.info("transformers' own class is tried, on the CPU: %s", error)
    from shmserve.worker.hf_runner import HFRunner

    refuse_without_room(model.weights, float32_bytes, available_bytes())
    return HFRunner(model, **limits, num_token_ids=model.num_token_ids())


def own_runner(config: WorkerConfig, model: PreparedModel, limits: dict[str, Any]) -> ModelRunner:
    """A runner over our own decoder: CUDA, the C kernels or torch."""
    if config.runner == "cuda" or (config.runner == "auto" and has_cuda()):
        from shmserve.worker.cuda.runner import CudaRunner

        # Its memory is the device's: how much of it is free is known when the weights are there.
        own = {**limits, "kv_cache_bytes": config.kv_cache_bytes}
        return CudaRunner(
            model,
            **own,
            kv_cache_fraction=config.kv_cache_fraction,
            num_token_ids=model.num_token_ids(),
            attention_backend=config.attention_backend,
        )
    if config.attention_backend != "auto":
        from shmserve.worker.models.config import ModelLoadError

        raise ModelLoadError(
            f"--attention-backend {config.attention_backend}: there is no CUDA device to attend on"
        )
    precision = config.cpu_precision
    if config.runner in ("auto", "cpu") and precision in ("auto", "int8"):
        from shmserve.worker.cpu.build import KernelsError
        from shmserve.worker.cpu.runner import CpuRunner

        refuse_without_room(model.weights, packed_bytes, available_bytes())
        try:
            return CpuRunner(model, **limits, num_token_ids=model.num_token_ids())
        except KernelsError as error:
            if config.runner == "cpu" or precision == "int8":
                raise
            log.warning("the torch runner computes, several times slower: %s", error)
    from shmserve.worker.torch_runner import TorchRunner

    keeps_bf16 = precision == "bf16"
    bytes_of = bfloat16_bytes if keeps_bf16 else float32_bytes
    refuse_without_room(model.weights, bytes_of, available_bytes())
    return TorchRunner(model, **limits, num_token_ids=model.num_token_ids(), keeps_bf16=keeps_bf16)


def has_cuda() -> bool:
    """Whether torch finds a CUDA device. Without a driver's device node it is not asked: importing it takes seconds."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/nvhost-gpu").exists():
        return False
    import torch

    return bool(torch.cuda.is_available())


def kv_cache_bytes(fraction: float, num_workers: int = 1) -> int:
    """On the CPU: `fraction` of the memory that is free; by default 1 GiB, or a quarter of it, whichever is less.

    Several workers share what is free; one that loads when another has does with less than its part.
    """
    free = available_bytes() // num_workers
    return int(free * fraction) if fraction else min(1 << 30, free // 4)


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
