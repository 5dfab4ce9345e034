"""Whether a compiled library computes what it should: a toy model against numpy, and rows alone against rows together.

Owns: the reference of the kernels' arithmetic (8-bit activations, half-precision cache, everything else in float64) and the
toy. Never: imports torch. Runs as a program after a compilation (`python -m shmserve.worker.cpu.selftest LIBRARY`), where a
crash harms nobody, and within the worker at each start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import F4, I4, Batch
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import Engine, Library
from shmserve.worker.cpu.pack import (
    GROUP,
    Arena,
    PackedLayer,
    PackedMatrix,
    PackedModel,
    pack_blocks,
    pack_floats,
    padded,
    unpack,
)

F8 = npt.NDArray[np.float64]

TOLERANCE = 0.02
"""Of the logits' size: float32 sums, and now and then an activation that rounds to the other of two neighbouring integers."""

TOY_TOKENS = 40


def check(library: Library) -> None:
    """Raise KernelsError, one line, if `library` computes something else than numpy."""
    model, ids = toy_model(0), (np.arange(TOY_TOKENS, dtype=np.int32) * 7) % 61
    expected = reference_logits(model, ids)[-1]
    engine = Engine(
        library, model, num_blocks=8, block_size=16, max_tokens=64, max_samples=4, num_threads=2
    )
    try:
        at_once, _ = engine.run(chunk(ids, 0, [3, 1, 6]))
        at_once = at_once.copy()
        for start, end in ((0, 5), (5, 39), (39, 40)):
            in_parts, _ = engine.run(chunk(ids[start:end], start, [2, 5, 4]))
        if not np.array_equal(at_once, in_parts):
            raise KernelsError(f"{library.variant}: a prompt in parts differs from the whole")
    finally:
        engine.close()
    error = float(np.abs(at_once[0] - expected).max() / np.abs(expected).max())
    if not error < TOLERANCE:  # NaN is none
        raise KernelsError(f"{library.variant}: the logits are off by {error:.3g} of their size")


def check_amx(library: Library) -> None:
    """Raise KernelsError if a prompt has other logits, in a single bit, by AMX than without; leaves AMX on.

    The toy's prompt is a whole pair of tiles and a part of one, its groups are odd and even in number, its matrices have 4 and 8 bits.
    """
    model, ids = toy_model(1), (np.arange(TOY_TOKENS, dtype=np.int32) * 11) % 61
    engine = Engine(
        library,
        model,
        num_blocks=4,
        block_size=16,
        max_tokens=TOY_TOKENS,
        max_samples=TOY_TOKENS,
        num_threads=2,
    )
    try:
        found = []
        for is_wanted in (False, True):
            library.use_amx(is_wanted)
            rows, _ = engine.run(chunk(ids, 0, [1, 3, 2]), np.arange(TOY_TOKENS, dtype=np.int32))
            found.append(rows.copy())
    finally:
        engine.close()
    without, with_amx = found
    if not np.array_equal(without, with_amx):
        count = int((without != with_amx).any(axis=1).sum())
        raise KernelsError(f"{count} of {TOY_TOKENS} rows have other logits than without it")


def chunk(ids: I4, start: int, blocks: list[int]) -> Batch:
    """One sequence that computes `ids` from position `start`, in `blocks` of 16."""
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    table = np.array([blocks], np.int32)
    return Batch(
        step=0,
        rows=np.zeros(1, np.int32),
        token_ids=ids,
        positions=positions,
        kv_slots=(table[0, positions // 16] * 16 + positions % 16).astype(np.int32),
        cu_seqlens=np.array([0, len(ids)], np.int32),
        block_table=table,
        kv_lens=np.array([start + len(ids)], np.int32),
        sample_seqs=np.zeros(1, np.int32),
        is_decode=len(ids) == 1,
    )


def toy_model(
    seed: int, *, num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 24, hidden: int = 80
) -> PackedModel:
    """Random, two layers, with everything that a layer may have: biases, q/k norms, a window, 4 and 8 bits; no round sizes."""
    rng = np.random.default_rng(seed)
    arena, ffn, vocab = Arena(), 112, 61

    def floats(rows: int, columns: int, multiple: int = 16) -> PackedMatrix:
        values = rng.normal(size=(rows, columns)) / np.sqrt(columns)
        return pack_floats(values.astype(np.float32), arena, row_multiple=multiple)

    def nibbles(rows: int, columns: int, multiple: int = 16) -> PackedMatrix:
        raw = rng.integers(0, 256, (rows, -(-columns // GROUP), 20), dtype=np.uint8)
        raw[..., :4] = np.array([0.03, -0.22], "<f2").view(np.uint8)
        if (
            columns % GROUP
        ):  # what is beyond the columns is multiplied by zeros, as in padded floats
            raw[:, -1, :2] = 0
        return pack_blocks("Q4_1", raw.reshape(rows, -1), arena, row_multiple=multiple)

    def gain(size: int) -> F4:
        return (1 + 0.3 * rng.normal(size=size)).astype(np.float32)

    def bias(size: int) -> F4:
        return (0.3 * rng.normal(size=size)).astype(np.float32)

    q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim

    def layer(matrix_of: tuple[object, ...], window: int | None, is_rotated: bool) -> PackedLayer:
        first, second = matrix_of
        return PackedLayer(
            attention_norm=padded(gain(hidden)),
            ffn_norm=padded(gain(hidden)),
            q=first(q_rows, hidden),  # type: ignore[operator]
            k=floats(kv_rows, hidden),
            v=second(kv_rows, hidden),  # type: ignore[operator]
            o=floats(hidden, q_rows),
            gate=first(ffn, hidden, 32),  # type: ignore[operator]
            up=second(ffn, hidden, 32),  # type: ignore[operator]
            down=floats(hidden, ffn),
            q_norm=gain(head_dim),
            k_norm=gain(head_dim),
            q_bias=bias(q_rows),
            k_bias=bias(kv_rows),
            v_bias=bias(kv_rows),
            o_bias=padded(bias(hidden)),
            window=window,
            is_rotated=is_rotated,
        )

    angles = np.outer(np.arange(1024), 100.0 ** -(np.arange(0, head_dim, 2) / head_dim))
    return PackedModel(
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        embedding=floats(vocab, hidden),
        head=floats(vocab, hidden),
        final_norm=padded(gain(hidden)),
        layers=(layer((nibbles, floats), 19, True), layer((floats, nibbles), None, False)),
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
    )


def rounded(x: F8) -> F8:
    """Rows of activations as 8 bits see them: 32 values share a scale."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    unit = np.abs(groups).max(-1, keepdims=True) / 127
    unit[unit == 0] = 1
    result: F8 = (np.rint(groups / unit) * unit).reshape(x.shape)
    return result


def _times(x: F8, matrix: PackedMatrix) -> F8:
    """`x`, padded to whole groups and rounded, times the matrix."""
    wide = np.zeros((x.shape[0], matrix.num_groups * GROUP))
    wide[:, : x.shape[1]] = x
    result: F8 = rounded(wide) @ unpack(matrix).T.astype(np.float64)
    return result


def _norm(x: F8, weight: F4, eps: float) -> F8:
    result: F8 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight[: x.shape[-1]]
    return result


def _heads(x: F8, count: int, dim: int, bias: F4 | None, norm: F4 | None, eps: float) -> F8:
    x = x[:, : count * dim] + (0 if bias is None else bias)
    heads: F8 = x.reshape(-1, count, dim)
    return heads if norm is None else _norm(heads, norm, eps)


def _rotate(x: F8, cos: F4, sin: F4) -> F8:
    a, b = np.split(x, 2, axis=-1)
    c, s = cos[: len(x), None], sin[: len(x), None]
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)


def _attend(q: F8, k: F8, v: F8, window: int | None) -> F8:
    num_tokens, num_heads, dim = q.shape
    k, v = k.astype(np.float16).astype(np.float64), v.astype(np.float16).astype(np.float64)
    age = np.arange(num_tokens)[:, None] - np.arange(num_tokens)
    hidden = (age < 0) | (age >= (window or num_tokens))
    out = np.empty_like(q)
    for head in range(num_heads):
        kv_head = head * k.shape[1] // num_heads
        scores = q[:, head] @ k[:, kv_head].T / np.sqrt(dim)
        weights = np.exp(np.where(hidden, -np.inf, scores - scores.max()))
        out[:, head] = weights @ v[:, kv_head] / weights.sum(-1, keepdims=True)
    return out.reshape(num_tokens, -1)


def reference_logits(model: PackedModel, ids: I4) -> F8:
    """Logits of every position of one sequence."""
    eps, dim, count, kv_count = model.norm_eps, model.head_dim, model.num_heads, model.num_kv_heads
    hidden = model.hidden_size
    h = unpack(model.embedding)[ids, :hidden].astype(np.float64)
    for layer in model.layers:
        x = _norm(h, layer.attention_norm, eps)
        q = _heads(_times(x, layer.q), count, dim, layer.q_bias, layer.q_norm, eps)
        k = _heads(_times(x, layer.k), kv_count, dim, layer.k_bias, layer.k_norm, eps)
        v = _heads(_times(x, layer.v), kv_count, dim, layer.v_bias, None, eps)
        if layer.is_rotated:
            q, k = _rotate(q, model.cos, model.sin), _rotate(k, model.cos, model.sin)
        attended = _times(_attend(q, k, v, layer.window), layer.o)[:, :hidden]
        h = h + attended + (0 if layer.o_bias is None else layer.o_bias[:hidden])
        x = _norm(h, layer.ffn_norm, eps)
        gate, up = _times(x, layer.gate), _times(x, layer.up)
        h = h + _times(gate / (1 + np.exp(-gate)) * up, layer.down)[:, :hidden]
    return _times(_norm(h, model.final_norm, eps), model.head)[:, : model.vocab_size]


def main(argv: list[str]) -> int:
    try:
        check(Library(Path(argv[0])))
    except KernelsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
