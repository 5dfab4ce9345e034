"""A SUBMIT, byte by byte; what goes in comes out; and what lies is a WireError, never anything else."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_records import REQ_ID, i4, patched, request, slots_of, u4, u8

from shmserve.request import SamplingParams
from shmserve.wire import submit
from shmserve.wire.errors import WireError
from shmserve.wire.submit import Submit, pack_submit, unpack_submit
from shmserve.wire.submit_slots import SUBMIT_DTYPE, SUBMIT_SLOT_BYTES, SubmitKind, submit_head


def assert_same(got: Submit, sent: Submit) -> None:
    assert got.prompt_ids.dtype == np.int32
    assert got.prompt_ids.tolist() == sent.prompt_ids.tolist()
    for name in Submit.__slots__:
        if name != "prompt_ids":
            assert getattr(got, name) == getattr(sent, name), name


def test_golden_submit():
    params = SamplingParams(
        max_tokens=0x10, temperature=0.5, top_p=0.25, top_k=-2, min_p=0.125, frequency_penalty=1.0,
        presence_penalty=-1.0, repetition_penalty=2.0, seed=0xA1A2A3A4A5A6A7A8, min_tokens=0x11,
        ignore_eos=True, stop=(b"END", b"\xff"), stop_token_ids=(7,), include_stop=True,
        skip_special_tokens=True, logit_bias=((5, 100.0),), num_logprobs=3, priority=-1,
        prompt_logprobs=2, num_speculative_tokens=7, allowed_token_ids=(1, 2), bad_words=((3,), (4, 5)),
    )  # fmt: skip
    data, num_slots = pack_submit(
        Submit(
            REQ_ID,
            np.array([1, 2], np.int32),
            params,
            arrival_ns=0x21,
            submitted_ns=0x22,
            deadline_ns=0x23,
            cache_salt=b"salt",
            digest=bytes(range(16)),
        )
    )
    head = bytes.fromhex(
        "0807060504030201 01 07 0100 94000000 2200000000000000"  # req_id kind flags num_slots length time
        "2100000000000000 2300000000000000 a8a7a6a5a4a3a2a1"  # 24 arrival, deadline, seed
        "ffffffff 10000000 11000000"  # 48 priority, max_tokens, min_tokens
        "0000003f 0000803e 0000003e feffffff"  # 60 temperature, top_p, min_p, top_k
        "0000803f 000080bf 00000040 03000000"  # 76 penalties, num_logprobs
        "02000000 07000000"  # 92 prompt_logprobs, num_speculative_tokens
    )
    sections = bytes.fromhex(
        "0100 0000 08000000 01000000 02000000"  # prompt ids
        "0200 0000 03000000 454e44 00"  # a stop string, padded to 4
        "0200 0000 01000000 ff 000000"
        "0300 0000 04000000 07000000"  # stop ids
        "0500 0000 08000000 05000000 0000c842"  # logit_bias
        "0600 0000 08000000 01000000 02000000"  # allowed ids
        "0700 0000 04000000 03000000"  # bad words
        "0700 0000 08000000 04000000 05000000"
        "0900 0000 04000000 73616c74"  # salt
        "0a00 0000 10000000 000102030405060708090a0b0c0d0e0f"  # digest
    )
    assert num_slots == 1
    assert data == head.ljust(256, b"\0") + sections.ljust(SUBMIT_SLOT_BYTES - 256, b"\0")


def test_golden_continuation():
    data, num_slots = pack_submit(request(num_ids=2100))
    first, second, third = slots_of(data)
    assert num_slots == 3
    assert first[8:16].hex() == "01 04 0300 d8200000".replace(" ", "")
    assert second[:16].hex() == "0807060504030201 02 00 0100 00000000".replace(" ", "")
    assert third[:16].hex() == "0807060504030201 02 00 0200 00000000".replace(" ", "")
    ids = first[264:] + second[16:] + third[16:]
    assert ids[: 4 * 2100] == np.arange(2100, dtype="<i4").tobytes()


def test_dtype_of_submit_agrees_with_its_struct():
    values = {
        "max_tokens": 1, "min_tokens": 2, "temperature": 3.0, "top_p": 4.0, "min_p": 5.0, "top_k": 6, "frequency_penalty": 7.0,
        "presence_penalty": 8.0, "repetition_penalty": 9.0, "num_logprobs": 10, "seed": 11, "priority": 12,
        "prompt_logprobs": 16, "num_speculative_tokens": 17,
    }  # fmt: skip
    slot, _ = pack_submit(
        Submit(REQ_ID, np.zeros(1, np.int32), SamplingParams(**values), arrival_ns=13, submitted_ns=14, deadline_ns=15)
    )  # fmt: skip
    columns = np.frombuffer(slot[:256], SUBMIT_DTYPE)[0]
    for name, value in (values | {"arrival_ns": 13, "time_ns": 14, "deadline_ns": 15}).items():
        assert columns[name] == value, name


f4 = st.floats(width=32, allow_nan=False)


params_of = st.builds(
    SamplingParams,
    max_tokens=u4, min_tokens=u4, temperature=f4, top_p=f4, min_p=f4, top_k=i4, frequency_penalty=f4,
    presence_penalty=f4, repetition_penalty=f4, seed=u8, priority=i4, num_logprobs=i4, ignore_eos=st.booleans(),
    include_stop=st.booleans(), skip_special_tokens=st.booleans(),
    stop=st.lists(st.binary(min_size=1, max_size=40), max_size=6).map(tuple),
    stop_token_ids=st.lists(i4, max_size=40).map(tuple),
    logit_bias=st.lists(st.tuples(i4, f4), max_size=300).map(tuple),
    allowed_token_ids=st.lists(i4, max_size=300).map(tuple),
    shown_ids=st.lists(i4, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(i4, min_size=1, max_size=9).map(tuple), max_size=9).map(tuple),
)  # fmt: skip


submits = st.builds(
    Submit,
    req_id=u8,
    prompt_ids=st.integers(0, 5000).map(lambda n: np.arange(n, dtype=np.int32) * 7919 - n),
    params=params_of,
    arrival_ns=u8,
    submitted_ns=u8,
    deadline_ns=u8,
    cache_salt=st.binary(max_size=70),
    digest=st.sampled_from([b"", bytes(range(16))]),
)


@given(submits)
def test_submit_round_trips_over_as_many_slots_as_it_takes(sent):
    data, num_slots = pack_submit(sent)
    slots = slots_of(data)
    assert len(slots) == num_slots
    assert submit_head(slots[0]) == (sent.req_id, SubmitKind.SUBMIT, num_slots)
    assert_same(unpack_submit([memoryview(slot) for slot in slots]), sent)


ROOM, MORE = SUBMIT_SLOT_BYTES - 256, SUBMIT_SLOT_BYTES - 16


@pytest.mark.parametrize("spare", [-1, 0, 1])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_slot_more_is_taken_exactly_when_the_last_is_full(num_slots, spare):
    num_ids = (ROOM + MORE * (num_slots - 1) - 8) // 4 + spare
    sent = request(num_ids=num_ids)
    data, taken = pack_submit(sent)
    assert taken == num_slots + (spare > 0)
    assert_same(unpack_submit(slots_of(data)), sent)


def test_more_slots_than_the_field_holds_are_refused(monkeypatch):
    monkeypatch.setattr(submit, "SUBMIT_SLOT_BYTES", 272)  # or it takes 256 MiB to see it
    assert pack_submit(request(num_ids=65_534 * 64))[1] == 65_535
    with pytest.raises(WireError, match="65536 slots"):
        pack_submit(request(num_ids=65_534 * 64 + 3))


def with_body(*sections: tuple[int, bytes], length: int | None = None) -> bytes:
    """A one-slot SUBMIT with exactly these sections."""
    body = b"".join(
        struct.pack("<HHI", tag, 0, len(data)) + data + bytes(-len(data) % 4)
        for tag, data in sections
    )
    slot = bytearray(pack_submit(request())[0])
    slot[256:] = body.ljust(ROOM, b"\0")
    slot[12:16] = (len(body) if length is None else length).to_bytes(4, "little")
    return bytes(slot)


@pytest.mark.parametrize(
    ("slot", "says"),
    [
        (with_body((1, b"abc")), "no whole ids"),
        (with_body((3, b"abcde")), "no whole ids"),
        (with_body((5, b"abcd")), "no whole pairs"),
        (with_body((2, b"")), "empty stop"),
        (with_body((6, b"")), "no ids"),
        (with_body((6, b"abc")), "no whole ids"),
        (with_body((7, b"")), "no ids"),
        (with_body((0, b"")), "unknown section 0"),
        (with_body((12, b"")), "unknown section 12"),
        (with_body((11, b"abc")), "no whole ids"),
        (with_body(length=2**32 - 1), "bytes of sections"),
        (with_body(length=ROOM + 1), "bytes of sections"),
        (with_body((9, b"salt"), length=16), "head is cut short"),
        (with_body((9, b"salty"), length=12), "passes the end"),
        (patched(with_body((9, b"salt")), 260, b"\xff\xff\xff\xff"), "passes the end"),
    ],
)  # fmt: skip
def test_a_section_that_lies_is_a_wire_error(slot, says):
    with pytest.raises(WireError, match=says):
        unpack_submit([slot])


def test_slots_that_are_missing_too_many_or_mixed_up_are_a_wire_error():
    first, second, third = slots_of(pack_submit(request(num_ids=2100))[0])
    other = slots_of(pack_submit(Submit(7, np.zeros(2100, np.int32), SamplingParams(1)))[0])
    lies = [
        [first],
        [first, second],
        [first, second, third, third],
        [first, third, second],
        [first, second, second],
        [first, second, first],
        [first, other[1], third],
        [first, second, patched(third, 8, bytes([SubmitKind.ABORT]))],
    ]
    for slots in lies:
        with pytest.raises(WireError):
            unpack_submit(slots)
    assert unpack_submit([first, second, third]).prompt_ids.tolist() == list(range(2100))


def read(slots: list[bytes]) -> None:
    """What the worker does with what it was sent."""
    _, kind, num_slots = submit_head(slots[0])
    if kind == SubmitKind.SUBMIT and num_slots == len(slots):
        unpack_submit(slots)


@given(st.binary(max_size=400), st.integers(0, 300))
def test_random_bytes_give_wire_errors_and_nothing_else(noise, at):
    slot = patched(bytes(SUBMIT_SLOT_BYTES), at, noise)
    for kind in (None, SubmitKind.SUBMIT):
        if kind is not None:
            slot = patched(slot, 8, struct.pack("<BBH", kind, 0, 1))
        try:
            read([slot])
        except WireError:
            continue


@given(
    submits,
    st.lists(st.tuples(st.integers(0, 3 * 4096), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_a_damaged_submit_gives_a_request_or_a_wire_error(sent, damage):
    data = bytearray(pack_submit(sent)[0])
    for at, value in damage:
        data[at % len(data)] = value
    try:
        read(slots_of(bytes(data)))
    except WireError:
        return
