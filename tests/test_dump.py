"""Recordings, decoded: which requests were in flight, how far each had come, what is torn, and what is never shown."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.boards import http_board
from shmserve.dump import RequestState, records_of, requests_of, torn_cursors
from shmserve.dump_output import TokenText, to_json, to_text
from shmserve.recording import Death, Recording, instances_in_memory, take
from shmserve.request import FinishReason, SamplingParams
from shmserve.rings import layout as L
from shmserve.rings.board import Board
from shmserve.rings.channel import Channel, RingShape
from shmserve.rings.segment import SegmentError, names, unlink
from shmserve.token_bytes import TokenBytes
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, SubmitKind, pack_control, without_contents
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TOKENS_DTYPE, TokenKind

_numbers = itertools.count()
SECRET = "the colour of my house"


class Rings:
    """An instance of one channel and one front end's board, written by hand. `now` is in ms, like all times here."""

    def __init__(self, token_slots: int = 64, with_board: bool = True) -> None:
        self.instance = f"testdump{os.getpid()}-{next(_numbers)}"
        self.began_ns = time.monotonic_ns() - 10_000_000_000
        self.channel = Channel.create(
            self.instance,
            3,
            0,
            1,
            RingShape(SUBMIT_SLOT_BYTES, 16),
            RingShape(TOKEN_SLOT_BYTES, token_slots),
        )
        self.submits = self.channel.submit.producer()
        self.tokens = self.channel.tokens.producer()
        self.board: Board | None = None
        if with_board:
            name = Board.name(self.instance, 3, "http", 0)
            self.board = Board.create(name, http_board(8), 3)

    def ns(self, ms: int) -> int:
        return self.began_ns + ms * 1_000_000

    def submit(self, req_id: int, ms: int = 1, num_prompt_tokens: int = 3) -> None:
        params = SamplingParams(max_tokens=50, stop=(SECRET.encode(),))
        ids = np.arange(num_prompt_tokens, dtype=np.int32)
        request = Submit(req_id, ids, params, submitted_ns=self.ns(ms), cache_salt=SECRET.encode())
        record, num_slots = pack_submit(request)
        assert self.submits.try_write(record, num_slots)
        if self.board is not None:
            row = 1, self.ns(ms), self.ns(ms), num_prompt_tokens
            self.board.rosters["requests"].enter(req_id & 7, req_id, *row)

    def ask(self, req_id: int, kind: SubmitKind) -> None:
        assert self.submits.try_write(pack_control(kind, req_id, time_ns=self.ns(9)), 1)

    def tokens_of(self, req_id: int, index: int, ids: Sequence[int], ms: int = 5) -> bytes:
        record = np.zeros(1, TOKENS_DTYPE)
        record["req_id"], record["time_ns"], record["index"] = req_id, self.ns(ms), index
        record["kind"], record["count"] = TokenKind.TOKENS, len(ids)
        record["token_ids"][0, : len(ids)] = ids
        record["dt_us"][0, : len(ids)] = [17, *range(1000, 1000 * len(ids), 1000)]
        return record.tobytes()

    def emit(self, *slots: bytes) -> None:
        assert self.tokens.try_write(b"".join(slots), len(slots))

    def started(self, req_id: int, ms: int = 4) -> bytes:
        return pack_finish(
            TokenKind.STARTED, req_id, time_ns=self.ns(ms), step=1, prompt_tokens=3, finish=0
        )

    def finished(self, req_id: int, ms: int = 8) -> bytes:
        reason = FinishReason.LENGTH
        return pack_finish(
            TokenKind.FINISH, req_id, time_ns=self.ns(ms), step=9, finish=reason, prompt_tokens=3
        )

    def take(self) -> Recording:
        return take(self.instance)

    def state(self, req_id: int) -> RequestState:
        (found,) = [s for s in requests_of(self.take()).in_flight if s.req_id == req_id]
        return found

    def close(self) -> None:
        self.channel.unlink()
        self.channel.close()
        if self.board is not None:
            self.board.segment.unlink()
            self.board.close()


@pytest.fixture
def rings() -> Iterator[Rings]:
    made = Rings()
    yield made
    made.close()


@pytest.fixture
def bare_rings() -> Iterator[Rings]:
    """Without a board: only the rings can tell what was in flight."""
    made = Rings(with_board=False)
    yield made
    made.close()


def test_request_is_as_far_as_its_newest_token(rings: Rings) -> None:
    rings.submit(0x101)
    rings.emit(rings.started(0x101), rings.tokens_of(0x101, 0, [5]))
    rings.emit(rings.tokens_of(0x101, 1, [6, 7, 8], ms=6))
    state = rings.state(0x101)
    assert (state.last_index, state.state, state.worker, state.http) == (3, "decoding", 1, 0)
    assert state.last_token_ns == rings.ns(8)  # 2 ms behind the first of its record
    assert (state.prompt_tokens, state.max_tokens) == (3, 50)
    assert state.num_unread_records == 3


def test_states_follow_what_the_rings_say(rings: Rings) -> None:
    for req_id in (0x100, 0x101, 0x102, 0x103, 0x104, 0x105):
        rings.submit(req_id)
    consumer = rings.channel.submit.consumer()
    consumer.poll()
    consumer.release(5)  # all but the last
    rings.emit(rings.started(0x101), rings.started(0x102), rings.tokens_of(0x102, 0, [1]))
    rings.emit(rings.started(0x103), rings.finished(0x103))
    rings.ask(0x104, SubmitKind.ABORT)
    states = {s.req_id: s.state for s in requests_of(rings.take()).in_flight}
    assert states == {
        0x100: "waiting",
        0x101: "started",
        0x102: "decoding",
        0x103: "finished",  # its FINISH waits in the ring
        0x104: "aborting",
        0x105: "unread",
    }
    rings.ask(0x102, SubmitKind.PAUSE)
    assert rings.state(0x102).state == "paused"
    rings.ask(0x102, SubmitKind.RESUME)
    assert rings.state(0x102).state == "decoding"


def test_roster_decides_what_is_in_flight_whatever_old_records_say(rings: Rings) -> None:
    rings.submit(0x101)
    rings.emit(rings.tokens_of(0x777, 0, [1]))  # forgotten long since
    assert rings.board is not None
    requests = requests_of(rings.take())
    assert ([s.req_id for s in requests.in_flight], requests.is_exact) == ([0x101], True)
    rings.board.rosters["requests"].leave(0x101 & 7)
    assert requests_of(rings.take()).in_flight == ()


def test_without_a_board_the_rings_tell_who_has_not_finished(bare_rings: Rings) -> None:
    rings = bare_rings
    for req_id in (0x100, 0x101, 0x102):
        rings.submit(req_id)
    rings.emit(rings.started(0x101), rings.tokens_of(0x101, 0, [1]), rings.finished(0x101))
    rings.emit(rings.started(0x102), rings.tokens_of(0x102, 0, [1]))
    requests = requests_of(rings.take())
    assert {s.req_id: s.state for s in requests.in_flight} == {0x100: "unread", 0x102: "decoding"}
    assert not requests.is_exact
    assert "by the rings alone" in to_text(rings.take(), 4)


def test_submit_older_than_all_token_records_is_not_taken_for_one_in_flight(
    bare_rings: Rings,
) -> None:
    rings = bare_rings
    rings.submit(0x100, ms=1)  # its FINISH is overwritten by what follows
    rings.submit(0x101, ms=100)
    consumer = rings.channel.tokens.consumer()
    for n in range(70):
        rings.emit(rings.tokens_of(0x102, n, [1], ms=20 + n))
        consumer.poll()
        consumer.release(1)
    assert [s.req_id for s in requests_of(rings.take()).in_flight] == [0x102, 0x101]


def test_death_of_a_worker_is_about_its_requests_only(rings: Rings) -> None:
    rings.submit(0x101)
    assert rings.board is not None
    rings.board.rosters["requests"].enter(5, 0x205, 7, 1, 1, 1)  # another worker's
    recording = rings.take()
    assert len(requests_of(recording).in_flight) == 2
    died = replace(recording, death=Death("worker", 1, 99, "killed by SIGKILL"))
    assert [s.req_id for s in requests_of(died).in_flight] == [0x101]
    assert "worker 1 (pid 99) died: killed by SIGKILL" in to_text(died, 4)


@pytest.mark.parametrize("torn", [1, 5])
def test_slots_claimed_at_the_death_of_their_writer_are_torn(rings: Rings, torn: int) -> None:
    rings.submit(0x101)
    rings.emit(rings.started(0x101), rings.tokens_of(0x101, 0, [5]))
    rings.channel.tokens.segment.words()[L.W_CLAIM_CURSOR] += torn
    assert "being written" in to_text(rings.take(), 8)
    recording = rings.take()
    dead = replace(recording, rings=tuple(replace(r, has_producer=False) for r in recording.rings))
    _, tokens = dead.rings
    assert list(torn_cursors(tokens)) == list(range(2, 2 + torn))
    assert f"2..{1 + torn}  {torn} slots TORN" in to_text(dead, 8)
    shown = to_json(dead, 8)["rings"][1]
    assert [claim["is_torn"] for claim in shown["claimed"]] == [True] * torn
    assert [record["cursor"] for record in shown["records"]] == [0, 1]  # never among the records
    assert requests_of(dead).in_flight[0].last_index == 0


def test_each_kind_of_record_is_decoded_by_its_name(rings: Rings) -> None:
    rings.submit(0x101, num_prompt_tokens=1900)
    rings.ask(0x101, SubmitKind.ABORT)
    rings.emit(
        rings.started(0x101),
        rings.tokens_of(0x101, 4, [7, 8]),
        pack_message(0x101, "it is too long", time_ns=rings.ns(7)),
        rings.finished(0x101),
        (0x101).to_bytes(8, "little") + bytes(12) + b"\x63" + bytes(107),
    )
    submit, tokens = rings.take().rings
    assert [r.kind for r in records_of(submit)] == ["submit", "continuation", "abort"]
    head = next(records_of(submit)).fields
    assert head == {"num_slots": 2, "prompt_tokens": 1900, "max_tokens": 50}
    kinds = ["started", "tokens", "message", "finish", "unknown 99"]
    records = list(records_of(tokens))
    assert [r.kind for r in records] == kinds
    assert records[1].fields["token_ids"] == [7, 8]
    assert records[1].fields["offsets_us"] == [0, 1000]
    assert records[1].fields["publish_delay_us"] == 17
    assert records[2].fields["text"] == "it is too long"
    assert records[3].fields["finish"] == "length"
    assert [r.cursor for r in records_of(tokens, last=2)] == [3, 4]


def _shown(recording: Recording, text: TokenText | None = None) -> list[str]:
    return [to_text(recording, 0, text), json.dumps(to_json(recording, 0, text))]


@pytest.fixture
def token_text(monkeypatch: pytest.MonkeyPatch) -> TokenText:
    """Ids 0 to 5 are what a hostile prompt would be made of; no other is known."""
    table = [b"Hello", b" world", b"\x1b[2J", "\u202e".encode(), b"\xf0\x9f", b"\n"]

    class Model:
        def token_bytes(self) -> TokenBytes:
            return TokenBytes.from_list(table)

    monkeypatch.setattr("shmserve.models.PreparedModel.load", lambda folder: Model())
    return TokenText("anywhere")


def test_text_is_shown_only_when_it_is_asked_for(rings: Rings, token_text: TokenText) -> None:
    rings.submit(0x101, num_prompt_tokens=2)
    rings.emit(rings.tokens_of(0x101, 0, [0, 1]))
    for shown in _shown(rings.take()):
        assert "Hello" not in shown
    for shown in _shown(rings.take(), token_text):
        assert shown.count("'Hello world'") == 2  # the prompt and the answer
    without = replace(rings.take(), has_contents=False)
    for shown in _shown(without, token_text):
        assert shown.count("'Hello world'") == 1
    for shown in (*_shown(rings.take()), *_shown(rings.take(), token_text)):
        assert SECRET not in shown


def test_text_cannot_do_anything_to_a_terminal(token_text: TokenText) -> None:
    assert token_text.of([2, 3, 4, 5, 9]) == r"'\x1b[2J\u202e\\xf0\\x9f\n<?>'"


def test_nothing_that_a_client_sent_is_left_in_slots_without_contents(rings: Rings) -> None:
    rings.submit(0x101, num_prompt_tokens=1900)
    submit, _ = rings.take().rings
    bare = without_contents(submit.slots)
    assert len(bare) == len(submit.slots)
    assert SECRET.encode() in submit.slots and SECRET.encode() not in bare
    assert np.arange(100, 120, dtype=np.int32).tobytes() not in bare
    emptied = replace(submit, slots=bare)
    assert list(records_of(emptied)) == list(records_of(submit))  # their heads are what they were


def test_what_a_killed_instance_left_is_found_by_its_name(rings: Rings) -> None:
    assert rings.instance in instances_in_memory()
    assert len(rings.take().rings) == 2
    with pytest.raises(SegmentError, match="nothing of instance 'nobody-is-called-so'"):
        take("nobody-is-called-so")


def test_segments_that_are_no_rings_are_counted_and_left_out(rings: Rings) -> None:
    path = Path(f"/dev/shm/shmserve.{rings.instance}.9.0-0.tokens")
    path.write_bytes(bytes(8192))
    try:
        recording = rings.take()
    finally:
        unlink("/" + path.name)
    assert (len(recording.rings), recording.num_missing) == (2, 1)
    assert "1 of its segments could not be read" in to_text(recording, 1)
    assert len(names(f"shmserve.{rings.instance}.")) == 3


def test_json_is_json_and_names_every_request(rings: Rings) -> None:
    rings.submit(0x101)
    rings.emit(rings.tokens_of(0x101, 0, [5]))
    shown: dict[str, Any] = json.loads(json.dumps(to_json(rings.take(), 4)))
    (request,) = shown["in_flight"]
    assert request["id"] == "0000000000000101"
    assert (request["last_index"], request["state"], request["finish"]) == (0, "decoding", "")
    assert [ring["kind"] for ring in shown["rings"]] == ["submit", "tokens"]
    assert shown["rings"][1]["write_cursor"] == 1
