"""TOKENS slots, byte by byte, and what merging keeps of them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_records import REQ_ID, TIME_NS, golden, i4, tokens_record

from shmserve import wire
from shmserve.wire.finish import FINISH_DTYPE, pack_finish
from shmserve.wire.logprobs import PAIRS_PER_SLOT, TOP_DTYPE
from shmserve.wire.tokens import (
    TOKEN_SLOT_BYTES,
    TOKENS_DTYPE,
    TOKENS_PER_SLOT,
    TokenKind,
    fold_tokens,
    stamp_publish,
    weigh_tokens,
)


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


def test_a_slot_holds_what_the_constants_say():
    assert TOKENS_DTYPE["token_ids"].shape == (TOKENS_PER_SLOT,)
    assert TOP_DTYPE["token_ids"].shape == (PAIRS_PER_SLOT,)


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
