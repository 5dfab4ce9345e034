"""STARTED, FINISH and MESSAGE slots, byte by byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_records import REQ_ID, STEP, TIME_NS, golden, i4, u4, u8

from shmserve.wire.finish import (
    FINISH_DTYPE,
    KEEP_ALL,
    MESSAGE_BYTES,
    FinishRecord,
    pack_finish,
    pack_message,
    unpack_finish,
    unpack_message,
)
from shmserve.wire.tokens import TokenKind, token_key, weigh_tokens


@pytest.mark.parametrize(("kind", "byte"), [(TokenKind.STARTED, "04"), (TokenKind.FINISH, "05")])
def test_golden_started_and_finish(kind, byte):
    slot = pack_finish(
        kind, REQ_ID, time_ns=TIME_NS, step=STEP, finish=3, completion_tokens=0x31, prompt_tokens=0x32,
        cached_tokens=0x33, num_retractions=0x34, keep_bytes=0x35, matched_token=-1, matched_stop=0x36,
        stamps=(0x41, 0x42, 0x43, 0x44, 0x45), guesses=(0x51, 0x52, 0x53),
    )  # fmt: skip
    assert slot == golden(
        f"0807060504030201 1817161514131211 31000000 {byte} 00 03 00 2827262524232221",
        "32000000 33000000 34000000 35000000  # 32 prompt, cached, retractions, keep_bytes",
        "ffffffff 36000000                    # 48 matched_token, matched_stop",
        "4100000000000000 4200000000000000    # 56 received, admitted",
        "4300000000000000 4400000000000000    # 72 scheduled, prefill_end",
        "4500000000000000                     # 88 first_token",
        "51000000 52000000 53000000           # 96 num_verified, num_drafts, num_accepted",
    )


def test_dtype_of_finish_agrees_with_its_struct():
    slot = pack_finish(
        TokenKind.FINISH, 1, time_ns=2, step=3, finish=4, completion_tokens=5, prompt_tokens=6, cached_tokens=7,
        num_retractions=8, keep_bytes=9, matched_token=10, matched_stop=11, stamps=(12, 13, 14, 15, 16),
        guesses=(17, 18, 19),
    )  # fmt: skip
    columns = np.frombuffer(slot, FINISH_DTYPE)[0]
    record = unpack_finish(slot)
    for name in FinishRecord.__slots__:
        column = {"completion_tokens": "index"}.get(name, name)
        assert getattr(record, name) == columns[column], name


@given(
    req_id=u8, time_ns=u8, step=u8, finish=st.integers(0, 255), counts=st.tuples(u4, u4, u4, u4, u4),
    matched=st.tuples(i4, i4), stamps=st.tuples(u8, u8, u8, u8, u8), guesses=st.tuples(u4, u4, u4),
)  # fmt: skip
def test_finish_round_trips(req_id, time_ns, step, finish, counts, matched, stamps, guesses):
    completion, prompt, cached, retractions, keep = counts
    slot = pack_finish(
        TokenKind.FINISH, req_id, time_ns=time_ns, step=step, finish=finish, completion_tokens=completion,
        prompt_tokens=prompt, cached_tokens=cached, num_retractions=retractions, keep_bytes=keep,
        matched_token=matched[0], matched_stop=matched[1], stamps=stamps, guesses=guesses,
    )  # fmt: skip
    assert unpack_finish(memoryview(slot)) == FinishRecord(
        req_id, time_ns, finish, step, completion, prompt, cached, retractions, keep, *matched, *stamps, *guesses
    )  # fmt: skip
    assert token_key(slot) == req_id
    assert weigh_tokens(bytearray(slot)) == 0


def test_finish_keeps_all_text_unless_told():
    assert unpack_finish(pack_finish(TokenKind.FINISH, 1, time_ns=0, step=0)).keep_bytes == KEEP_ALL


def test_golden_message():
    assert pack_message(REQ_ID, "né", time_ns=TIME_NS) == golden(
        "0807060504030201 1817161514131211 00000000 06 03 00 00 0000000000000000", "6e c3a9"
    )


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_message_splits_no_character_and_loses_only_what_is_beyond_its_slots(text):
    data = pack_message(5, text, time_ns=1)
    slots = [data[at : at + 128] for at in range(0, len(data), 128)]
    pieces = [unpack_message(slot) for slot in slots]
    assert len(slots) <= 4
    for number, (slot, piece) in enumerate(zip(slots, pieces, strict=True)):
        assert len(piece.encode()) == slot[21] <= MESSAGE_BYTES
        assert int.from_bytes(slot[16:20], "little") == number  # they are in order
        assert "\ufffd" not in piece or "\ufffd" in text
    whole = "".join(pieces)
    assert text.startswith(whole)
    if whole != text:  # cut: then every slot is as full as characters allow
        assert len(slots) == 4
        assert all(len(piece.encode()) > MESSAGE_BYTES - 4 for piece in pieces)


def test_message_that_lies_about_its_length_stays_in_its_slot():
    slot = bytearray(pack_message(5, "x" * 96, time_ns=1))
    slot[21] = 255
    assert unpack_message(slot) == "x" * 96
