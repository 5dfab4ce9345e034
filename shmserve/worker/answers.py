"""The slots in which the engine answers: STARTED and FINISH of a sequence, and FINISH of what is no sequence.

Owns: which field says what. Never: touches a ring, or frees anything. Pure functions of the moment they are told.
"""

from __future__ import annotations

from shmserve.request import FinishReason
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.tokens import TokenKind
from shmserve.worker.columns import Columns
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import Ending

NOT_FINITE = "the model's logits were not finite"
NOTHING_LEFT = NOT_FINITE + ", or the request's limits left no token to choose from"


def state_of(
    kind: TokenKind, sequence: Sequence, columns: Columns, *, step: int, now_ns: int, ending: Ending
) -> bytes:
    """STARTED or FINISH: what is known of the sequence now."""
    num_prompt = sequence.num_prompt_tokens
    if sequence.row >= 0:
        num_output = int(columns.num_tokens[sequence.row]) - num_prompt
    else:
        num_output = max(0, len(sequence.token_ids) - num_prompt)
    return pack_finish(
        kind,
        sequence.req_id,
        time_ns=now_ns,
        step=step,
        finish=ending.reason,
        completion_tokens=num_output,
        prompt_tokens=num_prompt,
        cached_tokens=sequence.cached_tokens,
        num_retractions=sequence.num_retractions,
        keep_bytes=ending.keep_bytes,
        matched_token=ending.matched_token,
        matched_stop=ending.matched_stop,
        stamps=sequence.stamps(),
        guesses=_guesses_of(sequence, columns),
    )


def _guesses_of(sequence: Sequence, columns: Columns) -> tuple[int, int, int]:
    """Of one that speculates: steps that verified guesses, guesses, right ones; the newest step included."""
    guesser, row = sequence.guesser, sequence.row
    if guesser is None:
        return (0, 0, 0)
    if guesser.num_guessed and row >= 0:  # without a row it was judged when it was preempted
        newest = columns.token_ids[row, guesser.num_tokens : int(columns.num_tokens[row])]
        if len(newest):
            guesser.follow(newest.tolist())
    return (guesser.num_verified, guesser.num_drafts, guesser.num_accepted)


def end_of(
    sequence: Sequence, columns: Columns, *, step: int, now_ns: int, ending: Ending
) -> bytes:
    """FINISH, behind a MESSAGE that says what is wrong if something is."""
    unit = state_of(TokenKind.FINISH, sequence, columns, step=step, now_ns=now_ns, ending=ending)
    if ending.reason is not FinishReason.ERROR:
        return unit
    params = sequence.params
    is_limited = params.grammar or params.allowed_token_ids or params.bad_words
    fault = ending.fault or (NOTHING_LEFT if is_limited else NOT_FINITE)
    return pack_message(sequence.req_id, fault, time_ns=now_ns) + unit


def refusal_of(req_id: int, fault: str, *, step: int, now_ns: int) -> bytes:
    """MESSAGE and FINISH for a request of which nothing is known but its id."""
    return pack_message(req_id, fault, time_ns=now_ns) + pack_finish(
        TokenKind.FINISH, req_id, time_ns=now_ns, step=step, finish=FinishReason.ERROR
    )


def acknowledgement_of(req_id: int, count: int, *, step: int, now_ns: int) -> bytes:
    """FINISH under the id of a control record, with what it has counted."""
    return pack_finish(
        TokenKind.FINISH,
        req_id,
        time_ns=now_ns,
        step=step,
        finish=FinishReason.LENGTH,
        matched_token=count,
    )
