"""The worker against a front end that writes anything into its submit ring: an answer or a counted fault, never the worker's end.

The engine is real, with a simulated runner, and its scheduler's laws are checked after every step.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import (
    SUBMIT_DTYPE,
    SUBMIT_SLOT_BYTES,
    Section,
    SubmitKind,
    pack_control,
)
from shmserve.worker.channels import MOST_BAD_RECORDS

OURS = 900  # ids of requests that are written as they should be
SECTIONS = 256
FIELDS = [name for name in SUBMIT_DTYPE.names if name not in ("req_id", "kind")]
BITS = {"u1": 8, "<u2": 16, "<u4": 32, "<u8": 64, "<i4": 32, "<f4": 32}


@pytest.fixture(autouse=True)
def quiet():
    """A line for each of thousands of bad records helps nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def request(req_id, rich):
    more = {}
    if rich:
        more = {
            "stop": (b"zq",),
            "stop_regex": ("a+b",),
            "stop_token_ids": (5,),
            "logit_bias": ((4, 1.5),),
            "num_logprobs": 2,
            "prompt_logprobs": 1,
            "num_speculative_tokens": 3,
            "frequency_penalty": 0.5,
            "top_k": 4,
        }
    params = SamplingParams(max_tokens=4, seed=req_id, **more)
    ids = np.array([3, 4, 5, 3, 4], np.int32)
    return bytearray(pack_submit(Submit(req_id, ids, params, cache_salt=b"s", digest=b"d" * 16))[0])


def with_field(slot, name, bits):
    """One field of a SUBMIT set to any bits of its width."""
    dtype, offset = SUBMIT_DTYPE.fields[name][:2]
    size = dtype.itemsize
    slot[offset : offset + size] = (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return slot


BITS_OF_FIELD = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000, 0x7FC00000, 2**63]),
    st.integers(0, 64),
)
UNITS = st.one_of(
    st.tuples(st.just("noise"), st.binary(min_size=64, max_size=400)),
    st.tuples(st.just("kind"), st.sampled_from(SubmitKind), st.binary(max_size=300)),
    st.tuples(
        st.just("field"),
        st.booleans(),
        st.lists(st.tuples(st.sampled_from(FIELDS), BITS_OF_FIELD), max_size=4),
    ),
    st.tuples(
        st.just("sections"),
        st.booleans(),
        st.lists(
            st.tuples(st.integers(SECTIONS, SECTIONS + 200), st.integers(0, 255)),
            min_size=1,
            max_size=8,
        ),
    ),
    st.tuples(st.just("section"), st.sampled_from(Section), st.binary(max_size=120)),
    st.tuples(st.just("control"), st.sampled_from(list(SubmitKind)[2:]), st.integers(0, 40)),
)


def slots_of(unit, req_id):
    how = unit[0]
    if how == "noise":
        slot = unit[1]
    elif how == "kind":
        slot = req_id.to_bytes(8, "little") + bytes([unit[1], 0, 1, 0]) + unit[2]
    elif how == "field":
        slot = request(req_id, unit[1])
        for name, bits in unit[2]:
            slot = with_field(slot, name, bits)
    elif how == "sections":
        slot = request(req_id, unit[1])
        for at, value in unit[2]:
            slot[at] = value
    elif how == "section":
        # One more section behind the prompt, of any content.
        head = bytearray(request(req_id, False)[:SECTIONS])
        prompt = np.array([3, 4], np.int32).tobytes()
        body = b""
        for tag, data in ((Section.PROMPT_IDS, prompt), (unit[1], unit[2])):
            body += tag.to_bytes(4, "little") + len(data).to_bytes(4, "little")
            body += data + bytes(-len(data) % 4)
        slot = with_field(head, "length", len(body)) + body
    else:
        slot = pack_control(unit[1], unit[2], time_ns=1, digest=b"d" * 16)
    return bytes(slot).ljust(SUBMIT_SLOT_BYTES, b"\0")[:SUBMIT_SLOT_BYTES]


class Deaf:
    """Reads the token ring and believes nothing: what the fuzzed ids are told is checked by others."""

    def __init__(self, rig):
        self.rig = rig

    def run(self, most=400):
        """Steps until nothing happens any more; every step keeps the scheduler's laws."""
        ring = self.rig.front.token_ring
        finished = []
        for _ in range(most):
            has_computed = self.rig.step()
            count = ring.poll()
            for _ in range(count):
                slot = bytes(ring.peek(0))
                if slot[20] == 5:
                    finished.append(int.from_bytes(slot[:8], "little"))
                ring.release(1)
            if not has_computed and not count:
                break
        return finished


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(units=st.lists(UNITS, min_size=1, max_size=12), is_overlapped=st.booleans())
def test_whatever_a_front_end_writes_the_worker_serves_on(new_rig, units, is_overlapped):
    rig = new_rig(num_http=2, is_overlapped=is_overlapped, token_slots=256)
    try:
        victim, other = rig.fronts
        for number, unit in enumerate(units, 1):
            victim.send_raw(slots_of(unit, number))
            if number % 4 == 0:
                Deaf(rig).run(3)
        Deaf(rig).run()
        assert victim.submit_ring.free(64) == 64, "every slot was given back"
        num_bad = rig.board["num_bad_records"]
        assert num_bad <= sum(unit[0] != "control" for unit in units)
        # A neighbour is served to its end, whatever still runs or waits for the other.
        other.submit(OURS, max_tokens=3)
        for _ in range(400):
            rig.step()
            other.read()
            ring = victim.token_ring
            ring.release(ring.poll())
            if OURS in other.finished:
                break
        assert other.finished[OURS].completion_tokens == len(other.tokens[OURS]) > 0
        rig.engine.close_channel(victim.http)
        Deaf(rig).run(5)
        rig.assert_idle()
    finally:
        rig.close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["submit.data", "submit.credits", "tokens.data", "tokens.credits"]),
            st.sampled_from([1, 7, 63, 64, 65, 300, 1 << 40, 1 << 62, 2**64 - 2]),
        ),
        max_size=6,
    )
)
def test_whatever_a_front_ends_counters_say_its_neighbour_is_served(new_rig, steps):
    rig = new_rig(num_http=2)
    try:
        victim, other = rig.fronts
        victim.submit(1, max_tokens=20)
        for name, count in steps:
            ring, _, counter = name.partition(".")
            try:
                getattr(getattr(victim.channel, ring), counter).add(count)
            except RingProtocolError:
                continue  # full: nobody takes from it any more
            rig.step()
        other.submit(OURS, max_tokens=5)
        for _ in range(100):
            rig.step()
            other.read()
        assert len(other.tokens[OURS]) > 0 and OURS in other.finished
    finally:
        rig.close()


def test_a_front_end_that_writes_nothing_but_noise_is_not_listened_to_for_ever(rig):
    """MOST_BAD_RECORDS of one channel: it ends, its requests are freed, and whoever runs the engine is told."""
    r = rig(num_http=2)
    told = []
    r.engine.channels.on_broken = lambda channel, fault: told.append((channel.http, fault))
    r.fronts[0].submit(1, max_tokens=50)
    r.step()
    for _ in range(MOST_BAD_RECORDS):
        r.fronts[0].send_raw(b"\xff" * SUBMIT_SLOT_BYTES)
    for _ in range(3):
        r.step()
    ((http, fault),) = told
    assert http == 0 and str(MOST_BAD_RECORDS) in fault
    assert r.board["num_bad_records"] == MOST_BAD_RECORDS
    r.assert_idle()


def test_every_field_at_its_extremes_is_answered(rig):
    """All bits set, only the sign, infinity, NaN: a FINISH for each, and the worker lives."""
    r = rig(submit_slots=256, token_slots=1024)
    number = 0
    for name in FIELDS:
        if name in ("num_slots", "length"):
            continue
        for bits in (0, 1, 2**63 | 2**31, 2**64 - 1, 0x7F800000, 0x7FC00000, 0x7FFFFFFF):
            for rich in (False, True):
                number += 1
                r.front.send_raw(bytes(with_field(request(number, rich), name, bits)))
                finished = Deaf(r).run()
                assert finished.count(number) == 1, (name, hex(bits), rich)
    assert r.board["num_bad_records"] == 0
    r.assert_idle()
