# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""One token a row, drawn without a sort or a state: Gumbel-max over numbers that Philox makes of seed, position and id.

Owns: `sample` of reference.py, whose contract this is. Three kernels, since a row of 128k logits is too long for one SM: figures of
each chunk of a row; the best id of each chunk, its best bucket of neighbouring ids, or both (they need the row's largest logit); the
best chunk, and the id in its bucket. A row that keeps all ids thus takes one random number a bucket, and one for each id of one bucket.

Between the first two, one program a row finds the last id that top-k and top-p leave, by quartering the floats below the largest
logit: bfloat16 has 16 bits, so that is some 8 passes over a row that lies in the L2 cache, and as many for the id where several are
alike. Rows without these limits leave it at once.

The rule is that of sampler.py, and the random words are those of philox.py, bit for bit: the uniforms that they stand for are the CPU's. The
Gumbel made of them is within float32's rounding of it, in its far tail too, and so is the weight of a bucket. For the same logits a
seed thus gives the same ids as on the CPU, but where two candidates are so near to each other that rounding decides between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmserve.worker.cuda import launch
from shmserve.worker.cuda.reference import SAMPLE_CHUNK, SampleScratch
from shmserve.worker.philox import DOMAIN_BUCKET, DOMAIN_TOKEN
from shmserve.worker.sampler import BUCKET, HEAD

_TOKEN = tl.constexpr(DOMAIN_TOKEN)
_BUCKETS = tl.constexpr(DOMAIN_BUCKET)
LIMIT_CHUNK = 2048
"""Token ids that a pass for top-k or top-p has in its hands at a time: with three sums of each, all that no architecture spills registers for."""

_HEAD = tl.constexpr(HEAD)
_LEAST_KEY = tl.constexpr(-(1 << 31))
_LAST_ID = tl.constexpr((1 << 31) - 1)


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
def _key(x, SHIFT: tl.constexpr):
    """Integers in the order of the floats, -0 as 0; of their upper bits, where the others say nothing."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _least_log(floor):
    """The least log-weight that min-p leaves; -inf for 0."""
    return tl.where(floor > 0.0, tl.log(tl.minimum(tl.maximum(floor, 1.2e-38), 1.0)), float("-inf"))


@triton.jit
def _sums_over(
    at,
    vocab_size,
    top,
    temperature,
    least,
    last_key,
    last_id,
    low,
    middle,
    high,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many ids of a row, or (WEIGHTS) how heavy, are not behind (`last_key`, `last_id`) and not lighter than `least`: those of
    key `low` or more, of `middle` or more, of `high` or more."""
    sums_low = tl.zeros((CHUNK,), tl.float32)
    sums_middle = tl.zeros((CHUNK,), tl.float32)
    sums_high = tl.zeros((CHUNK,), tl.float32)
    for start in tl.range(0, vocab_size, CHUNK, num_stages=3):
        token = start + tl.arange(0, CHUNK)
        x = tl.load(at + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        key, weight = _key(x, SHIFT), (x - top) / temperature
        is_in = (key > last_key) | ((key == last_key) & (token <= last_id))
        is_in = is_in & (weight >= least) & (x > float("-inf"))
        amount = tl.exp(weight) if WEIGHTS else tl.full((CHUNK,), 1.0, tl.float32)
        amount = tl.where(is_in, amount, 0.0)
        sums_low += tl.where(key >= low, amount, 0.0)
        sums_middle += tl.where(key >= middle, amount, 0.0)
        sums_high += tl.where(key >= high, amount, 0.0)
    return tl.sum(sums_low, axis=0), tl.sum(sums_middle, axis=0), tl.sum(sums_high, axis=0)


@triton.jit
def _counts_of_alike(
    at,
    vocab_size,
    last_key,
    last_id,
    key,
    low,
    middle,
    high,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many ids of `key` that are not behind (`last_key`, `last_id`) are at most `low`, at most `middle`, at most `high`."""
    num_low = tl.zeros((CHUNK,), tl.int32)
    num_middle = tl.zeros((CHUNK,), tl.int32)
    num_high = tl.zeros((CHUNK,), tl.int32)
    for start in tl.range(0, vocab_size, CHUNK, num_stages=3):
        token = start + tl.arange(0, CHUNK)
        x = tl.load(at + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        is_in = (_key(x, SHIFT) == key) & (token < vocab_size)
        if key == last_key:
            is_in = is_in & (token <= last_id)
        num_low += (is_in & (token <= low)).to(tl.int32)
        num_middle += (is_in & (token <= middle)).to(tl.int32)
        num_high += (is_in & (token <= high)).to(tl.int32)
    return tl.sum(num_low, axis=0), tl.sum(num_middle, axis=0), tl.sum(num_high, axis=0)


@triton.jit
def _end_of_prefix(
    at,
    vocab_size,
    top,
    temperature,
    least,
    last_key,
    last_id,
    wanted,
    WEIGHTS: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """(key, id) of the last id that is taken, in the order of the candidates, until `wanted` of them, or of their weight, are.

    What is `low` or more has as much, what is `high` or more has not: a pass looks at three keys between them, and leaves a quarter.
    """
    low = tl.zeros((), tl.int64) + (_LEAST_KEY >> SHIFT)
    high = _key(top, SHIFT).to(tl.int64) + 1
    above = tl.zeros((), tl.float32)
    amount = above + wanted
    while high - low > 1:
        first, second = low + ((high - low + 3) >> 2), low + ((2 * (high - low) + 3) >> 2)
        third = low + ((3 * (high - low) + 3) >> 2)
        of_first, of_second, of_third = _sums_over(
            at, vocab_size, top, temperature, least, last_key, last_id,
            first.to(tl.int32), second.to(tl.int32), third.to(tl.int32), WEIGHTS, SHIFT, CHUNK,
        )  # fmt: skip
        if of_third >= wanted:
            low, amount = third, of_third
        elif of_second >= wanted:
            low, amount, high, above = second, of_second, third, of_third
        elif of_first >= wanted:
            low, amount, high, above = first, of_first, second, of_second
        else:
            high, above = first, of_first
    key = low.to(tl.int32)
    last = tl.zeros((), tl.int32) + _LAST_ID
    num_alike, _, _ = _counts_of_alike(
        at, vocab_size, last_key, last_id, key, last, last, last, SHIFT, CHUNK
    )
    # Of those that are alike the first ones, at least one.
    num_alike = tl.maximum(num_alike, 1)
    each = tl.maximum((amount - above) / num_alike.to(tl.float32), 1.2e-38)
    count = tl.maximum(tl.ceil((wanted - above) / each), 1.0)
    if count < num_alike.to(tl.float32):
        before, last = tl.zeros((), tl.int32) - 1, tl.zeros((), tl.int32) + vocab_size - 1
        while last - before > 1:
            first, second = before + ((last - before + 3) >> 2), before + ((last - before + 1) >> 1)
            third = before + ((3 * (last - before) + 3) >> 2)
            of_first, of_second, of_third = _counts_of_alike(
                at, vocab_size, last_key, last_id, key, first, second, third, SHIFT, CHUNK
            )
            if of_first.to(tl.float32) >= count:
                last = first
            elif of_second.to(tl.float32) >= count:
                before, last = first, second
            elif of_third.to(tl.float32) >= count:
                before, last = second, third
            else:
                before = third
    return key, last


@triton.jit
def _limit_row(
    logits,
    temperatures,
    min_p,
    top_k,
    top_p,
    largest,
    total,
    last_keys,
    last_ids,
    limited,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    top, is_good, _ = _row_figures(largest, total, row, num_chunks, CHUNKS)
    temperature, floor = tl.load(temperatures + row), tl.load(min_p + row)
    most, share = tl.load(top_k + row), tl.load(top_p + row)
    has_limit = (most > 0) | (share < 1.0)
    tl.store(limited + row, tl.where((floor > 0.0) | has_limit, 1, 0))
    last_key = tl.zeros((), tl.int32) + (_LEAST_KEY >> SHIFT)
    last_id = tl.zeros((), tl.int32) + _LAST_ID
    if is_good & has_limit & (temperature > 0.0):
        at, least = logits + row.to(tl.int64) * vocab_size, _least_log(floor)
        if most > 0:
            num_candidates, _, _ = _sums_over(
                at, vocab_size, top, temperature, least, last_key, last_id,
                last_key, last_key, last_key, False, SHIFT, CHUNK,
            )  # fmt: skip
            if num_candidates > most.to(tl.float32):
                last_key, last_id = _end_of_prefix(
                    at, vocab_size, top, temperature, least, last_key, last_id,
                    most.to(tl.float32), False, SHIFT, CHUNK,
                )  # fmt: skip
        if share < 1.0:
            weight, _, _ = _sums_over(
                at, vocab_size, top, temperature, least, last_key, last_id,
                last_key, last_key, last_key, True, SHIFT, CHUNK,
            )  # fmt: skip
            last_key, last_id = _end_of_prefix(
                at, vocab_size, top, temperature, least, last_key, last_id,
                share * weight, True, SHIFT, CHUNK,
            )  # fmt: skip
    tl.store(last_keys + row, last_key)
    tl.store(last_ids + row, last_id)


@triton.jit
def philox_words(seed, position, number, DOMAIN: tl.constexpr):
    """The two random words of philox.uniforms(seed, position, number, domain)."""
    zero = tl.zeros_like(number)
    high, low, _, _ = tl.philox(seed, number, zero + position, zero + DOMAIN, zero)
    return high, low


@triton.jit
def gumbel(seed, position, number, DOMAIN: tl.constexpr):
    """Gumbel variates of philox.gumbels(seed, position, number, domain) in float32.

    -log(-log(u)) loses u's upper tail in float32, where the winners come from: there 1 - u, exact from the complement of the
    bits, goes through the series of -log(1 - v) instead, whose first dropped term is below 2**-27.
    """
    high, low = philox_words(seed, position, number, DOMAIN)
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
def _log_weights(
    logits,
    row,
    token,
    vocab_size,
    top,
    temperature,
    min_p,
    last_keys,
    last_ids,
    SHIFT: tl.constexpr,
):
    """(logit - largest) / temperature of some ids of a row, -inf for those that a limit leaves out or that do not exist."""
    at = logits + row.to(tl.int64) * vocab_size + token
    x = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    least, last_key = _least_log(tl.load(min_p + row)), tl.load(last_keys + row)
    keys, weight = _key(x, SHIFT), (x - top) / temperature
    is_kept = (keys > last_key) | ((keys == last_key) & (token <= tl.load(last_ids + row)))
    return tl.where(is_kept & (weight >= least), weight, float("-inf"))


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
    bucket_score,
    bucket_id,
    num_kept,
    last_keys,
    last_ids,
    limited,
    vocab_size,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BUCKET: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    top, is_good, _ = _row_figures(largest, total, row, num_chunks, CHUNKS)
    if is_good:
        PER_CHUNK: tl.constexpr = CHUNK // BUCKET
        place = row * num_chunks + chunk
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.uint32)
            x = _log_weights(
                logits, row, token, vocab_size, top, temperature, min_p, last_keys, last_ids, SHIFT
            )
            mass = tl.sum(tl.reshape(tl.exp(x), (PER_CHUNK, BUCKET)), axis=1)
            bucket = chunk * PER_CHUNK + tl.arange(0, PER_CHUNK)
            drawn = tl.log(mass) + gumbel(seed, position, bucket.to(tl.uint32), _BUCKETS)
            drawn = tl.where(mass > 0.0, drawn, float("-inf"))
            most, index = tl.max(
                drawn, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            tl.store(bucket_score + place, most)
            tl.store(bucket_id + place, chunk * PER_CHUNK + index)
            if tl.load(limited + row) > 0:
                # It may keep so few that each has a number of its own.
                tl.store(num_kept + place, tl.sum((x > float("-inf")).to(tl.int32), axis=0))
                each = x + gumbel(seed, position, token.to(tl.uint32), _TOKEN)
                best, index = tl.max(
                    each, axis=0, return_indices=True, return_indices_tie_break_left=True
                )
                tl.store(score + place, best)
                tl.store(token_id + place, chunk * CHUNK + index)
        else:
            at = logits + row.to(tl.int64) * vocab_size + token
            x = tl.load(at, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(score + place, best)
            tl.store(token_id + place, chunk * CHUNK + index)


@triton.jit
def _best_of_row(
    logits,
    temperatures,
    min_p,
    seeds,
    positions,
    largest,
    total,
    score,
    token_id,
    bucket_score,
    bucket_id,
    num_kept,
    last_keys,
    last_ids,
    limited,
    out_ids,
    out_logprobs,
    failed,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
    BUCKET: tl.constexpr,
):
    row = tl.program_id(0)
    top, is_good, sums = _row_figures(largest, total, row, num_chunks, CHUNKS)
    tl.store(failed + row, tl.where(is_good, 0, 1))
    if is_good:
        chunk = tl.arange(0, CHUNKS)
        inside, places = chunk < num_chunks, row * num_chunks + chunk
        temperature = tl.load(temperatures + row)
        by_bucket = temperature > 0.0
        if by_bucket & (tl.load(limited + row) > 0):
            by_bucket = tl.sum(tl.load(num_kept + places, mask=inside, other=0), axis=0) > _HEAD
        if by_bucket:
            each = tl.load(bucket_score + places, mask=inside, other=float("-inf"))
            _, index = tl.max(each, axis=0, return_indices=True, return_indices_tie_break_left=True)
            first = tl.load(bucket_id + row * num_chunks + index) * BUCKET
            member = first + tl.arange(0, BUCKET)
            seed, position = tl.load(seeds + row), tl.load(positions + row).to(tl.uint32)
            x = _log_weights(
                logits, row, member, vocab_size, top, temperature, min_p, last_keys, last_ids, SHIFT
            )
            drawn = x + gumbel(seed, position, member.to(tl.uint32), _TOKEN)
            _, index = tl.max(
                drawn, axis=0, return_indices=True, return_indices_tie_break_left=True
            )
            token = first + index
        else:
            each = tl.load(score + places, mask=inside, other=float("-inf"))
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
    top_k: Tensor,
    top_p: Tensor,
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
    shift = {"SHIFT": 16 if logits.dtype == torch.bfloat16 else 0}
    buckets = {**shift, **chunks, "BUCKET": BUCKET}
    s = scratch
    grid, limits = (rows, num_chunks), (s.last_key, s.last_id, s.limited)
    launch.run(_chunk_figures, grid, (logits, s.largest, s.total, vocab_size), chunk, num_warps=8)
    asked = (logits, temperatures, min_p, top_k, top_p, s.largest, s.total)
    launch.run(
        _limit_row,
        (rows,),
        (*asked, *limits, vocab_size, num_chunks),
        {**shift, **chunks, "CHUNK": LIMIT_CHUNK},
        num_warps=8,
    )
    draws = (logits, temperatures, min_p, seeds, positions, s.largest, s.total)
    bests = (s.score, s.token_id, s.bucket_score, s.bucket_id, s.num_kept)
    launch.run(
        _chunk_best, grid, (*draws, *bests, *limits, vocab_size), {**chunk, **buckets}, num_warps=8
    )
    results = (out_ids, out_logprobs, failed)
    launch.run(
        _best_of_row,
        (rows,),
        (*draws, *bests, *limits, *results, vocab_size, num_chunks),
        buckets,
        num_warps=1,
    )
