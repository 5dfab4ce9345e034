"""A model of the llama family on a CUDA device: recorded steps for decoding, steps launched ahead of their tokens.

Owns: the way from a `Batch` to a launched step and from the device's results to a `StepOutput`. Never: knows a request, chooses
blocks, or reads a result before it is asked to. Decode steps are replayed from the graph of their bucket; steps with prompts are
launched kernel by kernel. Rows whose token the sampling kernels cannot choose (penalties, bias, grammar, most likely tokens) are
sampled on the host when the step is collected, and cannot be followed ahead (`can_carry`).

The device is a parameter, so that the tests run all of it on the CPU, with the reference operations or Triton's interpreter.
Worker's main thread only.
"""

from __future__ import annotations

import sysconfig
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shmserve.config import AttentionBackend
from shmserve.worker.batch import I4, Batch, PromptPart, PromptScores, StepOutput
from shmserve.worker.cuda.buffers import Landing, StepBuffers
from shmserve.worker.cuda.flashinfer_attention import attention_for
from shmserve.worker.cuda.graphs import Capture, CudaCapture, NoCapture, StepGraphs, buckets_for
from shmserve.worker.cuda.link import CudaLink, HostLink, Link
from shmserve.worker.cuda.model import DeviceModel, placing
from shmserve.worker.cuda.ops import Ops, triton_ops
from shmserve.worker.models.config import DecoderConfig, ModelLoadError
from shmserve.worker.models.weights import load_weights
from shmserve.worker.parallel.device_share import DeviceShare
from shmserve.worker.runner import Progress, RunnerInfo
from shmserve.worker.sampler import sample, score
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.sizing import sized
from shmserve.worker.torch_output import SCORED_TOGETHER
from shmserve.worker.torch_runner import open_model

if TYPE_CHECKING:
    from shmserve.models import PreparedModel
    from shmserve.worker.parallel.team import Share, Team

DEFAULT_KV_FRACTION = 0.85  # of the memory that is free once the weights are loaded
MAX_IN_FLIGHT = 2
LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step. `others` are indices into its samples that the host samples."""

    rows: I4
    others: I4
    sampling: SamplingState
    landing: Landing
    scores: tuple[PromptScores, ...]


class CudaRunner:
    """`ModelRunner` and `OverlappingRunner`. `kv_cache_bytes` 0: `kv_cache_fraction` of the device's free memory (0: 0.85).

    `num_token_ids` is how many ids have a token, where the model's vocabulary is padded: the others do not exist for anybody.
    `team`: the model is shared among several ranks, and this is one of them; `kv_cache_bytes` is what all of them keep together.
    `ops`, `link` and `capture` None: kernels, copies and graphs of `device`. `attention_backend`: what attends in place of those
    operations (flashinfer_attention.py). Raises ModelLoadError, one line.
    """

    def __init__(
        self,
        model: PreparedModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        kv_cache_bytes: int = 0,
        kv_cache_fraction: float = 0.0,
        block_size: int = 16,
        num_threads: int | None = None,
        progress: Progress,
        num_token_ids: int | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        ops: Ops | None = None,
        link: Link | None = None,
        capture: Capture | None = None,
        attention_backend: AttentionBackend = "auto",
        team: Team | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        target = checked_device(device)
        config, source = open_model(model.weights, model.format)
        ops = ops or kernels()  # before the weights are read: it may find that it cannot
        share = None if team is None else team.share_of(config, model.weights)
        own = config if share is None else share.partition.own
        try:
            with torch.inference_mode():
                weights = load_weights(
                    source,
                    config,
                    lambda fraction: progress("loading weights", fraction),
                    placing(target, dtype),
                    None if share is None else share.partition,
                )
                num_ids = min(config.vocab_size, num_token_ids or config.vocab_size)
                if share is None:  # else logits are cut where they come together
                    weights = replace(weights, head=weights.head[:num_ids])
                per_block = kv_bytes_per_block(all_kept(config, share), block_size, dtype)
                room = kv_cache_bytes
                if not room:
                    own_block = kv_bytes_per_block(own, block_size, dtype)
                    num_blocks = free_bytes(target, kv_cache_fraction) // own_block
                    room = per_block * (
                        num_blocks if team is None else team.group.least(num_blocks)
                    )
                name = f"{target.type}, {torch.finfo(dtype).dtype}"
                if team is not None:
                    name = f"{name}, {team.group.size} ranks"
                info = sized(name, config, per_block, max_model_len, room, block_size)
                buckets = buckets_for(max_num_seqs)
                most_seqs = max(max_num_seqs, buckets[-1] if buckets else 0)
                most_tokens = max(max_num_batched_tokens, most_seqs)
                max_blocks = -(-info.max_model_len // block_size)
                is_cuda = target.type == "cuda"
                progress("compiling kernels", 0.0)  # until the first step is recorded
                link = link or (CudaLink(target) if is_cuda else HostLink())
                self._attention = attention_for(
                    attention_backend,
                    ops.name,
                    own,
                    dtype,
                    link,
                    buckets,
                    max_num_seqs=most_seqs,
                    max_blocks=max_blocks,
                    block_size=block_size,
                )
                self._buffers = StepBuffers(
                    link,
                    max_num_tokens=most_tokens,
                    max_num_seqs=most_seqs,
                    num_rows=max_num_seqs,
                    max_blocks=max_blocks,
                )
                share_on_device = None
                if share is not None:
                    share_on_device = DeviceShare(
                        share,
                        max_num_tokens=most_tokens,
                        max_num_seqs=most_seqs,
                        dtype=dtype,
                        device=target,
                    )
                self._model = DeviceModel(
                    own,
                    weights,
                    ops,
                    self._buffers,
                    max_num_tokens=most_tokens,
                    max_model_len=info.max_model_len,
                    num_blocks=info.num_blocks,
                    block_size=block_size,
                    attention=self._attention,
                    share=share_on_device,
                    num_ids=num_ids,
                )
                self._graphs = StepGraphs(
                    capture
                    or (CudaCapture(others_run=team is not None) if is_cuda else NoCapture()),
                    buckets,
                    self._decode,
                    self._prepare,
                )
                self._graphs.record_all(lambda share: progress("recording steps", share))
        except torch.OutOfMemoryError as error:
            line = " ".join(str(error).split())
            raise ModelLoadError(
                f"{model.weights}: not enough memory on {target}, where weights are bfloat16: {line} "
                "(--runner cpu computes on the CPU)"
            ) from None
        self._info = replace(info, vocab_size=num_ids)
        self._team = team
        self._nobody = SamplingState(
            max_num_seqs
        )  # ranks that draw nothing are told of no parameters
        self._flights: deque[_Flight] = deque()

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Compute and sample; see `ModelRunner.run`."""
        self.launch(batch, sampling)
        return self.collect()

    def can_carry(self, rows: I4, sampling: SamplingState) -> bool:
        """See `OverlappingRunner`: no row of the step in flight, and none of `rows`, is sampled on the host."""
        if any(flight.others.size for flight in self._flights):
            return False
        return not _needs_host(rows, sampling).any()

    def launch(self, batch: Batch, sampling: SamplingState, carried: I4 | None = None) -> None:
        """Start a step; see `OverlappingRunner.launch`."""
        assert len(self._flights) < MAX_IN_FLIGHT, "launched, and never collected"
        if self._team is not None and batch.num_tokens:
            self._team.compute(batch, carried)
        with torch.inference_mode():
            self._start(batch, sampling, carried)
            landing = self._buffers.fetch(len(batch.sample_seqs))
            # Waits for the step: whoever asks for it pays with one that nothing overlaps.
            scores = tuple(self._score(part) for part in batch.prompt_parts)
        rows = batch.rows[batch.sample_seqs]
        others = np.flatnonzero(_needs_host(rows, sampling)).astype(np.int32)
        self._flights.append(_Flight(rows, others, sampling, landing, scores))

    def follow(self, batch: Batch, carried: I4 | None) -> None:
        """Start this rank's part of a step of rank 0; of a rank > 0, which draws nothing."""
        with torch.inference_mode():
            self._start(batch, self._nobody, carried)

    def follow_logits(self, rows: I4) -> None:
        """Start this rank's part of logits of the step that was followed last."""
        with torch.inference_mode():
            self._model.hidden_logits(int(rows[0]), len(rows))

    def _start(self, batch: Batch, sampling: SamplingState, carried: I4 | None) -> None:
        num_samples = len(batch.sample_seqs)
        bucket = self._graphs.bucket_of(batch.num_seqs) if batch.is_decode else None
        inputs = self._buffers.send(batch, sampling, carried, bucket)
        if self._attention is not None and batch.num_tokens:
            fields = (batch.block_table, batch.kv_lens, batch.cu_seqlens)
            self._attention.plan(*fields, bucket)
        if bucket is not None:
            self._graphs.replay(bucket)
        elif batch.num_tokens:
            counts = np.diff(batch.cu_seqlens)
            num_single = int((counts == 1).cumprod().sum())  # those that stand in front
            self._model.compute(inputs, int(counts.max()), num_single)
            if num_samples:
                self._model.sample(inputs, num_samples)

    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight; see `OverlappingRunner.collect`."""
        flight = self._flights.popleft()
        ids, values, failures = flight.landing.wait()
        top = None
        is_asked = flight.sampling.num_logprobs[flight.rows] >= 0
        logprobs = np.where(is_asked, values, np.float32(np.nan))
        if flight.others.size:
            others = flight.others
            with torch.inference_mode():
                index = torch.from_numpy(others).to(self._model.logits.device)
                logits = self._model.logits[index].float().cpu()
                result = sample(logits, flight.rows[others], flight.sampling)
            ids[others] = result.token_ids
            failures[others] = 0
            failures[others[list(result.failed)]] = 1
            if result.logprobs is not None:
                logprobs[others] = result.logprobs
            top = result.top and {
                int(others[at]): (top_ids[None], top_values[None])
                for at, (top_ids, top_values) in result.top.items()
            }
        return StepOutput(
            token_ids=ids[:, None],
            time_ns=time.monotonic_ns(),
            logprobs=logprobs[:, None] if is_asked.any() else None,
            top=top,
            failed=tuple(np.flatnonzero(failures).tolist()),
            prompt_scores=flight.scores,
        )

    def close(self) -> None:
        """Let weights, cache and graphs go, and the other ranks."""
        if self._team is not None:
            self._team.close()
        del self._graphs, self._model, self._attention, self._buffers

    def _score(self, part: PromptPart) -> PromptScores:
        found = []
        for start in range(0, len(part.token_ids), SCORED_TOGETHER):
            targets = part.token_ids[start : start + SCORED_TOGETHER]
            first = part.first_row + start
            if self._team is not None:
                self._team.logits(np.arange(first, first + len(targets), dtype=np.int32))
            logits = self._model.hidden_logits(first, len(targets)).cpu()
            found.append(score(logits, targets, part.num_top))
        logprobs, ids, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return PromptScores(part, logprobs, ids, values)

    def _prepare(self, bucket: int) -> None:
        """What a decode step needs beside its buffers; never recorded."""
        if self._attention is not None:
            self._attention.plan_padding(bucket)

    def _decode(self, bucket: int) -> None:
        """One decode step over the static buffers: what is recorded."""
        inputs = self._buffers.inputs(bucket, bucket)
        self._model.compute(inputs, 1)
        self._model.sample(inputs, bucket)


def _needs_host(rows: I4, sampling: SamplingState) -> np.ndarray:
    """Rows whose token the sampling kernels cannot choose, or of which more is asked than its logprob."""
    result: np.ndarray = (sampling.num_logprobs[rows] > 0) | sampling.is_edited(rows)
    return result


def checked_device(name: str) -> torch.device:
    """The device, which is this thread's current one from now on: kernels and events know no other.

    ModelLoadError, one line, if there is none, or one that the kernels cannot be compiled for.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        build = torch.version.cuda or "no CUDA at all"
        raise ModelLoadError(
            f"--runner cuda: torch {torch.__version__} sees no CUDA device (it is built for {build})"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (f"{major}.{minor}" for major, minor in (capability, LEAST_CAPABILITY))
        raise ModelLoadError(
            f"--runner cuda: {device} has compute capability {found}, the kernels need {least} or more (for bfloat16)"
        )
    torch.cuda.set_device(device)
    return device


def kernels() -> Ops:
    """ModelLoadError, one line, without triton, or without what it needs of this machine to launch a kernel."""
    try:
        ops = triton_ops()
    except ImportError as error:
        raise ModelLoadError(f"--runner cuda: its kernels need triton: {error}") from None
    from triton.runtime import driver

    try:
        driver.active.get_current_target()  # what launches kernels is compiled here, once for all
    except Exception as error:  # of a compiler, a linker, or of what they do not find
        raise ModelLoadError(
            f"--runner cuda: triton cannot compile what launches its kernels: {_lack_of(error)}; "
            "--runner cpu computes on the CPU"
        ) from None
    return ops


def _lack_of(error: Exception) -> str:
    """Why triton's C compiler failed: as a rule the headers of Python are not installed, and then its error is a long command."""
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    if not header.exists():
        return f"there is no {header} (install python3-dev, or python3-devel)"
    return " ".join(str(error).split())[:300] or type(error).__name__


def free_bytes(device: torch.device, fraction: float) -> int:
    """So much of the device's free memory; what torch holds and does not use counts as free."""
    if device.type != "cuda":
        raise ModelLoadError("a device without memory of its own needs --kv-cache-bytes")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * (fraction or DEFAULT_KV_FRACTION))


def kv_bytes_per_block(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size
    return int(values * dtype.itemsize)


def all_kept(config: DecoderConfig, share: Share | None) -> DecoderConfig:
    """The model with as many KV heads as all ranks keep together."""
    if share is None:
        return config
    return replace(config, num_kv_heads=share.partition.num_kv_heads_of_all)
