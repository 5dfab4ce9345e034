# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""One token a row, drawn without a sort, a sum of probabilities or a state: Gumbel-max over ids that Philox numbers.

Owns: `sample` of reference.py, whose contract this is. Three kernels, since a row of 128k logits is too long for one SM: figures of
each chunk of a row, the best id of each chunk (it needs the row's largest logit, for min_p), the best chunk. The random words are those
of philox.py, bit for bit; the Gumbel made of them is within float32's rounding of it, in its far tail too.

The CPU draws rows that keep more than 256 candidates in two steps (sampler.py). On a GPU that would cost a pass to count them before
the draw: here every candidate has its own number, so there a seed gives other tokens, from the same distribution.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.reference import SAMPLE_CHUNK, SampleScratch


@triton.jit
def _row_figures(largest, total, row, num_chunks, CHUNKS: tl.constexpr):
    """Largest logit of a row, +inf for a bad one; and the sum of exp(logit - largest)."""
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < num_chunks
    each = tl.load(largest + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    sums = tl.load(total + row * num_chunks + chunk, mask=inside, other=0.0)
    top = tl.max(each, axis=0)
    is_good = (top > float("-inf")) & (top < float("inf"))
    factor = tl.exp(tl.where(is_good, each - tl.where(is_good, top, 0.0), 0.0))
    return top, is_good, tl.sum(sums * factor, axis=0)


@triton.jit
def _chunk_figures(logits, largest, total, vocab_size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    at = logits + row.to(tl.int64) * vocab_size + token
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    is_bad = (x != x) | (x == float("inf"))
    num_bad = tl.sum(is_bad.to(tl.int32), axis=0)
    top = tl.max(tl.where(is_bad, float("-inf"), x), axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.sum(tl.exp(tl.where(is_bad, float("-inf"), x - base)), axis=0)
    place = row * tl.num_programs(1) + chunk
    # One bad logit is told to the later kernels as a largest one of +inf.
    tl.store(largest + place, tl.where(num_bad > 0, float("inf"), top))
    tl.store(total + place, sums)


@triton.jit
def gumbel(seed, position, token):
    """Gumbel variates of philox.gumbels(seed, position, token) in float32.

    -log(-log(u)) loses u's upper tail in float32, where the winners come from: there 1 - u, exact from the complement of the
    bits, goes through the series of -log(1 - v) instead, whose first dropped term is below 2**-27.
    """
    zero = tl.zeros_like(token)
    high, low, _, _ = tl.philox(seed, token, zero + position, zero, zero)
    tail = (low >> 12).to(tl.float32) * 2.220446049250313e-16 + 1.1102230246251565e-16
    u = high.to(tl.float32) * 2.3283064365386963e-10 + tail
    rest = ((low ^ 0xFFFFFFFF) >> 12).to(
        tl.float32
    ) * 2.220446049250313e-16 + 1.1102230246251565e-16
    v = (high ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10 + rest
    series = 1.0 / 7.0 + v * (1.0 / 8.0)
    series = 1.0 / 6.0 + v * series
    series = 1.0 / 5.0 + v * series
    series = 1.0 / 4.0 + v * series
    series = 1.0 / 3.0 + v * series
    series = 1.0 / 2.0 + v * series
    series = v * (1.0 + v * series)
    return -tl.log(tl.where(v < 0.125, series, -tl.log(u)))


@triton.jit
def _chunk_best(
    logits,
    temperatures,
    min_p,
    seeds,
    positions,
    largest,
    total,
    score,
    token_id,
    vocab_size,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    top, is_good, _ = _row_figures(largest, total, row, num_chunks, CHUNKS)
    if is_good:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        at = logits + row.to(tl.int64) * vocab_size + token
        x = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            floor = tl.load(min_p + row)
            cut = tl.where(floor > 0.0, tl.log(tl.maximum(floor, 1e-38)), float("-inf"))
            x = (x - top) / temperature
            position = tl.load(positions + row).to(tl.uint32)
            drawn = x + gumbel(tl.load(seeds + row), position, token.to(tl.uint32))
            x = tl.where(x >= cut, drawn, float("-inf"))
        best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        place = row * num_chunks + chunk
        tl.store(score + place, best)
        tl.store(token_id + place, chunk * CHUNK + index)


@triton.jit
def _best_of_row(
    logits,
    largest,
    total,
    score,
    token_id,
    out_ids,
    out_logprobs,
    failed,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    top, is_good, sums = _row_figures(largest, total, row, num_chunks, CHUNKS)
    tl.store(failed + row, tl.where(is_good, 0, 1))
    if is_good:
        chunk = tl.arange(0, CHUNKS)
        inside = chunk < num_chunks
        each = tl.load(score + row * num_chunks + chunk, mask=inside, other=float("-inf"))
        _, index = tl.max(each, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(token_id + row * num_chunks + index)
        x = tl.load(logits + row.to(tl.int64) * vocab_size + token).to(tl.float32)
        tl.store(out_ids + row, token)
        tl.store(out_logprobs + row, x - top - tl.log(sums))
    else:
        tl.store(out_ids + row, 0)
        tl.store(out_logprobs + row, 0.0)


def sample(
    logits: Tensor,
    temperatures: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out_ids: Tensor,
    out_logprobs: Tensor,
    failed: Tensor,
    scratch: SampleScratch,
) -> None:
    """See reference.sample."""
    rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // SAMPLE_CHUNK)
    chunk = {"CHUNK": SAMPLE_CHUNK}
    chunks = {"CHUNKS": launch.power_of_two(num_chunks)}
    s = scratch
    launch.run(
        _chunk_figures, (rows, num_chunks), (logits, s.largest, s.total, vocab_size), chunk, 8
    )
    launch.run(
        _chunk_best,
        (rows, num_chunks),
        (
            logits,
            temperatures,
            min_p,
            seeds,
            positions,
            s.largest,
            s.total,
            s.score,
            s.token_id,
            vocab_size,
        ),
        {**chunk, **chunks},
        num_warps=8,
    )
    launch.run(
        _best_of_row,
        (rows,),
        (
            logits,
            s.largest,
            s.total,
            s.score,
            s.token_id,
            out_ids,
            out_logprobs,
            failed,
            vocab_size,
            num_chunks,
        ),
        chunks,
        num_warps=1,
    )
