"""Philox4x32-10, the counter-based generator of Salmon et al. (2011), and uniforms drawn from it.

Owns: random numbers that are a pure function of (seed, position, token id). Never: holds state, so a draw does not depend on
what was drawn before, on the batch or on the order of rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U4 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint64]
F8 = npt.NDArray[np.float64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

DOMAIN_TOKEN = 0
DOMAIN_BUCKET = 1


def philox4x32(counter: tuple[U8, U8, U8, U8], key: tuple[U8, U8]) -> tuple[U8, U8, U8, U8]:
    """Four 32-bit words for each counter; all words, in and out, are u64 arrays below 2**32 of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & _LOW, (k1 + np.uint64(_KEY_STEPS[1])) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: U8, positions: U8, token_ids: U8, domain: int = DOMAIN_TOKEN) -> F8:
    """Uniforms in (0, 1), 52 bits each, one for each (seed, position, token id); the arguments broadcast.

    The counter is (token id, position, domain, 0). `domain` keeps draws for other purposes apart.
    """
    seeds, positions, token_ids = np.broadcast_arrays(seeds, positions, token_ids)
    zero = np.zeros(token_ids.shape, np.uint64)
    counter = (token_ids, positions, zero + np.uint64(domain), zero)
    high, low, _, _ = philox4x32(counter, (seeds & _LOW, seeds >> _HALF))
    # 52 bits, not 53: the half step that keeps 0 out would round the largest value to 1.
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    result: F8 = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return result


def gumbels(seeds: U8, positions: U8, token_ids: U8, domain: int = DOMAIN_TOKEN) -> F8:
    """Standard Gumbel variates; the largest of log-weight + Gumbel is a draw in proportion to the weights."""
    result: F8 = -np.log(-np.log(uniforms(seeds, positions, token_ids, domain)))
    return result
