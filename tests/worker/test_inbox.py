"""The worker's way in: what each record asks for, and that nothing a front end writes can hurt more than itself."""

import itertools
import os
import select

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.rings import layout as L
from shmserve.rings.channel import Channel, RingShape
from shmserve.rings.spsc import RingProtocolError
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES, SubmitKind, pack_control
from shmserve.worker.inbox import MOST_GLANCES, Inbox

_numbers = itertools.count()


class Asked:
    """A Sink that remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.requests: list[Submit] = []
        self.num_bad = 0

    def submit(self, request, http):
        self.requests.append(request)
        self.calls.append(("submit", request.req_id, http))

    def refuse(self, req_id, http, reason):
        assert reason.startswith("the worker could not read the request: ")
        self.calls.append(("refuse", req_id, http))

    def abort(self, req_id):
        self.calls.append(("abort", req_id))

    def evict(self, req_id):
        self.calls.append(("evict", req_id))

    def abort_by_digest(self, req_id, http, digest):
        self.calls.append(("abort_by_digest", req_id, http, digest))

    def set_paused(self, req_id, is_paused):
        self.calls.append(("set_paused", req_id, is_paused))

    def note_bad(self):
        self.num_bad += 1

    def flush_cache(self, req_id, http):
        self.calls.append(("flush_cache", req_id, http))


class Way:
    """A channel of front end 3, written at one end and drained at the other."""

    def __init__(self, slots=8) -> None:
        instance = f"test{os.getpid()}-inbox{next(_numbers)}"
        self.channel = Channel.create(
            instance, 1, 3, 0, RingShape(SUBMIT_SLOT_BYTES, slots), RingShape(128, 2)
        )
        self.producer = self.channel.submit.producer()
        self.inbox = Inbox(self.channel)
        self.asked = Asked()

    def put(self, *units: bytes) -> None:
        """Write each unit by a publish of its own."""
        for unit in units:
            assert self.producer.try_write(unit, len(unit) // SUBMIT_SLOT_BYTES)

    def drain(self) -> list[tuple]:
        """What the sink was asked since the last time; every slot has been given back."""
        self.inbox.drain(self.asked)
        assert self.producer.free(self.producer.capacity) == self.producer.capacity
        calls, self.asked.calls = self.asked.calls, []
        return calls

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.unlink()
        self.channel.close()


@pytest.fixture
def way():
    with Way() as made:
        yield made


def submit_of(req_id: int, num_ids: int = 2) -> bytes:
    ids = np.arange(num_ids, dtype=np.int32) + req_id
    return pack_submit(Submit(req_id, ids, SamplingParams(max_tokens=1)))[0]


def test_each_kind_asks_for_what_it_says(way):
    digest = bytes(range(16))
    way.put(
        submit_of(1),
        pack_control(SubmitKind.ABORT, 2, time_ns=0),
        pack_control(SubmitKind.ABORT_BY_ID, 0, time_ns=0, digest=digest),
        pack_control(SubmitKind.PAUSE, 3, time_ns=0),
        pack_control(SubmitKind.RESUME, 4, time_ns=0),
        pack_control(SubmitKind.FLUSH_CACHE, 5, time_ns=0),
        pack_control(SubmitKind.EVICT, 6, time_ns=0),
    )
    assert way.drain() == [
        ("submit", 1, 3),
        ("abort", 2),
        ("abort_by_digest", 0, 3, digest),
        ("set_paused", 3, True),
        ("set_paused", 4, False),
        ("flush_cache", 5, 3),
        ("evict", 6),
    ]
    assert way.inbox.num_bad == 0
    assert way.drain() == []


def test_requests_of_several_slots_are_read_at_every_offset_of_the_ring(way):
    for req_id in range(30):
        num_ids = [2, 1500, 2600][req_id % 3]
        way.put(submit_of(req_id, num_ids))
        assert way.drain() == [("submit", req_id, 3)]
        assert (
            way.asked.requests.pop().prompt_ids.tolist() == (np.arange(num_ids) + req_id).tolist()
        )


def test_a_request_does_not_change_when_its_slots_are_used_again(way):
    way.put(submit_of(1, 1500))
    way.drain()
    way.put(*[b"\xff" * SUBMIT_SLOT_BYTES] * 8)
    assert way.asked.requests[0].prompt_ids.tolist() == list(range(1, 1501))
    way.drain()


def test_a_bad_submit_is_refused_and_the_records_behind_it_are_handled(way):
    bad = bytearray(submit_of(1, 1500))
    bad[12:16] = b"\xff\xff\xff\xff"
    way.put(bytes(bad), submit_of(2))
    assert way.drain() == [("refuse", 1, 3), ("submit", 2, 3)]
    assert way.inbox.num_bad == 1


def test_a_submit_that_is_not_whole_is_refused_once(way):
    """Its continuations, and any others that stray, are counted: they are no requests, so nobody waits for an answer."""
    whole = submit_of(1, 1500)
    head, tail = whole[:SUBMIT_SLOT_BYTES], whole[SUBMIT_SLOT_BYTES:]
    way.put(head)
    assert way.drain() == [("refuse", 1, 3)]
    way.put(tail)
    assert way.drain() == []
    assert way.inbox.num_bad == 2


@pytest.mark.parametrize("num_slots", [0, 9, 0xFFFF])
def test_a_submit_that_lies_about_its_slots_is_refused(way, num_slots):
    lie = bytearray(submit_of(1))
    lie[10:12] = num_slots.to_bytes(2, "little")
    way.put(bytes(lie), submit_of(2))
    assert way.drain() == [("refuse", 1, 3), ("submit", 2, 3)]


@pytest.mark.parametrize("kind", [0, max(SubmitKind) + 1, 255])
def test_a_record_of_unknown_kind_is_counted_and_answered_to_nobody(way, kind):
    stray = bytearray(submit_of(1))
    stray[8] = kind
    way.put(bytes(stray))
    assert way.drain() == []
    assert way.inbox.num_bad == 1


def test_counters_that_cannot_be_end_the_channel(way):
    way.channel.submit.data.add(9)
    with pytest.raises(RingProtocolError, match="announced 9 slots, the ring holds 8"):
        way.inbox.drain(way.asked)


def test_a_glance_takes_what_was_written_and_reads_no_counter_while_there_is_nothing(way):
    words = way.channel.submit.segment.words()
    for req_id in range(1, 30):
        assert way.inbox.glance(way.asked) == 0
        way.put(submit_of(req_id), submit_of(100 + req_id))
        assert way.inbox.glance(way.asked) == 2
    assert [call[1] for call in way.asked.calls[:4]] == [1, 101, 2, 102]
    assert words[L.W_WAKEUPS] == 29 and words[L.W_EMPTY_WAKEUPS] == 0


def test_glances_find_out_a_peer_whose_cursor_stands_still(way):
    way.channel.submit.data.add(9)
    for _ in range(MOST_GLANCES):
        assert way.inbox.glance(way.asked) == 0
    with pytest.raises(RingProtocolError, match="announced 9 slots, the ring holds 8"):
        way.inbox.glance(way.asked)


def test_consumer_end_is_taken(way):
    with pytest.raises(OSError, match="taken"):
        Inbox(way.channel)


def test_its_descriptor_is_readable_only_while_records_wait(way):
    poll = select.poll()
    poll.register(way.inbox.data_fd, select.POLLIN)
    assert poll.poll(0) == []
    way.put(submit_of(1))
    assert poll.poll(0)
    way.drain()
    assert poll.poll(0) == []
    assert way.channel.submit.segment.words()[L.W_READ_CURSOR] == 1


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.tuples(st.sampled_from(SubmitKind), st.binary(max_size=300)),
            st.integers(1, 2600),
        ),
        max_size=12,
    )
)
def test_whatever_is_written_each_submit_is_answered_once(units):
    """Noise, noise under each kind, and real requests: as many answers as records that say SUBMIT at a place for one."""
    with Way(slots=64) as way:
        real = []
        for number, unit in enumerate(units, 1):
            if isinstance(unit, int):
                real.append(number)
                way.put(submit_of(number, unit))
            elif isinstance(unit, bytes):
                way.put(unit.ljust(SUBMIT_SLOT_BYTES, b"\0"))
            else:
                kind, noise = unit
                head = number.to_bytes(8, "little") + bytes([kind, 0, 1, 0])
                way.put((head + noise).ljust(SUBMIT_SLOT_BYTES, b"\0"))
        calls = way.drain()
        submitted = [request.req_id for request in way.asked.requests]
        answered = [call[1] for call in calls if call[0] in ("submit", "refuse")]
        assert set(real) <= set(submitted)
        named = [n for n, unit in enumerate(units, 1) if not isinstance(unit, bytes)]
        for number in named:
            unit = units[number - 1]
            is_submit = isinstance(unit, int) or unit[0] == SubmitKind.SUBMIT
            assert answered.count(number) - is_submit == 0 or number in map(id_of_noise, units)


def id_of_noise(unit) -> int:
    """The req_id that pure noise happens to claim."""
    return int.from_bytes(unit[:8].ljust(8, b"\0"), "little") if isinstance(unit, bytes) else -1
