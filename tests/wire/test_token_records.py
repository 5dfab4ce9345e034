"""Token slots, byte by byte, and what merging keeps of them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve import wire
from shmserve.wire import (
    FINISH_DTYPE,
    KEEP_ALL,
    MESSAGE_BYTES,
    TOKEN_SLOT_BYTES,
    TOKENS_DTYPE,
    TOKENS_PER_SLOT,
    TOP_DTYPE,
    FinishRecord,
    TokenKind,
    fold_tokens,
    pack_finish,
    pack_message,
    pack_top_logprobs,
    stamp_publish,
    token_key,
    unpack_finish,
    unpack_message,
    weigh_tokens,
)

REQ_ID = 0x0102030405060708
TIME_NS = 0x1112131415161718
STEP = 0x2122232425262728


def tokens_record(
    ids, *, req_id=REQ_ID, index=0, time_ns=TIME_NS, dt_us=None, logprobs=None, flags=0, finish=0
) -> bytearray:
    """A TOKENS slot as the worker makes it."""
    record = np.zeros(1, TOKENS_DTYPE)
    record["req_id"], record["time_ns"], record["index"], record["step"] = (
        req_id,
        time_ns,
        index,
        STEP,
    )
    record["kind"], record["count"] = TokenKind.TOKENS, len(ids)
    record["flags"], record["finish"] = flags, finish
    record["token_ids"][0, : len(ids)] = ids
    record["dt_us"][0, : len(ids)] = dt_us or [0] * len(ids)
    record["logprobs"][0, : len(ids)] = logprobs or [0.0] * len(ids)
    return bytearray(record.tobytes())


def golden(*lines: str) -> bytes:
    """128 bytes from commented hex; the rest is zero."""
    return bytes.fromhex("".join(line.split("#")[0] for line in lines)).ljust(128, b"\0")


def test_golden_tokens():
    record = tokens_record(
        [1, -2, 0x01020304], index=7, dt_us=[5, 6, 7], logprobs=[-1.0, 0.5, -0.25], flags=1
    )
    assert bytes(record) == golden(
        "0807060504030201          #  0 req_id",
        "1817161514131211          #  8 time_ns",
        "07000000 01 03 00 01      # 16 index, kind, count, finish, flags",
        "2827262524232221          # 24 step",
        "01000000 feffffff 04030201 00000000 00000000 00000000 00000000 00000000  # 32 token_ids",
        "05000000 06000000 07000000 00000000 00000000 00000000 00000000 00000000  # 64 dt_us",
        "000080bf 0000003f 000080be 00000000 00000000 00000000 00000000 00000000  # 96 logprobs",
    )


def test_golden_top_logprobs_fill_a_slot_with_twelve_pairs():
    ids = np.arange(13, dtype=np.int32)
    slots = pack_top_logprobs(REQ_ID, 9, ids, -ids.astype(np.float32), STEP)
    head = "0807060504030201 0000000000000000 09000000 02 {} 00 00 2827262524232221"
    assert slots == golden(
        head.format("0c"),
        "00000000 01000000 02000000 03000000 04000000 05000000 06000000 07000000 08000000 09000000"
        " 0a000000 0b000000  # 32 token_ids",
        "00000080 000080bf 000000c0 000040c0 000080c0 0000a0c0 0000c0c0 0000e0c0 000000c1 000010c1"
        " 000020c1 000030c1  # 80 logprobs",
    ) + golden(head.format("01"), "0c000000", "00" * 44, "000040c1")


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


def test_golden_message():
    assert pack_message(REQ_ID, "né", time_ns=TIME_NS) == golden(
        "0807060504030201 1817161514131211 00000000 06 03 00 00 0000000000000000", "6e c3a9"
    )


def test_numbers_of_the_kinds_do_not_change():
    assert [(kind.name, kind.value) for kind in TokenKind] == [
        ("TOKENS", 1),
        ("TOP_LOGPROBS", 2),
        ("PROMPT_LOGPROBS", 3),
        ("STARTED", 4),
        ("FINISH", 5),
        ("MESSAGE", 6),
        ("READY", 7),
        ("LOADING", 8),
    ]


@pytest.mark.parametrize("dtype", [TOKENS_DTYPE, TOP_DTYPE, FINISH_DTYPE])
def test_offsets_are_those_of_the_picture(dtype):
    """Every "offset  name width" of the docstring's token slot that names a field of the common head."""
    head = wire.__doc__.split("Token slot")[1].split("    32  ")[0]
    drawn = {name: (int(at), width) for at, name, width in re.findall(r"(\d+)  (\w+) (u\d)", head)}
    assert len(drawn) == 8
    for name, (offset, width) in drawn.items():
        field, at = dtype.fields[name][:2]
        assert (at, field.str.lstrip("<|")) == (offset, width), name
    assert dtype.itemsize == TOKEN_SLOT_BYTES


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


u4, i4, u8 = st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**64 - 1)


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


@given(
    st.lists(st.tuples(i4, st.floats(width=32, allow_nan=False)), max_size=40),
    st.integers(0, 2**32 - 1),
)
def test_top_logprobs_round_trip_in_order(pairs, index):
    ids = np.array([i for i, _ in pairs], np.int32)
    logprobs = np.array([p for _, p in pairs], np.float32)
    records = np.frombuffer(pack_top_logprobs(REQ_ID, index, ids, logprobs, STEP), TOP_DTYPE)
    got_ids = [i for r in records for i in r["token_ids"][: r["count"]].tolist()]
    got = [p for r in records for p in r["logprobs"][: r["count"]].tolist()]
    assert (got_ids, got) == (ids.tolist(), logprobs.tolist())
    assert len(records) == -(-len(pairs) // 12)
    assert set(records["index"].tolist()) <= {index}


# -- merging ---------------------------------------------------------------------------------------------------------------


def tokens_of(slots) -> list[tuple[int, int, int, float]]:
    """(index, id, time in ns, logprob) of every token in TOKENS slots."""
    out = []
    for slot in slots:
        record = np.frombuffer(bytes(slot), TOKENS_DTYPE)[0]
        for k in range(record["count"]):
            later_us = int(record["dt_us"][k]) if k else 0
            out.append(
                (
                    int(record["index"]) + k,
                    int(record["token_ids"][k]),
                    int(record["time_ns"]) + 1000 * later_us,
                    float(record["logprobs"][k]),
                )
            )
    return out


def fold_all(arriving: list[bytearray]) -> list[bytearray]:
    """What waits after `arriving` came one by one, as the backlog does it."""
    pending = [bytearray(arriving[0])]
    for slot in arriving[1:]:
        before = bytes(pending[-1])
        if not fold_tokens(pending[-1], memoryview(slot)):
            assert bytes(pending[-1]) == before, "a refused fold changed something"
            pending.append(bytearray(slot))
    return pending


@st.composite
def runs(draw):
    """TOKENS slots of one completion that follow each other."""
    index, now = draw(st.integers(0, 1000)), draw(st.integers(1, 2**60))
    slots = []
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.integers(1, 4))
        ids = draw(st.lists(i4, min_size=count, max_size=count))
        logprobs = draw(
            st.lists(st.floats(width=32, allow_nan=False), min_size=count, max_size=count)
        )
        later = sorted(draw(st.lists(st.integers(0, 9000), min_size=count - 1, max_size=count - 1)))
        dt_us = [draw(st.integers(0, 500)), *later]
        slots.append(tokens_record(ids, index=index, time_ns=now, dt_us=dt_us, logprobs=logprobs))
        index += count
        now += draw(st.integers(0, 10**10)) + 1000 * max(dt_us[1:], default=0)
    return slots


@given(runs())
def test_fold_keeps_every_id_and_logprob_and_each_time_to_a_microsecond(arriving):
    merged = tokens_of(fold_all(arriving))
    for got, sent in zip(merged, tokens_of(arriving), strict=True):
        assert got[:2] + got[3:] == sent[:2] + sent[3:]
        assert 0 <= sent[2] - got[2] < 1000


def test_fold_fills_a_slot_before_it_begins_another():
    arriving = [tokens_record([i], index=i, time_ns=TIME_NS + 4_480_000 * i) for i in range(20)]
    counts = [slot[21] for slot in fold_all(arriving)]
    assert counts == [8, 8, 4]
    assert sum(map(weigh_tokens, fold_all(arriving))) == 20


PENDING = {"ids": [1, 2], "index": 4}


@pytest.mark.parametrize(
    "arriving",
    [
        {"ids": [3], "index": 7},
        {"ids": [3], "index": 5},
        {"ids": [3], "index": 6, "req_id": REQ_ID + 1},
        {"ids": [3] * 7, "index": 6},
        {"ids": [3], "index": 6, "time_ns": TIME_NS - 1},
        {"ids": [3], "index": 6, "time_ns": TIME_NS + 2**32 * 1000},
        {"ids": [3, 4], "index": 6, "time_ns": TIME_NS + (2**32 - 1) * 1000, "dt_us": [0, 1]},
    ],
    ids=[
        "a hole",
        "an overlap",
        "another request",
        "too many",
        "back in time",
        "too late",
        "a later token too late",
    ],
)
def test_fold_refuses_what_would_lose_something(arriving):
    pending = tokens_record(**PENDING)
    before = bytes(pending)
    assert not fold_tokens(pending, memoryview(tokens_record(**arriving)))
    assert bytes(pending) == before


@pytest.mark.parametrize("end", [{"flags": 1}, {"finish": 3}])
def test_nothing_is_folded_behind_an_end_and_an_end_can_be_folded_in(end):
    ended = tokens_record([1, 2], index=4, **end)
    assert not fold_tokens(ended, memoryview(tokens_record([3], index=6)))
    pending = tokens_record([9], index=3)
    assert fold_tokens(pending, memoryview(tokens_record([1, 2], index=4, **end)))
    assert (pending[21], pending[22], pending[23]) == (3, end.get("finish", 0), end.get("flags", 0))


def test_only_tokens_are_folded():
    finish = pack_finish(TokenKind.FINISH, REQ_ID, time_ns=TIME_NS, step=1, completion_tokens=6)
    assert not fold_tokens(tokens_record(**PENDING), memoryview(finish))
    assert not fold_tokens(bytearray(finish), memoryview(tokens_record([3], index=6)))


def test_publish_delay_is_stamped_on_tokens_alone_and_clipped():
    second = 10**9
    slots = (
        tokens_record([1], time_ns=second)
        + bytearray(pack_finish(TokenKind.FINISH, 1, time_ns=second, step=0))
        + tokens_record([1, 2], time_ns=2 * second, dt_us=[0, 77])
        + tokens_record([1], time_ns=9 * second)
    )
    untouched = bytes(slots[128:256])
    stamp_publish(slots, 2 * second + 5_999)
    records = np.frombuffer(bytes(slots), TOKENS_DTYPE)
    assert records["dt_us"][0, 0] == 1_000_005
    assert bytes(slots[128:256]) == untouched
    assert records["dt_us"][2, :2].tolist() == [5, 77]
    assert records["dt_us"][3, 0] == 0  # not in the future
    stamp_publish(slots, 10**18)
    assert np.frombuffer(bytes(slots), TOKENS_DTYPE)["dt_us"][0, 0] == 2**32 - 1


def test_a_slot_holds_what_the_constants_say():
    assert TOKENS_DTYPE["token_ids"].shape == (TOKENS_PER_SLOT,)
    assert TOP_DTYPE["token_ids"].shape == (wire.PAIRS_PER_SLOT,)
