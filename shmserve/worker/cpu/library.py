"""The binding of the C kernels: their structs once more, and an engine that computes steps.

Owns: the shared library, the KV cache's memory, and every array that the kernels hold a pointer to. Never: compiles, or samples.
The lock of the interpreter is released while a step is computed. Worker process, one call at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import F4, I4, Batch
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.pack import COLUMNS, PackedLayer, PackedMatrix, PackedModel

KV_TILE = 16
"""Tokens of a KV tile: a block of the scheduler is a whole number of them."""

MOST_ITEMS = 1 << 20
"""Items of one phase that the threads' ticket can count (ITEM_BITS of pool.h)."""

VALUE_BYTES = 2  # the cache is float16: as many bytes as bfloat16, an eighth of its rounding, converted by every CPU of today


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("num_panels", c_int32),
        ("num_groups", c_int32),
        ("bits", c_int32),
        ("blocks", c_void_p),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("q_bias", "k_bias", "v_bias", "o_bias")),
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("window", c_int32),
        ("is_rotated", c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("vocab_size", "hidden_size", "num_layers", "num_heads")),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "block_size")),
        ("norm_eps", c_float),
        ("embedding", _Matrix),
        ("head", _Matrix),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, c_void_p) for name in ("final_norm", "cos", "sin", "cache")),
        ("cache_layer_halves", c_int64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_seqs", "num_samples", "table_width")),
        *((name, c_void_p) for name in ("token_ids", "positions", "kv_slots", "cu_seqlens")),
        *((name, c_void_p) for name in ("block_table", "sample_rows", "logits", "greedy")),
    )


class Library:
    """A loaded library. Raises KernelsError if it cannot be loaded or is not of this version."""

    def __init__(self, path: Path) -> None:
        try:
            c = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsError(f"{path}: {error}") from None
        c.shm_engine_new.restype = c_void_p
        c.shm_engine_new.argtypes = (c_void_p, c_int32, c_int32)
        c.shm_engine_run.restype = None
        c.shm_engine_run.argtypes = (c_void_p, c_void_p)
        c.shm_engine_head.restype = None
        c.shm_engine_head.argtypes = (c_void_p, c_void_p)
        c.shm_engine_free.restype = None
        c.shm_engine_free.argtypes = (c_void_p,)
        c.shm_variant.restype = ctypes.c_char_p
        c.shm_use_amx.argtypes = (c_int32,)
        c.shm_matmul.argtypes = (c_void_p, c_int32, c_void_p, c_void_p)
        c.shm_exp.argtypes = (c_void_p, c_int32)
        c.shm_halves.argtypes = c.shm_floats.argtypes = (c_void_p, c_void_p, c_int32)
        sizes = (c_int32 * 4)()
        c.shm_struct_sizes(sizes)
        ours = [ctypes.sizeof(kind) for kind in (_Matrix, _Layer, _Model, _Step)]
        if list(sizes) != ours:
            raise KernelsError(f"{path}: its structs have {list(sizes)} bytes, not {ours}")
        self.c, self.path = c, path
        self.has_amx = bool(c.shm_has_amx())
        self.uses_amx = False

    @property
    def variant(self) -> str:
        """Which code runs: avx512-vnni, avx512-vnni-amx once that is switched on, avx-vnni, avx2 or portable."""
        name: bytes = self.c.shm_variant()
        return name.decode() + ("-amx" if self.uses_amx else "")

    def use_amx(self, is_wanted: bool) -> None:
        """Let the rows of prompts be multiplied by AMX, or not; in all engines of the process, between their steps.

        Raises KernelsError if there is no such code, or the kernel does not give this process the tiles.
        """
        refused = int(self.c.shm_use_amx(is_wanted))
        self.uses_amx = is_wanted and not refused
        if refused:
            raise KernelsError(f"the kernel gives this process no tiles: {os.strerror(refused)}")

    def matmul(self, matrix: PackedMatrix, x: F4) -> F4:
        """x [rows, groups * 32], quantised, times the matrix: [rows, panels * 16]."""
        out = np.empty((x.shape[0], matrix.num_panels * COLUMNS), np.float32)
        x = np.ascontiguousarray(x, np.float32)
        c_matrix = _matrix(matrix)
        if not self.c.shm_matmul(
            ctypes.byref(c_matrix), x.shape[0], x.ctypes.data, out.ctypes.data
        ):
            raise MemoryError
        return out

    def exp(self, x: F4) -> F4:
        """e^x as the kernels compute it; a multiple of 8 values."""
        out = x.astype(np.float32)
        self.c.shm_exp(out.ctypes.data, out.size)
        return out

    def halves(self, x: F4) -> npt.NDArray[np.float16]:
        """Rounded as the kernels round for the cache."""
        out = np.empty(x.size, np.float16)
        self.c.shm_halves(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def floats(self, x: npt.NDArray[np.float16]) -> F4:
        out = np.empty(x.size, np.float32)
        self.c.shm_floats(x.ctypes.data, out.ctypes.data, x.size)
        return out


def _matrix(matrix: PackedMatrix) -> _Matrix:
    return _Matrix(matrix.num_panels, matrix.num_groups, matrix.bits, matrix.blocks.ctypes.data)


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _layer(layer: PackedLayer) -> _Layer:
    out = _Layer(window=layer.window or 0, is_rotated=layer.is_rotated)
    for name in ("attention_norm", "ffn_norm", "q_norm", "k_norm"):
        setattr(out, name, _address(getattr(layer, name)))
    for name in ("q_bias", "k_bias", "v_bias", "o_bias"):
        setattr(out, name, _address(getattr(layer, name)))
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        setattr(out, name, _matrix(getattr(layer, name)))
    return out


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes of one KV block over all layers; values are padded to 16 dimensions."""
    width = -(-head_dim // 16) * 16
    return num_layers * num_kv_heads * (head_dim + width) * block_size * VALUE_BYTES


class Engine:
    """The kernels over one model, with its KV cache of `num_blocks` blocks. Raises MemoryError if there is not enough, KernelsError
    for a step that is too large."""

    def __init__(
        self,
        library: Library,
        model: PackedModel,
        *,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_samples: int,
        num_threads: int,
    ) -> None:
        assert block_size % KV_TILE == 0, block_size
        if max_tokens * model.num_kv_heads >= MOST_ITEMS:
            raise KernelsError(
                f"a step of {max_tokens} tokens and {model.num_kv_heads} kv heads is more than {MOST_ITEMS} items of work"
            )
        shape = (len(model.layers), model.num_kv_heads, model.head_dim)
        num_bytes = num_blocks * block_bytes(*shape, block_size)
        # Pages come when they are first written: a cache that is never full costs no memory for the rest.
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._cache: npt.NDArray[np.uint16] = np.frombuffer(memory, np.uint16)
        self._model, self._layers = model, (_Layer * len(model.layers))(*map(_layer, model.layers))
        self._c_model = _Model(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_layers=len(model.layers),
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            norm_eps=model.norm_eps,
            embedding=_matrix(model.embedding),
            head=_matrix(model.head),
            layers=self._layers,
            final_norm=_address(model.final_norm),
            cos=_address(model.cos),
            sin=_address(model.sin),
            cache=_address(self._cache),
            cache_layer_halves=self._cache.size // len(model.layers),
        )
        self._max_tokens, self._max_samples = max_tokens, max_samples
        self._logits = np.zeros((max_samples, model.head.num_panels * COLUMNS), np.float32)
        self._greedy = np.zeros(max_samples, np.int32)
        self._library = library
        self._engine = library.c.shm_engine_new(
            ctypes.byref(self._c_model), max_tokens, num_threads
        )
        if not self._engine:
            raise MemoryError(
                f"no memory or threads for {max_tokens} tokens, {num_threads} threads"
            )

    def run(self, batch: Batch, token_rows: I4 | None = None) -> tuple[F4, I4]:
        """Logits [Q, vocab_size] of `token_rows`, or of the last token of each sequence that samples, and the greedy token of each:
        -1 where a logit is not finite.

        Both are views that the next step overwrites.
        """
        if token_rows is None:
            token_rows = batch.cu_seqlens[1:][batch.sample_seqs] - 1
        count = token_rows.shape[0]
        assert batch.num_tokens <= self._max_tokens, (batch.num_tokens, self._max_tokens)
        assert count <= self._max_samples, (count, self._max_samples)
        arrays = [
            np.ascontiguousarray(array, np.int32)
            for array in (
                batch.token_ids,
                batch.positions,
                batch.kv_slots,
                batch.cu_seqlens,
                batch.block_table,
                token_rows,
            )
        ]
        addresses = [array.ctypes.data for array in (*arrays, self._logits, self._greedy)]
        counts = (batch.num_tokens, batch.num_seqs, count, batch.block_table.shape[1])
        step = _Step(*counts, *addresses)
        self._library.c.shm_engine_run(self._engine, ctypes.byref(step))
        return self._logits[:count, : self._model.vocab_size], self._greedy[:count]

    @property
    def handle(self) -> int:
        """What the kernels know it by: `RowSampler` draws by its threads."""
        return int(self._engine)

    def logits_of(self, token_rows: I4, room: F4) -> F4:
        """Logits of other tokens of the step just computed, written to `room`: f4[n, vocab_size], n at most `max_tokens`."""
        count = len(token_rows)
        assert count <= min(len(room), self._max_tokens), (count, len(room))
        assert room.strides == (self._logits.strides[0], 4), room.strides
        rows, greedy = np.ascontiguousarray(token_rows, np.int32), np.zeros(count, np.int32)
        step = _Step(
            num_samples=count,
            sample_rows=rows.ctypes.data,
            logits=room.ctypes.data,
            greedy=greedy.ctypes.data,
        )
        self._library.c.shm_engine_head(self._engine, ctypes.byref(step))
        return room[:count, : self._model.vocab_size]

    def logits_room(self, num_rows: int) -> F4:
        """Room for the logits of so many tokens."""
        return np.zeros((num_rows, self._logits.shape[1]), np.float32)

    def close(self) -> None:
        """End the threads and give the kernels' memory back. Called once."""
        self._library.c.shm_engine_free(self._engine)
        self._engine = None
