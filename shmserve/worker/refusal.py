"""What in a request no runner could compute, though its record is whole.

Owns: the bounds that the worker itself lives by: an id outside the vocabulary, or a number that no column holds, would end the
process and with it everybody's requests. Never: repeats the front end's checks for the client's sake; what is found here is
a front end's fault. Worker's main thread only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shmserve.request import MOST_LOGPROBS
from shmserve.stop_regex import StopRegexError, compile_stop
from shmserve.wire.submit import Submit

_MOST = 2**31 - 1  # what an i4 column holds


def fault_of(request: Submit, vocab_size: int) -> str | None:
    """Why `request` cannot be served, for its MESSAGE; None if it can."""
    prompt, params = request.prompt_ids, request.params
    if not len(prompt) or int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        return f"prompt token ids must be 0 to {vocab_size - 1}, and at least one"
    try:
        for pattern in params.stop_regex:
            compile_stop(pattern)
    except StopRegexError as error:
        return f"stop_regex: {error}"
    if not _are_ids(params.stop_token_ids, vocab_size):
        return f"stop token ids must be 0 to {vocab_size - 1}"
    if not _are_ids((token_id for token_id, _ in params.logit_bias), vocab_size):
        return f"token ids of logit_bias must be 0 to {vocab_size - 1}"
    if not _are_ids(params.allowed_token_ids, vocab_size):
        return f"allowed_token_ids must be 0 to {vocab_size - 1}"
    if not all(word and _are_ids(word, vocab_size) for word in params.bad_words):
        return f"token ids of bad_words must be 0 to {vocab_size - 1}, and at least one a word"
    if not 1 <= params.max_tokens <= _MOST or params.min_tokens > _MOST:
        return f"max_tokens must be 1 to {_MOST}, min_tokens at most that"
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
        *(bias for _, bias in params.logit_bias),
    )
    if not all(map(math.isfinite, numbers)):
        return "sampling parameters must be finite numbers"
    if params.repetition_penalty <= 0:
        return "repetition_penalty must be above 0"
    if params.temperature < 0 or params.top_k < 0:
        return "temperature and top_k must be 0 or more"
    if not (0 <= params.top_p <= 1 and 0 <= params.min_p <= 1):
        return "top_p and min_p must be 0 to 1"
    # One number too large here would take all memory, not only this request's.
    if not (
        -1 <= params.num_logprobs <= MOST_LOGPROBS and -1 <= params.prompt_logprobs <= MOST_LOGPROBS
    ):
        return f"logprobs must be -1 to {MOST_LOGPROBS}"
    return None


def _are_ids(ids: Iterable[int], vocab_size: int) -> bool:
    return all(0 <= token_id < vocab_size for token_id in ids)
