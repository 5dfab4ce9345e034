"""A recording, decoded: the records of each ring, and the requests that were in flight with how far each had come.

Owns: what a slot is called and which of its fields are shown. Never: attaches to anything (`recording.py` does), prints
(`dump_output.py` does), or shows what a client wrote: ids, counts and times. Commands only.

Two sources say what was in flight: the front ends' rosters, which are exact, and where no front end's board was recorded, the rings:
who has records and no FINISH, or a SUBMIT that is younger than what the token ring still holds and no FINISH.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shmserve.recording import Recording, ring_place
from shmserve.request import FinishReason
from shmserve.rings.observe import RingCopy
from shmserve.wire.finish import unpack_finish, unpack_message
from shmserve.wire.submit_slots import SubmitHead, SubmitKind, peek_submit
from shmserve.wire.tokens import (
    FLAG_LAST_IS_STOP,
    TOKEN_SLOT_BYTES,
    TOKENS_DTYPE,
    TOKENS_PER_SLOT,
    TokenKind,
)

_FINISHED: Final = "finished"


@dataclass(slots=True)
class RequestState:
    """How far one request had come. Times are CLOCK_MONOTONIC ns, 0 where the rings do not tell (any more); indices -1."""

    req_id: int
    http: int
    worker: int
    arrival_ns: int = 0
    submitted_ns: int = 0
    prompt_tokens: int = -1
    max_tokens: int = -1
    has_submit: bool = False  # its SUBMIT is in the ring
    is_submit_unread: bool = False
    is_older: bool = False  # than what the token ring still holds
    started_ns: int = 0
    last_index: int = -1  # of its newest token in the ring
    last_token_ns: int = 0
    num_unread_records: int = 0
    asked: str = ""  # the last ABORT, PAUSE or RESUME
    finish: int = 0
    finish_ns: int = 0
    is_in_roster: bool = False

    @property
    def state(self) -> str:
        if self.finish:
            return _FINISHED
        if self.asked in ("abort", "pause"):
            return {"abort": "aborting", "pause": "paused"}[self.asked]
        if self.last_index >= 0:
            return "decoding"
        if self.started_ns:
            return "started"
        if self.has_submit and not self.is_older:
            return "unread" if self.is_submit_unread else "waiting"
        return "unknown"  # it waits outside its ring, or all its records are overwritten


@dataclass(frozen=True, slots=True)
class Requests:
    """`in_flight` by the time of their arrival. `is_exact`: by the front ends' rosters."""

    in_flight: tuple[RequestState, ...]
    is_exact: bool


def requests_of(recording: Recording) -> Requests:
    """Which requests were in flight; at a child's death, those of that child."""
    states: dict[int, RequestState] = {}
    rosters = [board for board in recording.boards if board.role == "http"]
    for board in rosters:
        for row in board.requests:
            state = RequestState(row["req_id"], board.index, row["worker"], is_in_roster=True)
            state.arrival_ns, state.submitted_ns = row["arrival_ns"], row["submitted_ns"]
            state.prompt_tokens = row["prompt_tokens"]
            states[state.req_id] = state
    oldest_ns: dict[tuple[int, int, int], int] = {}  # by channel: who has no record may be older
    for ring in recording.rings:
        epoch, http, worker, kind = ring_place(ring.name)
        if kind == "tokens":
            oldest_ns[epoch, http, worker] = _read_tokens(ring, http, worker, states)
    for ring in recording.rings:
        epoch, http, worker, kind = ring_place(ring.name)
        if kind == "submit":
            _read_submits(ring, http, worker, oldest_ns.get((epoch, http, worker), 0), states)
    since = {(http, worker): oldest for (_, http, worker), oldest in oldest_ns.items()}
    for state in states.values():
        state.is_older = state.submitted_ns < since.get((state.http, state.worker), 0)
    found = [state for state in states.values() if _is_in_flight(state, bool(rosters))]
    death = recording.death
    if death is not None:
        found = [
            s for s in found if (s.worker if death.role == "worker" else s.http) == death.index
        ]
    found.sort(key=lambda state: (state.arrival_ns or state.submitted_ns, state.req_id))
    return Requests(tuple(found), bool(rosters))


def _is_in_flight(state: RequestState, is_exact: bool) -> bool:
    return state.is_in_roster if is_exact else not state.finish


def _read_tokens(ring: RingCopy, http: int, worker: int, states: dict[int, RequestState]) -> int:
    """Note what each record says of its request; the time of the oldest that is left, 0 if all are."""
    records = np.frombuffer(ring.slots, TOKENS_DTYPE)
    columns = [records[name].tolist() for name in ("req_id", "kind", "index", "count", "finish")]
    handled = ring.words["read_cursor"]
    for at, (req_id, kind, index, count, finish) in enumerate(zip(*columns, strict=True)):
        if kind not in (TokenKind.TOKENS, TokenKind.STARTED, TokenKind.FINISH):
            continue
        state = states.setdefault(req_id, RequestState(req_id, http, worker))
        state.num_unread_records += ring.first + at >= handled
        if kind == TokenKind.TOKENS:
            state.last_index = max(state.last_index, index + min(count, TOKENS_PER_SLOT) - 1)
            state.last_token_ns = int(records["time_ns"][at])
            if count > 1:
                later_us = int(records["dt_us"][at, min(count, TOKENS_PER_SLOT) - 1])
                state.last_token_ns += later_us * 1000
        else:
            whole = unpack_finish(ring.slot(at))
            state.prompt_tokens = whole.prompt_tokens
            if kind == TokenKind.FINISH:
                state.finish, state.finish_ns = finish or FinishReason.ERROR, whole.time_ns
            else:
                state.started_ns = whole.time_ns
    return int(records["time_ns"][0]) if ring.first and len(records) else 0


def _read_submits(
    ring: RingCopy, http: int, worker: int, oldest_ns: int, states: dict[int, RequestState]
) -> None:
    handled = ring.words["read_cursor"]
    for at in range(ring.num_slots):
        head = peek_submit(ring.slot(at))
        if head.kind == SubmitKind.SUBMIT:
            if head.req_id not in states and head.time_ns < oldest_ns:
                continue  # finished so long ago that its FINISH is overwritten, for all that can be known
            state = states.setdefault(head.req_id, RequestState(head.req_id, http, worker))
            state.has_submit, state.submitted_ns = True, head.time_ns
            state.prompt_tokens = max(state.prompt_tokens, head.prompt_tokens)
            state.max_tokens = head.max_tokens
            state.is_submit_unread = ring.first + at >= handled
        elif head.req_id in states and head.kind in _ASKED:
            states[head.req_id].asked = _ASKED[head.kind]


_ASKED: Final = {
    int(kind): kind.name.lower() for kind in (SubmitKind.ABORT, SubmitKind.PAUSE, SubmitKind.RESUME)
}


# --- records


@dataclass(frozen=True, slots=True)
class Record:
    """One slot. `time_ns` is 0 for a slot without a time; `fields` are what its kind has, by name, as JSON has it."""

    cursor: int
    slot: int
    is_handled: bool
    kind: str
    req_id: int
    time_ns: int
    fields: dict[str, Any]


def records_of(ring: RingCopy, last: int = 0) -> Iterator[Record]:
    """The last `last` records of a ring, 0 for all, oldest first."""
    is_tokens = ring.slot_size == TOKEN_SLOT_BYTES
    first = max(0, ring.num_slots - last) if last else 0
    for at in range(first, ring.num_slots):
        cursor = ring.first + at
        slot = ring.slot(at)
        kind, req_id, time_ns, fields = _token_record(slot) if is_tokens else _submit_record(slot)
        is_handled = cursor < ring.words["read_cursor"]
        place = cursor & (ring.capacity - 1)
        yield Record(cursor, place, is_handled, kind, req_id, time_ns, fields)


def torn_cursors(ring: RingCopy) -> range:
    """Slots that were claimed and not whole: torn for ever if the ring has no producer, being written if it has."""
    written = ring.words["write_cursor"]
    return range(written, written + ring.num_torn)


def _kind_name(kinds: type[TokenKind] | type[SubmitKind], kind: int) -> str:
    try:
        return kinds(kind).name.lower()
    except ValueError:
        return f"unknown {kind}"


def _token_record(slot: bytes) -> tuple[str, int, int, dict[str, Any]]:
    record = np.frombuffer(slot, TOKENS_DTYPE)[0]
    kind = int(record["kind"])
    fields: dict[str, Any] = {"index": int(record["index"]), "step": int(record["step"])}
    if kind == TokenKind.TOKENS:
        count = min(int(record["count"]), TOKENS_PER_SLOT)
        fields["count"] = count
        fields["token_ids"] = record["token_ids"][:count].tolist()
        fields["offsets_us"] = [0, *record["dt_us"][1:count].tolist()][:count]
        fields["publish_delay_us"] = int(record["dt_us"][0])
        if record["flags"] & FLAG_LAST_IS_STOP:
            fields["last_is_stop"] = True
    elif kind in (TokenKind.STARTED, TokenKind.FINISH):
        whole = unpack_finish(slot)
        del fields["index"]
        fields["completion_tokens"] = whole.completion_tokens
        fields["prompt_tokens"] = whole.prompt_tokens
        fields["cached_tokens"] = whole.cached_tokens
        fields["num_retractions"] = whole.num_retractions
        if kind == TokenKind.FINISH:
            fields["finish"] = finish_name(whole.finish)
        for name in ("received_ns", "admitted_ns", "scheduled_ns", "prefill_end_ns"):
            fields[name] = getattr(whole, name)
    elif kind == TokenKind.MESSAGE:
        fields = {"part": fields["index"], "text": unpack_message(slot)}
    else:
        fields["count"] = int(record["count"])
    return _kind_name(TokenKind, kind), int(record["req_id"]), int(record["time_ns"]), fields


def _submit_record(slot: bytes) -> tuple[str, int, int, dict[str, Any]]:
    head = peek_submit(slot)
    return _kind_name(SubmitKind, head.kind), head.req_id, head.time_ns, _submit_fields(head)


def _submit_fields(head: SubmitHead) -> dict[str, Any]:
    if head.kind == SubmitKind.CONTINUATION:
        return {"number": head.num_slots}
    if head.kind != SubmitKind.SUBMIT:
        return {}
    return {
        "num_slots": head.num_slots,
        "prompt_tokens": head.prompt_tokens,
        "max_tokens": head.max_tokens,
    }


def finish_name(finish: int) -> str:
    try:
        return FinishReason(finish).name.lower()
    except ValueError:
        return f"unknown {finish}"
