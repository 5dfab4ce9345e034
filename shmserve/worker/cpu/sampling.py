"""The binding of sampling.h: a token for each row of logits that lies in memory, by the engine's threads.

Owns: the array of draws that the C code reads and answers in, and the threads' scratch memory. Never: decides anything that sampler.py
does not; it is the definition. The lock of the interpreter is released meanwhile. Worker process, one call at a time.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import F4, I4
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import Library
from shmserve.worker.sampling_state import SamplingState

DRAW: Final = np.dtype(
    [
        *(
            (name, "u8")
            for name in ("seed", "logits", "bias_ids", "bias", "seen_ids", "seen_counts")
        ),
        *((name, "u8") for name in ("banned_ids", "mask", "top_ids", "top_logprobs")),
        *((name, "i4") for name in ("position", "top_k", "num_bias", "num_seen", "num_banned")),
        *((name, "i4") for name in ("num_top", "is_given")),
        *((name, "f4") for name in ("temperature", "top_p", "min_p")),
        *((name, "f4") for name in ("frequency", "presence", "repetition")),
        ("token", "i4"),
        ("logprob", "f4"),
    ],
    align=True,
)
"""The struct Draw; pointers are addresses, 0 where there is none."""

Top = dict[int, tuple[I4, F4]]


class _Draws(ctypes.Structure):
    _fields_ = (
        ("num_draws", c_int32),
        ("vocab_size", c_int32),
        ("draws", c_void_p),
        ("rooms", c_void_p),
        ("room_bytes", c_int64),
    )


class RowSampler:
    """Samples rows of `vocab_size` logits. `engine` lends its `num_threads` threads; without one the caller does all.

    Raises KernelsError for a library of another version.
    """

    def __init__(
        self, library: Library, vocab_size: int, *, engine: int | None = None, num_threads: int = 1
    ) -> None:
        c = library.c
        c.shm_sample.restype = None
        c.shm_sample.argtypes = (c_void_p, c_void_p)
        c.shm_draw_room_bytes.restype = c_int64
        c.shm_draw_room_bytes.argtypes = (c_int32,)
        if c.shm_draw_bytes() != DRAW.itemsize:
            raise KernelsError(
                f"the library's draws have {c.shm_draw_bytes()} bytes, not {DRAW.itemsize}"
            )
        self._c, self._engine, self._vocab_size = c, engine, vocab_size
        self._room_bytes = -(-int(c.shm_draw_room_bytes(vocab_size)) // 64) * 64
        self._rooms = np.zeros(num_threads * self._room_bytes, np.uint8)

    def sample(
        self,
        logits: F4,
        rows: I4,
        state: SamplingState,
        places: npt.NDArray[np.intp] | None = None,
        ahead: I4 | None = None,
    ) -> tuple[I4, F4, Top]:
        """(token of each of `rows`, its logprob, the most likely of those who asked).

        `rows` are row slots in `state`; their logits are the rows `places` of `logits` f4[R, >= V], or all. A token is -1
        where there is none: a logit was not finite, or nothing was left to choose from. A logprob that nobody asked for is
        NaN. The logits stay as they are.
        Where guesses are verified, `ahead` counts those that stand before each.
        """
        draws = self._draws(logits, np.arange(logits.shape[0]) if places is None else places)
        draws["seed"] = state.seed[rows]
        draws["position"] = state.position[rows] if ahead is None else state.position[rows] + ahead
        draws["temperature"] = state.temperature[rows]
        draws["top_k"] = np.maximum(state.top_k[rows], 0)
        draws["top_p"] = state.top_p[rows]
        draws["min_p"] = np.minimum(state.min_p[rows], 1)
        draws["num_top"] = state.num_logprobs[rows]
        kept: list[object] = []  # what the addresses point at lives as long as the call
        if state.has_edits:
            for index in np.flatnonzero(state.is_edited(rows)).tolist():
                num_ahead = 0 if ahead is None else int(ahead[index])
                kept.append(self._edits(draws[index], int(rows[index]), state, num_ahead))
        num_top = np.minimum(draws["num_top"], self._vocab_size)
        top: Top = {}
        for index in np.flatnonzero(num_top > 0).tolist():
            ids, values = np.zeros(num_top[index], np.int32), np.zeros(num_top[index], np.float32)
            top[index] = (ids, values)
            draws["top_ids"][index], draws["top_logprobs"][index] = (
                ids.ctypes.data,
                values.ctypes.data,
            )
        self._run(draws)
        token_ids: I4 = draws["token"].copy()
        for index in np.flatnonzero(token_ids < 0).tolist():
            top.pop(index, None)
        return token_ids, draws["logprob"].copy(), top

    def score(self, logits: F4, token_ids: I4, num_top: int) -> tuple[F4, I4, F4]:
        """Logprobs f4[R] of the token that stands for each row of `logits`, NaN where a logit is not finite; and the `num_top`
        most likely, ids i4[R, N] and logprobs f4[R, N]."""
        num_rows, num_top = logits.shape[0], min(num_top, self._vocab_size)
        ids = np.zeros((num_rows, num_top), np.int32)
        values = np.full((num_rows, num_top), np.nan, np.float32)
        draws = self._draws(logits, np.arange(num_rows))
        draws["is_given"] = 1
        draws["token"] = token_ids
        draws["num_top"] = num_top
        steps = np.arange(num_rows, dtype=np.uint64) * np.uint64(4 * num_top)
        draws["top_ids"] = steps + np.uint64(ids.ctypes.data)
        draws["top_logprobs"] = steps + np.uint64(values.ctypes.data)
        self._run(draws)
        return draws["logprob"].copy(), ids, values

    def _draws(self, logits: F4, places: npt.NDArray[np.intp]) -> npt.NDArray[np.void]:
        assert logits.dtype == np.float32 and logits.strides[1] == 4, (logits.dtype, logits.strides)
        assert logits.shape[1] >= self._vocab_size, (logits.shape, self._vocab_size)
        draws = np.zeros(len(places), DRAW)
        addresses = places.astype(np.uint64) * np.uint64(logits.strides[0])
        draws["logits"] = addresses + np.uint64(logits.ctypes.data)
        draws["logprob"] = np.nan
        return draws

    def _edits(self, draw: np.void, row: int, state: SamplingState, ahead: int) -> object:
        bias, seen = state.bias.get(row), state.seen(row)
        banned, mask = state.bans(row, ahead), state.mask(row)
        assert not ahead or state.may_guess(row), row
        if bias is not None:
            draw["bias_ids"], draw["bias"] = bias[0].ctypes.data, bias[1].ctypes.data
            draw["num_bias"] = len(bias[0])
        if seen is not None:
            draw["seen_ids"], draw["seen_counts"] = seen[0].ctypes.data, seen[1].ctypes.data
            draw["num_seen"] = len(seen[0])
            draw["frequency"] = state.frequency_penalty[row]
            draw["presence"] = state.presence_penalty[row]
            draw["repetition"] = state.repetition_penalty[row]
        if banned is not None:
            draw["banned_ids"], draw["num_banned"] = banned.ctypes.data, len(banned)
        if mask is not None:
            assert mask.itemsize == 4 and mask.size * 32 >= self._vocab_size, mask.shape
            mask = np.ascontiguousarray(mask)
            draw["mask"] = mask.ctypes.data
        return bias, seen, banned, mask

    def _run(self, draws: npt.NDArray[np.void]) -> None:
        job = _Draws(
            len(draws),
            self._vocab_size,
            draws.ctypes.data,
            self._rooms.ctypes.data,
            self._room_bytes,
        )
        self._c.shm_sample(self._engine, ctypes.byref(job))
