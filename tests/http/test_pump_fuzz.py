"""The pump against a worker that writes anything: each bad record is counted and ends its own request, and the pump goes on.

The worker's end of the rings is the test. What may not happen, whatever it writes: an exception out of the event loop's callback, a slot
that is not given back, a token that is none of ours on the wire, a request that waits for ever, or one that suffers from another's.
"""

import asyncio
import itertools
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from puppet import Rings, finish_record, started_record, tokens_record, until

from shmserve.config import RingConfig
from shmserve.http.direct import direct_path
from shmserve.http.logprobs import LogprobLog
from shmserve.http.pump import MOST_BAD_RECORDS
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.logprobs import PAIRS_PER_SLOT
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TokenKind

VOCAB = 64
PIECES = [bytes([65 + i % 26]) for i in range(VOCAB)]
_numbers = itertools.count(1)


class Wired(Rings):
    """A front end with a small vocabulary, whose event loop may have no complaint."""

    def __init__(self):
        super().__init__(RingConfig(token_slots=256, submit_slots=64))
        self.client.vocab_size = VOCAB
        self.link.close("made anew with a vocabulary")
        self.connect()
        self.complaints = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self.complaints.append(context)
        )
        self.sent = {}

    async def entry(self, kind):
        """A request in flight: one that waits for its end, a stream that the pump writes by itself, or one with logprobs."""
        entry = await self.submit()
        if kind == "direct":
            sent = self.sent[entry.req_id] = []

            def send(frame):
                sent.append(frame)
                return len(frame)

            entry.direct = direct_path(b"<", b">", False, PIECES, 1, send, lambda *_: None)
        elif kind == "logprobs":
            entry.logprobs = LogprobLog()
        self.take()
        return entry

    async def quiet(self):
        """Everything that was announced has been handled, and every slot given back; or the channel was given up."""
        capacity = self.producer.capacity
        await until(
            lambda: self.producer.free(capacity) == capacity or self.link.channel is None,
            "all slots come back",
        )
        assert self.complaints == []


def pairs_record(req_id, kind, count, token_id):
    record = bytearray(tokens_record(req_id, [token_id]))
    record[20], record[21] = kind, count
    return bytes(record)


RECORDS = st.sampled_from(["tokens", "one", "started", "finish", "message", "top", "prompt"])


def record_of(kind, req_id):
    if kind == "tokens":
        return tokens_record(req_id, range(8))
    if kind == "one":
        return tokens_record(req_id, [5])
    if kind == "started":
        return started_record(req_id)
    if kind == "finish":
        return finish_record(req_id)
    if kind == "message":
        return pack_message(req_id, "what went wrong", time_ns=1)
    what = TokenKind.TOP_LOGPROBS if kind == "top" else TokenKind.PROMPT_LOGPROBS
    return pairs_record(req_id, what, PAIRS_PER_SLOT, 3)


BEHIND_ID = st.lists(
    st.tuples(st.integers(8, TOKEN_SLOT_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=6
)
WRITTEN = st.one_of(
    st.binary(min_size=TOKEN_SLOT_BYTES, max_size=TOKEN_SLOT_BYTES),
    st.tuples(RECORDS, st.just([])),
    st.tuples(RECORDS, BEHIND_ID),
    st.tuples(st.just("noise"), st.binary(min_size=120, max_size=120)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(st.sampled_from(["plain", "direct", "logprobs"]), min_size=1, max_size=4),
    written=st.lists(st.tuples(WRITTEN, st.integers(0, 3)), min_size=1, max_size=40),
)
def test_whatever_a_worker_writes_is_counted_and_hurts_its_request_alone(kinds, written):
    """Noise, noise under the id of a living request, and good records with bytes of them changed."""

    async def scenario():
        async with Wired() as rings:
            victims = [await rings.entry(kind) for kind in kinds]
            bystander = await rings.entry("direct")
            batch = []
            for what, whose in written:
                req_id = victims[whose % len(victims)].req_id
                if isinstance(what, bytes):
                    batch.append(what)
                elif what[0] == "noise":
                    batch.append(req_id.to_bytes(8, "little") + what[1])
                else:
                    record = bytearray(record_of(what[0], req_id))
                    for at, value in what[1]:
                        record[at] = value
                    batch.append(bytes(record))
                batch.append(tokens_record(bystander.req_id, [7]))
            for start in range(0, len(batch), 64):
                if rings.link.channel is None:
                    break
                rings.put(*batch[start : start + 64])
                await rings.quiet()
            num_bad = rings.board["num_bad_records"]
            if num_bad >= MOST_BAD_RECORDS:
                await until(lambda: rings.link.channel is None, "the channel is given up")
                assert all(entry.is_over for entry in victims)
                return
            assert not bystander.is_over
            assert rings.sent[bystander.req_id] == [b"<" + PIECES[7] + b">"] * len(written)
            assert num_bad == 0 or any(entry.is_over for entry in victims)
            for entry in victims:
                assert all(0 <= token_id < VOCAB for token_id in entry.token_ids)
                rings.put(finish_record(entry.req_id))
            rings.put(finish_record(bystander.req_id))
            await rings.quiet()
            assert not rings.client.in_flight, "every request has its end, and its place is free"
            rings.link.fold_times()
            assert all(rings.board.histograms[name] for name in ("hop_pop_us", "itl_wire_us"))

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(scenario())
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["data", "credits", "records"]),
            st.one_of(
                st.integers(1, 40), st.integers(200, 300), st.sampled_from([1 << 20, 1 << 62])
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_the_counters_say_the_loop_goes_on_and_a_lie_ends_the_channel(steps):
    async def scenario():
        async with Wired() as rings:
            entry = await rings.entry("plain")
            owed = credits = 0
            for what, count in steps:
                if rings.link.channel is None:
                    break
                if what == "records":
                    records = [tokens_record(entry.req_id, [1])] * min(count, 40)
                    if not owed:
                        rings.put(*records)
                elif what == "data":
                    rings.channel.tokens.data.add(count)
                    owed += count
                elif credits < 1 << 62:
                    rings.channel.submit.credits.add(count)
                    credits += count
                for _ in range(6):
                    await asyncio.sleep(0)
                assert rings.complaints == []
            if rings.link.channel is not None and credits > rings.config.submit_slots:
                # Found out when they are needed. (A smaller lie is the liar's loss: what it has not read is written over.)
                with pytest.raises(Exception, match=r"worker|gave back"):
                    for _ in range(rings.config.submit_slots + 1):
                        await asyncio.wait_for(rings.submit(), 20)
                await until(lambda: rings.link.channel is None, "the channel is given up")
                assert entry.is_over
            assert rings.complaints == []

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(scenario())
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("token_id", [VOCAB, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("kind", ["plain", "direct", "logprobs"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_id_outside_the_vocabulary_is_never_text(kind, token_id, count):
    async def scenario():
        async with Wired() as rings:
            entry, other = await rings.entry(kind), await rings.entry("direct")
            rings.put(
                tokens_record(entry.req_id, [2]),
                tokens_record(entry.req_id, [1] * (count - 1) + [token_id], 1),
                tokens_record(other.req_id, [3]),
            )
            await rings.quiet()
            assert entry.error.status == 500
            assert rings.sent.get(entry.req_id, []) in ([], [b"<C>"])
            assert rings.sent[other.req_id] == [b"<D>"]
            assert rings.board["num_bad_records"] == 1

    asyncio.run(scenario())


def test_a_finish_that_cannot_be_is_an_end_all_the_same():
    """No other will come for it: its place in the table must not be lost."""

    async def scenario():
        async with Wired() as rings:
            for changes in ({"finish": 99}, {"cached_tokens": 5}, {"matched_stop": -7}, {"finish": 1},
                            {"stamps": (0, 0, 2**63, 0, 0)}, {"time_ns": 2**64 - 1}):  # fmt: skip
                entry = await rings.entry("plain")
                changes = {"time_ns": 1} | changes
                rings.put(pack_finish(TokenKind.FINISH, entry.req_id, step=1, **changes))
                await rings.quiet()
                assert entry.error.status == 500, changes
            assert not rings.client.in_flight
            assert rings.board["num_bad_records"] == 6

    asyncio.run(scenario())


def test_a_counter_that_the_worker_has_filled_ends_the_channel():
    """It takes the credits: with its counter full we could give none back, and eventfd says so by an error."""

    async def scenario():
        async with Wired() as rings:
            entry = await rings.entry("plain")
            rings.channel.tokens.credits.add(2**64 - 2)
            rings.put(tokens_record(entry.req_id, [1]))
            await until(lambda: rings.link.channel is None, "the channel is given up")
            assert entry.is_over and rings.complaints == []

    asyncio.run(scenario())


def test_a_fault_of_our_own_ends_the_channel_and_every_stream_on_it():
    async def scenario():
        async with Wired() as rings:
            entries = [await rings.entry("direct") for _ in range(2)]

            def fail(*_: object) -> None:
                raise ZeroDivisionError("a fault of ours")

            rings.client.times.note_turn = fail
            rings.put(tokens_record(entries[0].req_id, [1]))
            await until(lambda: rings.link.channel is None, "the channel is given up")
            assert [entry.error.status for entry in entries] == [503, 503]
            assert "a fault of ours" in entries[1].error.message and rings.complaints == []

    asyncio.run(scenario())


def test_a_fault_of_our_own_costs_the_times_of_its_channel_and_not_those_of_the_next():
    """What the turn that broke off had written was noted; all that came behind it would be told wrong, or not at all."""

    async def scenario():
        async with Wired() as rings:
            entries = [await rings.entry("direct") for _ in range(3)]
            note_turn = rings.client.times.note_turn

            def fail(*_: object) -> None:
                raise ZeroDivisionError("a fault of ours")

            rings.client.times.note_turn = fail
            rings.put(*(tokens_record(entry.req_id, [1]) for entry in entries))
            await until(lambda: rings.link.channel is None, "the channel is given up")
            rings.client.times.note_turn = note_turn
            rings.connect()
            entries = [await rings.entry("direct") for _ in range(2)]
            rings.put(*(tokens_record(entry.req_id, [1]) for entry in entries))
            await rings.quiet()
            rings.link.fold_times()
            assert rings.board.histograms["hop_write_us"].cells()[-2] == 2

    asyncio.run(scenario())


def test_a_message_without_an_end_is_bounded():
    async def scenario():
        async with Wired() as rings:
            entry = await rings.entry("plain")
            for _ in range(100):
                rings.put(pack_message(entry.req_id, "x" * 380, time_ns=1))
                await rings.quiet()
            rings.put(finish_record(entry.req_id, 6))
            await rings.quiet()
            assert 380 < len(entry.error.message) <= 4_096

    asyncio.run(scenario())


def test_times_that_cannot_be_leave_the_histograms_sound():
    async def scenario():
        async with Wired() as rings:
            entry = await rings.entry("direct")
            for time_ns in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
                record = bytearray(tokens_record(entry.req_id, [1]))
                record[8:16] = time_ns.to_bytes(8, "little")
                record[64:68] = b"\xff\xff\xff\xff"
                rings.put(bytes(record))
            await rings.quiet()
            rings.link.fold_times()
            assert len(rings.sent[entry.req_id]) == 5
            for histogram in ("hop_publish_us", "hop_pop_us"):
                cells = rings.board.histograms[histogram]._cells.tolist()
                assert cells[-2] == 5 and cells[-1] <= 5 * 3_600_000_000

    asyncio.run(scenario())
