"""What happens to records when the ring is full: each policy by its own law, and the law that all share."""

import itertools
import random

import numpy as np
import pytest

from shmserve.rings import layout as L
from shmserve.rings.policy import Blocking, Coalescing, Dropping, RingWriter
from shmserve.rings.spsc import RingProtocolError

NOTE = np.dtype(
    [("key", "<u8"), ("count", "<u8"), ("indices", "<u8", (8,)), ("times", "<u8", (8,))]
)
"""A record with up to eight marks of one key, as a token slot has tokens: each with its index and its own time."""


def time_of(key: int, index: int) -> int:
    return key * 1_000_000 + index * 7 + 1


def note(key: int, index: int, count: int = 1) -> bytes:
    record = np.zeros((), NOTE)
    record["key"], record["count"] = key, count
    record["indices"][:count] = range(index, index + count)
    record["times"][:count] = [time_of(key, i) for i in range(index, index + count)]
    return record.tobytes()


def marks(slots: list[bytes]) -> list[tuple[int, int]]:
    """(key, index) of every mark, in ring order; each must have kept its own time."""
    out = []
    for record in np.frombuffer(b"".join(slots), NOTE):
        for at in range(int(record["count"])):
            key, index = int(record["key"]), int(record["indices"][at])
            assert record["times"][at] == time_of(key, index)
            out.append((key, index))
    return out


def fold_notes(pending: bytearray, arriving: memoryview) -> bool:
    a, b = np.frombuffer(pending, NOTE), np.frombuffer(arriving, NOTE)
    have, more = int(a["count"][0]), int(b["count"][0])
    assert a["key"] == b["key"]
    if have + more > 8:
        return False
    for field in ("indices", "times"):
        a[field][0][have : have + more] = b[field][0][:more]
    a["count"][0] += more
    return True


def weigh_notes(slot: memoryview | bytearray) -> int:
    return int.from_bytes(slot[8:16], "little")


@pytest.fixture
def ring(bare_ring):
    """A ring of four notes."""
    return bare_ring(4, NOTE.itemsize)


@pytest.fixture
def stamps():
    return []


@pytest.fixture
def coalescing(ring, stamps):
    return Coalescing(
        ring.producer,
        fold=fold_notes,
        weigh=weigh_notes,
        stamp=lambda slots, now_ns: stamps.append((bytes(slots), now_ns)),
    )


@pytest.fixture
def dropping(ring):
    return Dropping(ring.producer, weigh=weigh_notes)


def write(writer, *notes: tuple[int, int]) -> list[int]:
    records = b"".join(note(key, index) for key, index in notes)
    return writer.write(memoryview(records), [key for key, _ in notes])


def fill(writer) -> None:
    """Leave no free slot; the keys are 90, 91, 92, 93."""
    assert write(writer, (90, 0), (91, 0), (92, 0), (93, 0)) == []
    assert writer.producer.num_free == 0


FILLING = [(90, 0), (91, 0), (92, 0), (93, 0)]


# All policies


@pytest.mark.parametrize("policy", [Coalescing, Dropping])
def test_batch_that_fits_is_one_publish_and_leaves_no_trace_of_the_policy(ring, policy):
    writer = policy(ring.producer)
    assert write(writer, (1, 0), (2, 0), (3, 0)) == []
    assert marks(ring.read()) == [(1, 0), (2, 0), (3, 0)]
    assert ring.words[L.W_PUBLISHES] == 1
    for word in (L.W_COALESCED, L.W_DROPPED, L.W_BLOCKED_NS, L.W_PENDING, L.W_REFUSED):
        assert ring.words[word] == 0
    assert not writer.is_starved


@pytest.mark.parametrize("policy", [Coalescing, Dropping])
def test_writing_nothing_publishes_nothing(ring, policy):
    writer = policy(ring.producer)
    assert writer.write(memoryview(b""), []) == []
    assert ring.words[L.W_PUBLISHES] == 0
    fill(writer)
    assert writer.write(memoryview(b""), []) == []
    assert ring.words[L.W_PUBLISHES] == 1


@pytest.mark.parametrize("policy", [Coalescing, Dropping])
def test_unit_larger_than_the_ring_is_a_mistake_of_the_caller(ring, policy):
    with pytest.raises(AssertionError):
        policy(ring.producer).keep(1, note(1, 0) * 5)


def test_bare_writer_has_no_answer_to_a_full_ring(ring):
    writer = RingWriter(ring.producer)
    fill(writer)
    with pytest.raises(NotImplementedError):
        write(writer, (1, 0))


# Coalescing


def test_coalescing_never_waits_and_drops_nothing(coalescing, ring):
    fill(coalescing)
    for index in range(20):
        assert write(coalescing, (1, index), (2, index)) == []
    assert coalescing.pending_weight == 40
    assert coalescing.pending_slots == 6  # 20 marks fold into 8 + 8 + 4, for each key
    got = marks(ring.read())
    while coalescing.flush():
        got += marks(ring.read())
    assert got[:4] == FILLING
    assert [mark for mark in got if mark[0] == 1] == [(1, i) for i in range(20)]
    assert [mark for mark in got if mark[0] == 2] == [(2, i) for i in range(20)]
    assert len(got) == 44
    assert ring.words[L.W_COALESCED] == 34
    assert ring.words[L.W_WRITE_CURSOR] == 44 - 34


def test_folding_is_only_into_the_record_just_before(coalescing, ring):
    """A record that cannot be folded stands between: what follows it must not jump ahead of it."""
    fill(coalescing)
    write(coalescing, (1, 0))
    coalescing.keep(1, note(1, 1, 8))  # full: nothing folds into it
    write(coalescing, (1, 9))
    write(coalescing, (1, 10))
    assert coalescing.pending_slots == 3
    ring.read()
    assert coalescing.flush() == 3
    assert marks(ring.read()) == [(1, i) for i in range(11)]


def test_nothing_is_folded_into_a_unit_of_several_slots(coalescing, ring):
    fill(coalescing)
    coalescing.keep(1, note(1, 0) + note(1, 1))
    write(coalescing, (1, 2))
    assert coalescing.pending_slots == 3
    assert ring.words[L.W_COALESCED] == 0


def test_record_is_not_changed_by_what_its_source_becomes(coalescing, ring):
    """The caller reuses its batch array every step."""
    fill(coalescing)
    records = bytearray(note(1, 0))
    coalescing.write(memoryview(records), [1])
    records[:] = bytes(len(records))
    ring.read()
    coalescing.flush()
    assert marks(ring.read()) == [(1, 0)]


def test_key_with_something_pending_never_writes_past_it(coalescing, ring):
    fill(coalescing)
    coalescing.keep(1, note(1, 0) + note(1, 1))
    ring.read(1)  # one slot free: not enough for the unit, enough for a single record
    write(coalescing, (1, 2), (2, 0))
    assert marks(ring.read()) == [*FILLING[1:], (2, 0)]  # key 2 passed, key 1 stayed behind
    coalescing.flush()
    assert marks(ring.read()) == [(1, 0), (1, 1), (1, 2)]


def test_records_of_one_key_in_one_batch_stay_in_order_when_only_the_first_fits(coalescing, ring):
    write(coalescing, (90, 0), (91, 0), (92, 0))
    write(coalescing, (1, 0), (1, 1), (1, 2))
    assert marks(ring.read()) == [*FILLING[:3], (1, 0)]
    assert coalescing.pending_of(1) == 2
    coalescing.flush()
    assert marks(ring.read()) == [(1, 1), (1, 2)]


def test_flush_goes_oldest_key_first_and_in_one_publish(coalescing, ring):
    fill(coalescing)
    write(coalescing, (3, 0))
    write(coalescing, (1, 0))
    write(coalescing, (2, 0))
    write(coalescing, (3, 1))
    num_publishes = ring.words[L.W_PUBLISHES]
    assert coalescing.flush() == 0
    assert ring.words[L.W_PUBLISHES] == num_publishes
    ring.read()
    assert coalescing.flush() == 3
    assert ring.words[L.W_PUBLISHES] == num_publishes + 1
    assert marks(ring.read()) == [(3, 0), (3, 1), (1, 0), (2, 0)]


def test_flush_takes_what_fits_and_keeps_the_rest_in_its_turn(coalescing, ring):
    fill(coalescing)
    for key in (1, 2, 3):
        write(coalescing, (key, 0))
    ring.read(2)
    assert coalescing.flush() == 2
    assert coalescing.pending_keys == [3]
    write(coalescing, (1, 1))  # key 1 has nothing pending any more: it queues behind 3
    assert coalescing.pending_keys == [3, 1]
    ring.read()
    coalescing.flush()
    assert marks(ring.read()) == [(3, 0), (1, 1)]


def test_waiting_records_go_before_new_ones(coalescing, ring):
    fill(coalescing)
    write(coalescing, (1, 0))
    ring.read()
    write(coalescing, (2, 0))
    assert marks(ring.read()) == [(1, 0), (2, 0)]


def test_heaviest_names_the_keys_with_most_waiting(coalescing, ring):
    fill(coalescing)
    for key, count in ((1, 3), (2, 9), (3, 5)):
        for index in range(count):
            write(coalescing, (key, index))
    assert coalescing.heaviest(2) == [2, 3]
    assert coalescing.heaviest(9) == [2, 3, 1]
    assert [coalescing.pending_of(key) for key in (1, 2, 3, 4)] == [3, 9, 5, 0]
    assert coalescing.pending_weight == 17


def test_pending_gauge_follows_the_slots_that_wait(coalescing, ring):
    seen = []
    fill(coalescing)
    for index in range(9):
        write(coalescing, (1, index))
    seen.append(ring.words[L.W_PENDING])
    coalescing.keep(2, note(2, 0) + note(2, 1))
    seen.append(ring.words[L.W_PENDING])
    ring.read(1)
    coalescing.flush()
    seen.append(ring.words[L.W_PENDING])
    coalescing.cancel(1)
    seen.append(ring.words[L.W_PENDING])
    ring.read()
    coalescing.flush()
    seen.append(ring.words[L.W_PENDING])
    assert seen == [2, 4, 3, 2, 0]


def test_only_records_that_waited_are_stamped_and_at_the_moment_they_are_written(
    coalescing, ring, stamps
):
    fill(coalescing)
    write(coalescing, (1, 0))
    write(coalescing, (1, 1))
    assert stamps == []
    ring.read()
    coalescing.flush()
    assert [slots for slots, _ in stamps] == [note(1, 0, 2)]
    write(coalescing, (2, 0))
    assert len(stamps) == 1


def test_is_starved_exactly_while_something_waits(coalescing, ring):
    fill(coalescing)
    assert (
        not coalescing.is_starved
    )  # full, but nobody waits: the credit descriptor stays unwatched
    write(coalescing, (1, 0))
    assert coalescing.is_starved
    ring.read()
    coalescing.flush()
    assert not coalescing.is_starved


def test_cancel_forgets_what_a_key_has_waiting_and_counts_it(coalescing, ring):
    fill(coalescing)
    for index in range(10):
        write(coalescing, (1, index), (2, index))
    folded = ring.words[L.W_COALESCED]
    assert coalescing.cancel(1) == 2
    assert coalescing.cancel(1) == 0
    assert coalescing.pending_keys == [2]
    assert coalescing.pending_weight == 10
    assert ring.words[L.W_COALESCED] == folded + 2
    ring.read()
    coalescing.flush()
    assert marks(ring.read()) == [(2, index) for index in range(10)]


def test_broken_credits_surface_through_the_policy(coalescing, ring):
    fill(coalescing)
    ring.credits.add(5)
    with pytest.raises(RingProtocolError):
        write(coalescing, (1, 0))


# Units


def test_unit_is_written_whole_or_not_at_all(coalescing, ring):
    fill(coalescing)
    unit = note(1, 0) + note(1, 1) + note(1, 2)
    assert not coalescing.try_unit(unit, 3)
    coalescing.keep(2, unit)
    for num_free in (1, 2):
        ring.read(1)
        assert coalescing.flush() == 0, num_free
        assert ring.words[L.W_CLAIM_CURSOR] == 4
    ring.read(1)
    num_publishes = ring.words[L.W_PUBLISHES]
    assert coalescing.flush() == 3
    assert ring.words[L.W_PUBLISHES] == num_publishes + 1


def test_unit_that_was_refused_is_not_kept(coalescing, ring):
    fill(coalescing)
    assert not coalescing.try_unit(note(1, 0), 1)
    coalescing.refuse()
    assert not coalescing.is_starved
    assert ring.words[L.W_REFUSED] == 1
    ring.read()
    assert coalescing.flush() == 0
    assert ring.read() == []


def test_new_unit_is_refused_while_an_older_one_waits_even_if_it_would_fit(coalescing, ring):
    fill(coalescing)
    coalescing.keep(1, note(1, 0) + note(1, 1))
    ring.read(1)
    assert not coalescing.try_unit(note(2, 0), 1)
    ring.read(2)
    assert coalescing.try_unit(note(2, 0), 1)  # flushes the older one first
    assert marks(ring.read()) == [FILLING[3], (1, 0), (1, 1), (2, 0)]


def test_kept_unit_goes_behind_everything_that_waits(coalescing, ring):
    fill(coalescing)
    write(coalescing, (1, 0))
    coalescing.keep(2, note(2, 0) + note(2, 1))
    ring.read(2)
    coalescing.keep(3, note(3, 0))  # a slot is free after (1, 0), but key 2 has waited longer
    assert coalescing.pending_keys == [2, 3]
    ring.read()
    coalescing.keep(3, note(3, 1))
    assert not coalescing.is_starved  # credits are looked for at once
    assert marks(ring.read()) == [(2, 0), (2, 1), (3, 0), (3, 1)]


# Dropping


def test_dropping_reports_each_key_that_lost_a_record_once(dropping, ring):
    write(dropping, (90, 0), (91, 0), (92, 0))
    assert write(dropping, (1, 0), (2, 0), (3, 0), (2, 1)) == [2, 3]
    assert ring.words[L.W_DROPPED] == 3
    assert not dropping.is_starved
    assert marks(ring.read()) == [*FILLING[:3], (1, 0)]


def test_key_that_lost_a_record_writes_no_more_in_that_batch(dropping, ring):
    """Its text would have a hole: room that comes up later in the batch is not for it."""
    fill(dropping)
    dropping.keep(1, note(1, 0))
    ring.read(1)
    dropping.flush()
    ring.read(2)
    assert write(dropping, (2, 0), (3, 0), (2, 1), (3, 1)) == [2, 3]
    assert marks(ring.read())[-2:] == [(2, 0), (3, 0)]


def test_kept_unit_is_never_dropped(dropping, ring):
    fill(dropping)
    for key in range(20):
        dropping.keep(key, note(key, 0) + note(key, 1))
        assert write(dropping, (50, key)) == [50]
    got = marks(ring.read())
    while dropping.flush():
        got += marks(ring.read())
    assert got[4:] == [(key, i) for key in range(20) for i in (0, 1)]
    assert ring.words[L.W_DROPPED] == 20


def test_record_of_a_key_whose_end_waits_is_dropped_not_written_past_it(dropping, ring):
    fill(dropping)
    dropping.keep(1, note(1, 0) + note(1, 1))
    ring.read(1)
    assert write(dropping, (1, 2)) == [1]
    assert write(dropping, (2, 0)) == []


# Blocking


class Credits:
    """wait_credits over a bare ring: each wait lets the reader handle `per_wait` slots and moves the clock by 1 ms."""

    def __init__(self, ring, monkeypatch, per_wait: int) -> None:
        self.ring = ring
        self.per_wait = per_wait
        self.timeouts: list[float] = []
        self.got: list[bytes] = []
        self.now_ns = 10**9
        monkeypatch.setattr("shmserve.rings.policy.time.monotonic_ns", lambda: self.now_ns)

    def wait(self, timeout_s: float) -> bool:
        self.timeouts.append(timeout_s)
        if not self.per_wait:
            self.now_ns += int(timeout_s * 1e9)
            return False
        self.now_ns += 1_000_000
        self.got += self.ring.read(self.per_wait)
        return bool(self.ring.credits.value)


@pytest.fixture
def blocking(ring, monkeypatch):
    def make(per_wait: int, deadline_s: float = 0.1) -> tuple[Blocking, Credits]:
        credits = Credits(ring, monkeypatch, per_wait)
        writer = Blocking(
            ring.producer,
            wait_credits=credits.wait,
            deadline_s=deadline_s,
            fold=fold_notes,
            weigh=weigh_notes,
        )
        return writer, credits

    return make


def test_blocking_waits_until_the_whole_batch_fits_and_counts_the_time(ring, blocking):
    writer, credits = blocking(per_wait=1)
    fill(writer)
    assert write(writer, (1, 0), (2, 0), (3, 0)) == []
    assert len(credits.timeouts) == 3
    assert ring.words[L.W_BLOCKED_NS] == 3_000_000
    assert not writer.is_starved
    assert ring.words[L.W_COALESCED] == 0
    assert marks(credits.got + ring.read()) == [*FILLING, (1, 0), (2, 0), (3, 0)]


def test_blocking_does_not_wait_while_there_is_room(ring, blocking):
    writer, credits = blocking(per_wait=1)
    fill(writer)
    ring.read()
    write(writer, (1, 0), (2, 0))
    assert credits.timeouts == []
    assert ring.words[L.W_BLOCKED_NS] == 0


def test_blocking_past_its_deadline_coalesces(ring, blocking):
    writer, credits = blocking(per_wait=0)
    fill(writer)
    for index in range(3):
        assert write(writer, (1, index)) == []
    assert credits.timeouts == [0.1, 0.1, 0.1]
    assert ring.words[L.W_BLOCKED_NS] == 300_000_000
    assert ring.words[L.W_COALESCED] == 2
    assert writer.pending_slots == 1
    ring.read()
    writer.flush()
    assert marks(ring.read()) == [(1, 0), (1, 1), (1, 2)]


def test_blocking_deadline_is_for_the_batch_not_for_each_credit(ring, blocking):
    writer, credits = blocking(per_wait=1, deadline_s=0.002)
    fill(writer)
    write(writer, (1, 0), (2, 0), (3, 0), (4, 0))
    assert credits.timeouts == pytest.approx([0.002, 0.001])
    assert ring.words[L.W_BLOCKED_NS] == 2_000_000
    assert marks(credits.got + ring.read()) == [*FILLING, (1, 0), (2, 0)]
    assert writer.pending_keys == [3, 4]


def test_blocking_with_a_batch_larger_than_the_ring_waits_for_an_empty_ring_and_coalesces_the_rest(
    ring, blocking
):
    writer, credits = blocking(per_wait=2)
    fill(writer)
    write(writer, *((key, 0) for key in range(6)))
    assert len(credits.timeouts) == 2
    assert writer.pending_keys == [4, 5]
    ring.read()
    write(writer, (0, 1))
    assert marks(ring.read()) == [(4, 0), (5, 0), (0, 1)]


def test_blocking_sends_what_waits_before_the_new_batch(ring, blocking):
    writer, credits = blocking(per_wait=0)
    fill(writer)
    write(writer, (1, 0))
    credits.per_wait = 1
    write(writer, (1, 1), (2, 0))
    assert marks(credits.got + ring.read()) == [*FILLING, (1, 0), (1, 1), (2, 0)]


# The law


@pytest.mark.parametrize("policy", ["coalesce", "block", "drop"])
@pytest.mark.parametrize("seed", range(20))
def test_offered_is_written_and_pending_and_coalesced_and_dropped(
    bare_ring, monkeypatch, policy, seed
):
    random_ = random.Random(seed)
    ring = bare_ring(8, NOTE.itemsize)
    if policy == "block":
        waits = Credits(ring, monkeypatch, per_wait=random_.choice([0, 1]))
        writer = Blocking(
            ring.producer,
            wait_credits=waits.wait,
            deadline_s=0.002,
            fold=fold_notes,
            weigh=weigh_notes,
        )
        got = waits.got
    else:
        of_name = {"coalesce": Coalescing, "drop": Dropping}
        fold = {"fold": fold_notes} if policy == "coalesce" else {}
        writer = of_name[policy](ring.producer, weigh=weigh_notes, **fold)
        got = []
    fresh = itertools.count(10)
    live = dict.fromkeys(range(6), 0)
    offered_slots, offered_marks, ended = 0, [], {}
    for _ in range(200):
        keys = random_.choices(list(live), k=random_.randint(0, 9))
        notes = []
        for key in keys:
            notes.append((key, live[key]))
            live[key] += 1
        offered_slots += len(notes)
        offered_marks += notes
        dropped = write(writer, *notes)
        assert policy == "drop" or not dropped
        for key in dropped:
            ended[key] = live.pop(key)
            live[next(fresh)] = 0
        if random_.random() < 0.6:
            got += ring.read(random_.randint(0, 8))
        if random_.random() < 0.3:
            writer.flush()
        words = ring.words
        counted = words[L.W_COALESCED] + words[L.W_DROPPED]
        assert offered_slots == words[L.W_WRITE_CURSOR] + writer.pending_slots + counted
        assert words[L.W_PENDING] == writer.pending_slots
        assert writer.pending_weight == sum(map(writer.pending_of, writer.pending_keys))
    got += ring.read()
    while writer.flush():
        got += ring.read()
    seen = marks(got)
    assert len(seen) == len(set(seen)) == len(offered_marks) - ring.words[L.W_DROPPED]
    for key in {key for key, _ in offered_marks}:
        indices = [index for k, index in seen if k == key]
        assert indices == list(range(len(indices))), key  # in order, and never a hole
        if key in live:
            assert len(indices) == live[key]
        else:
            assert len(indices) < ended[key]
    if policy == "drop":
        assert ring.words[L.W_DROPPED] > 0
    else:
        assert ring.words[L.W_COALESCED] > 0
