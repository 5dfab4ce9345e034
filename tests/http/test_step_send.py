"""The pump with an io_uring and without: the same bytes on each connection, whatever comes in whatever order."""

import asyncio
import socket
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppet import Rings, finish_record, started_record, tokens_record, until

from shmserve.config import RingConfig
from shmserve.http.detokenizer import ClearPieces
from shmserve.http.direct import direct_path
from shmserve.http.interval_log import IntervalLog
from shmserve.http.logprob_send import LogprobPath
from shmserve.http.pump import RECORDS_PER_TURN
from shmserve.http.step_send import FEWEST_SENDS, StepSender
from shmserve.http.uring import MOST_SENDS, SendRing
from shmserve.http.ways import Marks
from shmserve.wire.logprobs import pack_top_logprobs

VOCAB = 64
PIECES = [b"" if i == 7 else b"%d;" % i for i in range(VOCAB)]  # 7 has no text of its own
NUM_STREAMS = 2 * FEWEST_SENDS


@pytest.fixture(scope="module", autouse=True)
def io_uring():
    try:
        SendRing().close()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


class Streams(Rings):
    """Streams that the pump writes by itself, each to a socket of its own."""

    def __init__(self, ring: SendRing | None):
        super().__init__(RingConfig(token_slots=1024, submit_slots=64))
        self.link.close("made anew")
        self.client.vocab_size = VOCAB
        self.ring = ring
        if ring is not None:
            self.client.step_sender = StepSender(ring, self.client.table, self.client.times, PIECES)
        self.connect()
        self.entries, self.sockets, self.slow, self.spilt = [], [], [], []

    async def add(self, *, may_go_together: bool = True, stop: bytes = b"") -> None:
        entry = await self.submit()
        self.take()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def spill(frame: bytes, sent: int) -> None:
            self.spilt.append((entry, frame, sent))
            entry.direct = None

        fd = ours.fileno() if may_go_together else -1
        pieces = ClearPieces(PIECES, PIECES.__getitem__, Marks((stop,))) if stop else PIECES
        entry.direct = direct_path(b"<", b">", True, pieces, 3, ours.send, spill, fd)
        entry.on_tokens = lambda entry: self.slow.append((entry.index, entry.token_ids.copy()))
        self.entries.append(entry)
        self.sockets.append((ours, theirs))

    async def settle(self) -> None:
        capacity = self.producer.capacity
        await until(lambda: self.producer.free(capacity) == capacity, "all slots come back")

    def read(self, stream: int) -> bytes:
        try:
            return self.sockets[stream][1].recv(1 << 20)
        except BlockingIOError:
            return b""

    async def __aexit__(self, *raised: object) -> None:
        await super().__aexit__(*raised)
        for both in self.sockets:
            for one in both:
                one.close()
        if self.ring is not None:
            self.ring.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, VOCAB + 3)),
        st.tuples(st.just("some"), st.integers(0, NUM_STREAMS - 1)),
        st.tuples(st.just("again"), st.integers(0, NUM_STREAMS - 1)),
        st.tuples(st.just("two tokens"), st.integers(0, NUM_STREAMS - 1)),
        st.tuples(st.just("started"), st.integers(0, NUM_STREAMS - 1)),
        st.tuples(st.just("finish"), st.integers(0, NUM_STREAMS - 1)),
        st.tuples(st.just("wait"), st.just(0)),
    ),
    min_size=1,
    max_size=16,
)


async def outcome(steps, ring):
    """What came to each socket, what went another way, and the counts on the board."""
    async with Streams(ring) as streams:
        for i in range(NUM_STREAMS):
            stop = b"1;" if i % 8 == 2 else b""  # such a token is the slow way's
            await streams.add(may_go_together=i % 8 != 5, stop=stop)
        ids = [entry.req_id for entry in streams.entries]
        for kind, number in steps:
            if kind == "step":
                records = [tokens_record(x, [(number + k) % 61]) for k, x in enumerate(ids)]
                if number >= VOCAB:  # an id beyond the vocabulary ends its own stream only
                    records[3] = tokens_record(ids[3], [number])
                streams.put(*records)
            elif kind == "some":
                streams.put(*(tokens_record(x, [number]) for x in ids[number:]))
            elif kind == "again":
                streams.put(*(tokens_record(ids[number], [k]) for k in (1, 2, 3)))
            elif kind == "two tokens":
                streams.put(tokens_record(ids[number], [4, 5]))
            elif kind == "started":
                streams.put(started_record(ids[number]))
            elif kind == "finish":
                streams.put(finish_record(ids[number]))
            else:
                await asyncio.sleep(0)
        await streams.settle()
        streams.client.times.fold()
        counts = [streams.board[word] for word in ("tokens", "frames", "num_bad_records")]
        intervals = int(streams.board.histograms["itl_wire_us"].cells()[-2])
        return [streams.read(i) for i in range(NUM_STREAMS)], streams.slow, counts, intervals


@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_each_connection_gets_the_same_bytes_with_an_io_uring_and_without(steps):
    assert asyncio.run(outcome(steps, SendRing())) == asyncio.run(outcome(steps, None))


def test_a_whole_step_goes_in_one_call_and_each_step_in_its_own():
    async def main():
        async with Streams(SendRing()) as streams:
            for _ in range(NUM_STREAMS):
                await streams.add()
            calls = []
            send = streams.ring.send
            streams.ring.send = lambda fds: (calls.append(len(fds)), send(fds))[1]
            ids = [entry.req_id for entry in streams.entries]
            streams.put(*(tokens_record(x, [k]) for k in (1, 2, 3) for x in ids))
            await streams.settle()
            assert calls == [NUM_STREAMS] * 3
            frames = b"".join(b"4\r\n<%d;>\r\n" % k for k in (1, 2, 3))
            assert [streams.read(i) for i in range(NUM_STREAMS)] == [frames] * NUM_STREAMS

    asyncio.run(main())


def test_streams_with_stop_strings_go_with_the_others_but_for_tokens_that_touch_one():
    async def main():
        async with Streams(SendRing()) as streams:
            for i in range(NUM_STREAMS):
                await streams.add(stop=b"2;" if i < 4 else b"")
            calls = []
            send = streams.ring.send
            streams.ring.send = lambda fds: (calls.append(len(fds)), send(fds))[1]
            streams.put(*(tokens_record(x.req_id, [k]) for k in (1, 2, 3) for x in streams.entries))
            await streams.settle()
            assert calls == [NUM_STREAMS, NUM_STREAMS - 4, NUM_STREAMS]
            assert streams.slow == [(0, [2])] * 4
            assert streams.read(0) == b"4\r\n<1;>\r\n4\r\n<3;>\r\n"

    asyncio.run(main())


class Frames:
    """Of a stream with logprobs: the shortest there is."""

    front, middle, back, num_top = b"<", b"|", b">", 1

    def logprobs(self, token_id, numbers, top_ids):
        return b"%b %d" % (b",".join(numbers), *top_ids)


def test_a_stream_with_logprobs_takes_two_records_a_token_and_the_others_still_go_together():
    async def main():
        async with Streams(SendRing()) as streams:
            for _ in range(NUM_STREAMS):
                await streams.add()
            entry, sent = streams.entries[1], []

            def note(frame):
                sent.append(frame)
                return len(frame)

            entry.direct = LogprobPath(Frames(), PIECES, False, note, None)
            calls = []
            send = streams.ring.send
            streams.ring.send = lambda fds: (calls.append(len(fds)), send(fds))[1]
            for k in (1, 2):
                records = [tokens_record(x.req_id, [k]) for x in streams.entries]
                numbers = np.array([-0.5], np.float32)
                top = pack_top_logprobs(entry.req_id, k, np.array([k + 2], np.int32), numbers, 1)
                records.insert(1, top)
                streams.put(*records)
            await streams.settle()
            assert calls == [NUM_STREAMS - 1] * 2
            assert sent == [b"<1;|0.0,-0.5 3>", b"<2;|0.0,-0.5 4>"]
            assert streams.slow == []
            assert streams.board["tokens"] == streams.board["frames"] == 2 * NUM_STREAMS

    asyncio.run(main())


def test_a_frame_that_was_not_sent_whole_goes_to_whoever_takes_over_and_so_does_all_behind_it():
    async def main():
        async with Streams(SendRing()) as streams:
            for _ in range(NUM_STREAMS):
                await streams.add()
            stuck, gone = 2, 9
            try:
                while True:
                    streams.sockets[stuck][0].send(b"." * 4096)
            except BlockingIOError:
                pass
            streams.sockets[gone][1].close()
            ids = [entry.req_id for entry in streams.entries]
            streams.put(*(tokens_record(x, [k]) for k in (1, 2) for x in ids))
            await streams.settle()
            assert streams.spilt == [
                (streams.entries[stuck], b"4\r\n<1;>\r\n", 0),
                (streams.entries[gone], b"4\r\n<1;>\r\n", -1),
            ]
            assert [ids for _, ids in streams.slow] == [[2], [2]]
            assert streams.read(0) == b"4\r\n<1;>\r\n4\r\n<2;>\r\n"

    asyncio.run(main())


def test_an_io_uring_that_fails_is_said_once_and_tokens_go_one_by_one(caplog):
    async def main():
        async with Streams(SendRing()) as streams:
            for _ in range(NUM_STREAMS):
                await streams.add()
            ids = [entry.req_id for entry in streams.entries]
            streams.ring._enter = lambda num_left, num_awaited: -95
            for _ in range(3):
                streams.put(*(tokens_record(x, [1]) for x in ids))
                await streams.settle()
            # Each frame of the failed call is taken over whole: none was sent.
            assert [(frame, sent) for _, frame, sent in streams.spilt] == [
                (b"4\r\n<1;>\r\n", 0)
            ] * NUM_STREAMS
            assert len(streams.slow) == 2 * NUM_STREAMS

    asyncio.run(main())
    assert [record.message for record in caplog.records if "io_uring" in record.message] == [
        "io_uring_enter: Operation not supported; tokens are sent one by one from now on"
    ]


def test_a_turn_of_the_pump_fits_in_one_call():
    assert RECORDS_PER_TURN <= MOST_SENDS


def test_the_time_between_tokens_is_noted_for_the_stream_that_it_is_of():
    """Some go together and the others one by one behind them: not in the order of the ring."""

    async def main():
        async with Streams(SendRing()) as streams:
            for i in range(NUM_STREAMS):
                await streams.add(may_go_together=i % 8 != 5)
            times, table = streams.client.times, streams.client.table
            times.intervals = IntervalLog(table.size)
            rows, now_ns = [], time.monotonic_ns()
            for i, entry in enumerate(streams.entries):
                rows.append(times.intervals.take_row())
                times.intervals.row_of_place[entry.place] = rows[i]
                entry.last_written_ns = now_ns - (12_000_000_000 if i % 8 == 5 else 1_000_000_000)
            streams.put(*(tokens_record(x.req_id, [1]) for x in streams.entries))
            await streams.settle()
            times.fold()
            medians = [times.intervals.quantiles_ms(row, (0.5,)) for row in rows]
            late = [i for i, median in enumerate(medians) if median[0] > 10_000]
            assert late == list(range(5, NUM_STREAMS, 8))

    asyncio.run(main())
