"""How a decoded recording is shown: as text for people, as one JSON object for programs.

Owns: the words and columns. Never: reads a slot (`dump.py` does). Text of tokens and prompts only where a `TokenText` is given, and
then with everything that a terminal could obey or hide escaped. Commands only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from shmserve.boards import label_of
from shmserve.dump import (
    Record,
    Requests,
    RequestState,
    finish_name,
    records_of,
    requests_of,
    torn_cursors,
)
from shmserve.models import PreparedModel
from shmserve.recording import BoardCopy, Recording, ring_place
from shmserve.rings.observe import RingCopy
from shmserve.wire.errors import WireError
from shmserve.wire.submit import unpack_submit
from shmserve.wire.submit_slots import peek_submit

_MOST_TEXT: Final = 2_000  # characters of a prompt or a record


class TokenText:
    """Text of token ids, by the bytes of a prepared model."""

    def __init__(self, model_folder: str) -> None:
        """Raises ModelError."""
        self._table = PreparedModel.load(Path(model_folder)).token_bytes().table()

    def of(self, token_ids: Sequence[int]) -> str:
        """A quoted string: bytes that are no characters, and characters that are not printable, are escaped."""
        known = range(len(self._table))
        data = b"".join(self._table[i] if i in known else b"<?>" for i in token_ids)
        text = data.decode(errors="backslashreplace")
        return repr(text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + " ...")


# --- JSON


def to_json(recording: Recording, last: int, text: TokenText | None = None) -> dict[str, Any]:
    """Everything; `last` records of each ring, 0 for all. Times `*_ns` are CLOCK_MONOTONIC, `taken_at` is since 1970."""
    requests = requests_of(recording)
    return {
        "instance": recording.instance,
        "model": recording.model,
        "taken_at": recording.taken_at,
        "taken_ns": recording.taken_ns,
        "death": asdict(recording.death) if recording.death else None,
        "in_flight_is_exact": requests.is_exact,
        "in_flight": [_request_json(state) for state in requests.in_flight],
        "rings": [_ring_json(ring, recording, last, text) for ring in recording.rings],
        "boards": [
            {"name": b.name, "role": b.role, "index": b.index, "epoch": b.epoch, "words": b.words}
            for b in recording.boards
        ],
    }


def _request_json(state: RequestState) -> dict[str, Any]:
    row = asdict(state)
    del row["req_id"], row["is_in_roster"], row["is_older"]
    finish = finish_name(state.finish) if state.finish else ""
    return {"id": f"{state.req_id:016x}", "state": state.state} | row | {"finish": finish}


def _ring_json(
    ring: RingCopy, recording: Recording, last: int, text: TokenText | None
) -> dict[str, Any]:
    epoch, http, worker, kind = ring_place(ring.name)
    records = list(records_of(ring, last))
    texts = _texts_of(ring, records, recording, text)
    return {
        "name": ring.name,
        "kind": kind,
        "epoch": epoch,
        "http": http,
        "worker": worker,
        "slot_size": ring.slot_size,
        "capacity": ring.capacity,
        "has_producer": ring.has_producer,
        "has_consumer": ring.has_consumer,
        **ring.words,
        "claimed": [
            {"cursor": c, "slot": c & (ring.capacity - 1), "is_torn": not ring.has_producer}
            for c in torn_cursors(ring)
        ],
        "records": [
            {
                "cursor": record.cursor,
                "slot": record.slot,
                "is_handled": record.is_handled,
                "kind": record.kind,
                "id": f"{record.req_id:016x}",
                "time_ns": record.time_ns,
                **record.fields,
                **({"text": texts[record.cursor]} if record.cursor in texts else {}),
            }
            for record in records
        ],
    }


def _texts_of(
    ring: RingCopy, records: Sequence[Record], recording: Recording, text: TokenText | None
) -> dict[int, str]:
    """Texts of records, by their cursor: of tokens, and of prompts where what clients sent was recorded."""
    if text is None:
        return {}
    texts = {}
    for record in records:
        if "token_ids" in record.fields:
            texts[record.cursor] = text.of(record.fields["token_ids"])
        elif record.kind == "submit" and recording.has_contents:
            prompt = _prompt_of(ring, record.cursor - ring.first)
            if prompt is not None:
                texts[record.cursor] = text.of(prompt)
    return texts


def _prompt_of(ring: RingCopy, at: int) -> list[int] | None:
    """The prompt's ids of the SUBMIT at slot `at` of the copy; None if it is not whole."""
    num_slots = peek_submit(ring.slot(at)).num_slots
    slots = [ring.slot(i) for i in range(at, min(at + num_slots, ring.num_slots))]
    try:
        ids: list[int] = unpack_submit(slots).prompt_ids.tolist()
    except WireError:
        return None
    return ids


# --- text


def to_text(recording: Recording, last: int, text: TokenText | None = None) -> str:
    """The same for people."""
    requests = requests_of(recording)
    lines = [*_head_lines(recording), "", *_request_lines(requests, recording.taken_ns)]
    for ring in recording.rings:
        lines += ["", *_ring_lines(ring, recording, last, text)]
    return "\n".join(lines)


def _head_lines(recording: Recording) -> Iterator[str]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.taken_at))
    millis = int(recording.taken_at % 1 * 1000)
    what = f"instance {recording.instance}, at {at}.{millis:03}"
    if (death := recording.death) is not None:
        yield f"{what}: {death.role} {death.index} (pid {death.pid}) died: {death.reason}"
    else:
        yield what
    for board in recording.boards:
        yield f"  {board.role} {board.index}: {_board_line(board, recording.taken_ns)}"
    if recording.num_missing:
        yield f"  {recording.num_missing} of its segments could not be read"


def _board_line(board: BoardCopy, now_ns: int) -> str:
    words = board.words
    parts = [f"pid {words.get('pid', 0)}, epoch {board.epoch}"]
    if "phase" in words:
        parts.append(label_of(words["phase"]))
    if "step" in words:
        run, wait = words.get("running", 0), words.get("waiting", 0)
        parts.append(f"step {words['step']}, {run} run, {wait} wait")
    if "in_flight" in words:
        parts.append(f"{words['in_flight']} in flight, {words.get('connections', 0)} connections")
    parts.append(f"heartbeat {_ago(words.get('heartbeat_ns', 0), now_ns)}")
    return ", ".join(parts)


def _request_lines(requests: Requests, now_ns: int) -> Iterator[str]:
    count = len(requests.in_flight)
    how = "" if requests.is_exact else " (by the rings alone: no front end's board was there)"
    yield f"{count} request{'' if count == 1 else 's'} in flight{how}{':' if count else ''}"
    if not count:
        return
    yield (
        f"  {'request':<16}  pair  {'arrived':>12}  prompt  {'tokens':>6}  {'last index':>10}  "
        f"{'last token':>12}  state"
    )
    for state in requests.in_flight:
        prompt = state.prompt_tokens if state.prompt_tokens >= 0 else "?"
        tokens, index = (
            ("?", "-") if state.last_index < 0 else (state.last_index + 1, state.last_index)
        )
        name = state.state
        if state.finish:
            name = f"finished ({finish_name(state.finish)})"
        if state.num_unread_records:
            name += f", {state.num_unread_records} records not read"
        yield (
            f"  {state.req_id:016x}  {f'{state.http}-{state.worker}':<4}  "
            f"{_ago(state.arrival_ns or state.submitted_ns, now_ns):>12}  {prompt:>6}  {tokens:>6}  "
            f"{index:>10}  {_ago(state.last_token_ns, now_ns):>12}  {name}"
        )


def _ring_lines(
    ring: RingCopy, recording: Recording, last: int, text: TokenText | None
) -> Iterator[str]:
    words = ring.words
    yield (
        f"ring {ring.name}: {ring.capacity} slots of {ring.slot_size} bytes, claimed {words['claim_cursor']}, "
        f"written {words['write_cursor']}, read {words['read_cursor']}, high water {words['high_water']}"
    )
    ends = [
        f"no {end}"
        for end, there in (("producer", ring.has_producer), ("consumer", ring.has_consumer))
        if not there
    ]
    counts = [
        f"{name} {words[name]}"
        for name in ("coalesced", "dropped", "refused", "pending")
        if words[name]
    ]
    if ends or counts:
        yield f"  {', '.join(ends + counts)}"
    records = list(records_of(ring, last))
    texts = _texts_of(ring, records, recording, text)
    if records and records[0].cursor > ring.first:
        yield f"  ... {records[0].cursor - ring.first} older records (--last 0 shows all)"
    for record in records:
        yield _record_line(record, recording.taken_ns, texts)
    torn = torn_cursors(ring)
    if torn:
        what = (
            "being written"
            if ring.has_producer
            else "TORN: claimed and not whole when their writer died"
        )
        yield f"  {torn[0]}..{torn[-1]}  {len(torn)} slots {what}"


def _record_line(record: Record, now_ns: int, texts: Mapping[int, str]) -> str:
    fields = [
        f"{name.removesuffix('_ns')} {_ago(value, now_ns)}"
        if name.endswith("_ns")
        else f"{name} {value}"
        for name, value in record.fields.items()
        if name not in ("token_ids", "offsets_us", "text") and (value or not name.endswith("_ns"))
    ]
    if "token_ids" in record.fields:
        ids = record.fields["token_ids"]
        offsets = record.fields["offsets_us"]
        fields.append("ids " + " ".join(map(str, ids)))
        if len(ids) > 1:
            fields.append("at +" + ",".join(map(str, offsets)) + " us")
    if "text" in record.fields:
        fields.append(repr(record.fields["text"]))
    if record.cursor in texts:
        fields.append(texts[record.cursor])
    mark = " " if record.is_handled else "*"  # not handled yet
    when = _ago(record.time_ns, now_ns)
    return f" {mark}{record.cursor:>8}  {when:>12}  {record.kind:<12}  {record.req_id:016x}  {', '.join(fields)}"


def _ago(then_ns: int, now_ns: int) -> str:
    """A moment as its distance from the recording's: "-12.345 ms"."""
    if not then_ns:
        return "-"
    ms = (then_ns - now_ns) / 1e6
    return f"{ms:+.3f} ms" if abs(ms) < 1e4 else f"{ms / 1e3:+.3f} s"
