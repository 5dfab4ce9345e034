"""Attention by flashinfer, in place of our kernels: the choice at start, and what its wrappers want to know of each step.

Owns: whether flashinfer computes, its wrappers (one a batch bucket and window, and one a window for steps with prompts), their
buffers, and their plans. Never: imports flashinfer before it is wanted, or chooses blocks. Worker's main thread only.

A wrapper is planned on the host once a step and then run once a layer. A plan copies what it found to the device, so it is never
part of a recorded step: the runner plans, and then replays. Its page table is the block table with the unused entries left out;
a page is a block, and a layer's cache is in its layout "NHD" as it is.

Laws
  - A wrapper's plan goes through pinned memory of its own, which is written again only when the last plan's copies are over.
  - Buffers that recorded steps read are made once. A bucket's wrapper is always planned for the bucket's full number of rows:
    a padding row is one token of block 0, since a wrapper promises nothing for a row without pages.
  - Block ids are on the device before a plan: those on the host it would copy and wait for, with the step in flight before it.

Where a step's work is cut depends on all of its rows: unlike our kernels' results, a row's bits depend on its neighbours here.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shmserve.config import AttentionBackend
from shmserve.worker.batch import I4
from shmserve.worker.cuda import reference
from shmserve.worker.cuda.link import Link, Mark, Passed
from shmserve.worker.models.config import DecoderConfig, ModelLoadError

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
LEAST_CAPABILITY = (8, 0)
SCALAR_GROUPS = (
    1,
    2,
    3,
)  # query heads of a KV head for which decoding without tensor cores is faster, and exists
LEAST_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
TRIAL_CHUNKS = (1, 80)  # queries; on Hopper it has one kernel for up to 64 and another for more
TRIAL_ERROR = 0.05  # of values around 1, in 16 bits


class FlashInferRefused(Exception):
    """flashinfer cannot compute this model here; the text says why, in one line."""


def attention_for(
    wanted: AttentionBackend,
    kernels: str,
    config: DecoderConfig,
    dtype: torch.dtype,
    link: Link,
    buckets: tuple[int, ...],
    *,
    max_num_seqs: int,
    max_blocks: int,
    block_size: int,
) -> FlashInferAttention | None:
    """What attends in place of the operations named `kernels`, None for themselves; says so in one log line.

    Raises ModelLoadError if flashinfer is wanted by name and cannot be had.
    """
    if wanted == "triton":
        log.info("attention: %s", kernels)
        return None
    try:
        reason = refusal(config, dtype, capability_of(link.device))
        if reason:
            raise FlashInferRefused(reason)
        attention = FlashInferAttention(
            imported(),
            config,
            dtype,
            link,
            buckets,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
        )
        attention.try_out()
    except FlashInferRefused as error:
        if wanted == "flashinfer":
            raise ModelLoadError(f"--attention-backend flashinfer: {error}") from None
        log.info("attention: %s (%s)", kernels, error)
        return None
    log.info("attention: flashinfer %s", attention.version)
    return attention


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def refusal(
    config: DecoderConfig, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Why flashinfer is not asked to compute this, in words; None if it can be. Windows and soft caps it has."""
    if capability is None:
        return "flashinfer needs a CUDA device"
    if capability < LEAST_CAPABILITY:
        found, least = (f"{a}.{b}" for a, b in (capability, LEAST_CAPABILITY))
        return f"flashinfer needs compute capability {least}, the device has {found}"
    if dtype not in DTYPES:
        return f"flashinfer computes in 16 bits, not in {torch.finfo(dtype).dtype}"
    if config.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"flashinfer has heads of {sizes}, the model has heads of {config.head_dim}"
    return None


def imported() -> Any:
    """The module."""
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            raise FlashInferRefused("flashinfer is not installed") from None
        raise FlashInferRefused(f"flashinfer cannot be imported: {_line(error)}") from None
    except Exception as error:  # of other people's code that looks for compilers and drivers
        raise FlashInferRefused(f"flashinfer cannot be imported: {_line(error)}") from None


def workspace_bytes(config: DecoderConfig, most_rows: int, num_processors: int) -> int:
    """For the parts of queries whose keys are cut into splits, float32. Its grid then has at most two programs a processor, each with
    a tile of 128 (query, head of the group) pairs; in a recorded step one of 16 or 64 for each row and KV head, if that is more."""
    group = config.num_heads // config.num_kv_heads
    recorded = most_rows * config.num_kv_heads * (16 if group <= 16 else 64)
    floats = max(2 * num_processors * 128, recorded) * (config.head_dim + 2)  # and log-sum-exps
    return max(LEAST_WORKSPACE_BYTES, 4 * floats)


class FlashInferAttention:
    """`library` is the module flashinfer. Made once, for steps of at most `max_num_seqs` sequences of `max_blocks` blocks each."""

    def __init__(
        self,
        library: Any,
        config: DecoderConfig,
        dtype: torch.dtype,
        link: Link,
        buckets: tuple[int, ...],
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self.version = str(getattr(library, "__version__", "of unknown version"))
        self._config, self._dtype, self._link, self._block_size = config, dtype, link, block_size
        self._smallest_bucket = min(buckets, default=None)
        device = link.device
        self._scale = config.query_scale * config.head_dim**-0.5
        self._windows = tuple(window or 0 for window in config.sliding_windows)
        num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
        most_bytes = workspace_bytes(config, max_num_seqs, num_processors)
        # One for all: steps, and the layers of a step, are computed one behind the other.
        workspace = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        num_ids = max_num_seqs * max_blocks
        self._staged = link.host_words(num_ids)
        self._staged_ids: I4 = self._staged.numpy()
        self._ids = torch.zeros(num_ids, dtype=torch.int32, device=device)
        self._sent: Mark = Passed()
        group = config.num_heads // config.num_kv_heads
        self._decoding: dict[tuple[int, int], Any] = {}
        self._mixed: dict[int, Any] = {}
        for window in sorted(set(self._windows)):
            self._mixed[window] = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            for bucket in buckets:
                self._decoding[bucket, window] = library.BatchDecodeWithPagedKVCacheWrapper(
                    workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=group not in SCALAR_GROUPS,
                    paged_kv_indptr_buffer=torch.zeros(
                        bucket + 1, dtype=torch.int32, device=device
                    ),
                    paged_kv_indices_buffer=self._ids,
                    paged_kv_last_page_len_buffer=torch.zeros(
                        bucket, dtype=torch.int32, device=device
                    ),
                    # Named, since what is recorded must stay what is planned for.
                    backend="fa2",
                )
        self._planned: dict[int, Any] = {}

    def plan(self, block_table: I4, kv_lens: I4, cu_seqlens: I4, bucket: int | None) -> None:
        """Say what the next step looks like, before it is replayed or launched: fields of a `Batch`.

        bucket None: chunks of any length; else one query a row, in the recorded step of so many rows.
        """
        num_padding = 0 if bucket is None else bucket - len(kv_lens)
        indptr, ids, last_page_lens = pages_of(block_table, kv_lens, self._block_size, num_padding)
        # The copies that this waits for stand right behind the step before the last, whose result is here already.
        self._sent.wait()
        self._staged_ids[: len(ids)] = ids
        on_device = self._ids[: len(ids)]
        self._link.copy(on_device, self._staged[: len(ids)])
        pages = (torch.from_numpy(indptr), on_device, torch.from_numpy(last_page_lens))
        config, dtype = self._config, self._dtype
        shape = (config.num_heads, config.num_kv_heads, config.head_dim, self._block_size)
        for window in self._mixed:
            how = {
                "sm_scale": self._scale,
                # It counts the keys to the left of the query, we count the query, too.
                "window_left": window - 1 if window else -1,
                "logits_soft_cap": config.attention_softcap or 0.0,
                "q_data_type": dtype,
                "kv_data_type": dtype,
            }
            if bucket is None:
                wrapper = self._mixed[window]
                queries = torch.from_numpy(np.ascontiguousarray(cu_seqlens, np.int32))
                wrapper.plan(queries, *pages, *shape, causal=True, **how)
            else:
                wrapper = self._decoding[bucket, window]
                wrapper.plan(*pages, *shape, **how)
            self._planned[window] = wrapper
        self._sent = self._link.mark()

    def plan_padding(self, bucket: int) -> None:
        """Plan a step of that many padding rows: before it is recorded."""
        none = np.zeros(0, np.int32)
        self.plan(np.zeros((0, 1), np.int32), none, np.zeros(1, np.int32), bucket)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """`decode_attention` or `prefill_attention` of reference.py for the step that was planned last."""
        self._planned[self._windows[layer]].run(query, (keys, values), out=out)

    def try_out(self) -> None:
        """Have its kernels compiled and see whether they compute what the reference does. Raises FlashInferRefused."""
        try:
            for count in TRIAL_CHUNKS:
                self._try_chunk(count, None)
            if self._smallest_bucket is not None:
                self._try_chunk(1, self._smallest_bucket)
        except (FlashInferRefused, torch.OutOfMemoryError):
            raise
        except (
            Exception
        ) as error:  # no compiler, no kernel for this GPU, another version's arguments
            raise FlashInferRefused(f"flashinfer fails on a trial: {_line(error)}") from None

    def _try_chunk(self, count: int, bucket: int | None) -> None:
        """The last `count` tokens of one sequence, in blocks of random content."""
        config, device, size = self._config, self._link.device, self._block_size
        length = min(count + 5 * size // 2, (len(self._ids) // (bucket or 1)) * size)
        count = min(count, length)
        num_blocks = -(-length // size)
        draw = torch.Generator().manual_seed(count)

        def drawn(*shape: int) -> Tensor:
            numbers = torch.randn(shape, generator=draw)
            return numbers.to(device=device, dtype=self._dtype)

        cache = (num_blocks, size, config.num_kv_heads, config.head_dim)
        keys, values = drawn(*cache), drawn(*cache)
        rows = bucket or count
        query = drawn(rows, config.num_heads, config.head_dim)
        table = np.arange(num_blocks, dtype=np.int32)[None, ::-1].copy()
        lengths, bounds = np.array([length], np.int32), np.array([0, count], np.int32)
        self.plan(table, lengths, bounds, bucket)
        blocks, cu, kv = (torch.from_numpy(a).to(device) for a in (table, bounds, lengths))
        for window in self._mixed:
            found, expected = torch.zeros_like(query), torch.zeros_like(query[:count])
            self.attend(self._windows.index(window), query, keys, values, found)
            at, how = (blocks, cu, kv, expected, count), (self._scale, window)
            softcap = config.attention_softcap or 0.0
            reference.prefill_attention(query[:count], keys, values, *at, *how, softcap)
            error = float((found[:count].float() - expected.float()).abs().max())
            if not error <= TRIAL_ERROR:  # NaN is no number that could be less
                what = f"window {window}, {count} queries, {error:.2g} off"
                raise FlashInferRefused(f"flashinfer computes something else ({what})")


def pages_of(block_table: I4, kv_lens: I4, block_size: int, num_padding: int) -> tuple[I4, I4, I4]:
    """(indptr, page ids, tokens of the last page), with so many padding rows of one token of block 0 behind."""
    counts = -(-kv_lens // block_size)
    is_used = np.arange(block_table.shape[1]) < counts[:, None]
    ids = np.concatenate((block_table[is_used], np.zeros(num_padding, np.int32)))
    indptr = np.zeros(len(kv_lens) + num_padding + 1, np.int32)
    np.cumsum(np.concatenate((counts, np.ones(num_padding, np.int32))), out=indptr[1:])
    last = np.concatenate((kv_lens - (counts - 1) * block_size, np.ones(num_padding, np.int32)))
    return indptr, ids.astype(np.int32, copy=False), last.astype(np.int32, copy=False)


def _line(error: BaseException) -> str:
    """An error of somebody else's, short."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
