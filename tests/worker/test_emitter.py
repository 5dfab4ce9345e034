"""The worker's way out, under each policy: one publish a step, nothing out of order, nothing lost that must not be."""

import itertools
import os

import numpy as np
import pytest

from shmserve.config import RingConfig
from shmserve.rings import layout as L
from shmserve.rings.channel import Channel, RingShape
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.logprobs import pack_prompt_logprobs
from shmserve.wire.tokens import TOKEN_SLOT_BYTES, TOKENS_DTYPE, TokenKind, token_key
from shmserve.worker.emitter import Emitter

_numbers = itertools.count()


def finish(req_id: int) -> bytes:
    return pack_finish(TokenKind.FINISH, req_id, time_ns=0, step=0)


def never_dropped(req_id: int) -> bytes:
    raise AssertionError(f"{req_id} was dropped")


class Out:
    """An emitter and the reading end of its ring."""

    def __init__(self, policy="coalesce", slots=4, **rings) -> None:
        instance = f"test{os.getpid()}-emitter{next(_numbers)}"
        self.channel = Channel.create(
            instance, 1, 0, 0, RingShape(4096, 2), RingShape(TOKEN_SLOT_BYTES, slots)
        )
        self.num_waits = 0
        self._wait_credits, self.channel.tokens.wait_credits = (
            self.channel.tokens.wait_credits,
            self.count_wait,
        )
        self.emitter = Emitter(self.channel, RingConfig(token_policy=policy, **rings))
        self.consumer = self.channel.tokens.consumer()
        self.made: dict[int, int] = {}
        self.read_tokens: dict[int, list[int]] = {}
        self.kinds: list[tuple[int, str]] = []

    def count_wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        return self._wait_credits(timeout_s)

    def tokens(self, *req_ids: int) -> np.ndarray:
        """The next token of each request; its id is its index."""
        records = np.zeros(len(req_ids), TOKENS_DTYPE)
        records["kind"], records["count"] = TokenKind.TOKENS, 1
        for record, req_id in zip(records, req_ids, strict=True):
            index = self.made.get(req_id, 0)
            record["req_id"], record["index"] = req_id, index
            record["token_ids"][0] = index
            record["time_ns"] = 1000 * index
            self.made[req_id] = index + 1
        return records

    def publish(self, *req_ids, units=(), end_dropped=never_dropped) -> None:
        self.emitter.publish(self.tokens(*req_ids), list(units), end_dropped)

    def read(self, most=1 << 20) -> list[tuple[int, str]]:
        """(req_id, kind) of up to `most` slots; tokens must come without a hole."""
        out = []
        for _ in range(min(self.consumer.poll(), most)):
            slot = bytes(self.consumer.peek(0))
            self.consumer.release(1)
            req_id, kind = token_key(slot), TokenKind(slot[20])
            out.append((req_id, kind.name))
            if kind is TokenKind.TOKENS:
                record = np.frombuffer(slot, TOKENS_DTYPE)[0]
                got = self.read_tokens.setdefault(req_id, [])
                assert record["index"] == len(got)
                got += record["token_ids"][: record["count"]].tolist()
        self.kinds += out
        return out

    def word(self, word: int) -> int:
        return self.channel.tokens.segment.words()[word]


@pytest.fixture
def out():
    made = []

    def make(*args, **kwargs) -> Out:
        made.append(Out(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.channel.unlink()
        each.channel.close()


def test_a_step_is_one_publish_tokens_first(out):
    o = out(slots=8)
    o.emitter.keep(3, finish(3))
    unit = o.tokens(2).tobytes()
    o.publish(1, 3, units=[(2, unit)])
    assert o.word(L.W_PUBLISHES) == 1
    assert o.read() == [(1, "TOKENS"), (3, "TOKENS"), (2, "TOKENS"), (3, "FINISH")]


def test_a_step_without_records_publishes_nothing(out):
    o = out()
    o.publish()
    o.emitter.flush()
    assert o.word(L.W_PUBLISHES) == 0
    assert not o.emitter.is_starved


def test_what_is_kept_goes_out_with_a_flush_where_no_step_comes(out):
    o = out()
    o.emitter.keep(1, finish(1))
    o.emitter.flush()
    assert o.read() == [(1, "FINISH")]
    o.emitter.flush()
    assert o.read() == []


@pytest.mark.parametrize("policy", ["coalesce", "block", "drop"])
def test_a_finish_waits_for_credits_and_is_never_lost(out, policy):
    o = out(policy, slots=2, block_deadline_s=0)
    for req_id in range(1, 8):
        o.emitter.keep(req_id, finish(req_id))
    o.emitter.flush()
    assert o.emitter.is_starved
    while o.emitter.is_starved:
        o.read(1)
        o.emitter.flush()
    o.read()
    assert o.kinds == [(req_id, "FINISH") for req_id in range(1, 8)]


@pytest.mark.parametrize("policy", ["coalesce", "block", "drop"])
def test_an_answer_longer_than_the_ring_goes_slot_by_slot(out, policy):
    o = out(policy, slots=2, block_deadline_s=0)
    unit = pack_message(1, "x" * 300, time_ns=0) + finish(1)
    o.emitter.keep(1, unit)
    o.publish()
    for _ in range(5):
        o.read()
        o.emitter.flush()
    assert o.kinds == [(1, "MESSAGE")] * 4 + [(1, "FINISH")]


def test_coalesce_loses_nothing_and_merges_what_waits(out):
    o = out("coalesce", slots=2)
    for _ in range(20):
        o.publish(1, 2, units=[(3, o.tokens(3).tobytes())])
    o.emitter.keep(2, finish(2))
    o.publish(1)
    assert o.emitter.is_starved
    while o.emitter.is_starved:
        o.read()
        o.emitter.flush()
    o.read()
    assert {req_id: len(got) for req_id, got in o.read_tokens.items()} == {1: 21, 2: 20, 3: 20}
    assert all(got == list(range(len(got))) for got in o.read_tokens.values())
    assert o.kinds[-1] != (2, "TOKENS")
    assert o.kinds.index((2, "FINISH")) > max(
        i for i, kind in enumerate(o.kinds) if kind == (2, "TOKENS")
    )
    assert len(o.kinds) + o.word(L.W_COALESCED) == 62
    assert len(o.kinds) < 20


def test_overload_names_the_heaviest_that_can_be_paused(out):
    o = out("coalesce", slots=2, coalesce_tokens=20)
    anybody = {1, 2, 3, 4}.__contains__
    assert o.emitter.overloaded(anybody) == []
    for _ in range(8):
        o.publish(1, 1, 1, 2)
    assert o.emitter.overloaded(anybody) == [1]
    # 1 is paused, or has ended: it stays the heaviest, and somebody else must be named.
    assert o.emitter.overloaded({2, 3, 4}.__contains__) == [2]
    assert o.emitter.overloaded(lambda req_id: False) == []
    assert not o.emitter.is_relieved()
    while not o.emitter.is_relieved():
        assert o.read()
        o.emitter.flush()
    assert o.emitter.writer.pending_weight <= 10
    assert o.emitter.overloaded(anybody) == []


def test_a_quarter_is_paused_at_a_time(out):
    o = out("coalesce", slots=2, coalesce_tokens=1)
    o.publish(*range(1, 9))
    o.publish(*range(1, 9))
    assert len(o.emitter.overloaded(lambda req_id: True)) == 2


def test_block_waits_once_a_step_and_then_coalesces(out):
    o = out("block", slots=2, block_deadline_s=0.005)
    o.publish(1, 2)
    assert o.num_waits == 0
    for step in range(1, 6):
        units = [(req_id, o.tokens(req_id).tobytes()) for req_id in (3, 4, 5, 6)]
        o.publish(1, 2, units=units)
        assert o.num_waits == step, "once for all that it has to write"
    assert o.word(L.W_BLOCKED_NS) >= 5 * 4_000_000
    while o.emitter.is_starved:
        o.read()
        o.emitter.flush()
    o.read()
    assert {r: len(got) for r, got in o.read_tokens.items()} == {1: 6, 2: 6, 3: 5, 4: 5, 5: 5, 6: 5}


def test_block_does_not_wait_for_a_channel_that_has_nothing_new(out):
    """A stopped front end with one answer outstanding must not slow the others at every step."""
    o = out("block", slots=2, block_deadline_s=5)
    o.publish(1, 2)
    o.emitter.keep(1, finish(1))
    for _ in range(20):
        o.publish()
    assert o.num_waits == 0
    assert o.emitter.is_starved
    o.read()
    o.emitter.flush()
    assert o.read() == [(1, "FINISH")]


def test_drop_ends_each_lost_request_once_and_the_others_go_on(out):
    o = out("drop", slots=4)
    ended: list[int] = []

    def end(req_id: int) -> bytes:
        ended.append(req_id)
        return pack_message(req_id, "full", time_ns=0) + finish(req_id)

    o.publish(1, 2)
    units = [(4, o.tokens(4).tobytes() + o.tokens(4).tobytes())]
    o.emitter.keep(3, finish(3))  # it ended in this step, and its last token is lost
    o.emitter.keep(1, finish(1))  # it ended too, and its token fits
    o.publish(1, 2, 3, units=units, end_dropped=end)
    assert ended == [3, 4]
    assert o.word(L.W_DROPPED) == 3
    while o.emitter.is_starved:
        o.read()
        o.emitter.flush()
    o.read()
    assert o.kinds == [
        (1, "TOKENS"),
        (2, "TOKENS"),
        (1, "TOKENS"),
        (2, "TOKENS"),
        (1, "FINISH"),
        (3, "MESSAGE"),
        (3, "FINISH"),
        (4, "MESSAGE"),
        (4, "FINISH"),
    ]


def test_the_logprobs_of_a_prompt_are_held_back_too(out):
    """Of a prompt of 100,000 tokens they are 200,000 slots, before the first token that could be counted."""
    o = out("coalesce", slots=2, coalesce_tokens=20)
    ids, logprobs = np.zeros((8, 21), np.int32), np.zeros((8, 21), np.float32)
    for chunk in range(2):
        unit = pack_prompt_logprobs(1, 1 + 8 * chunk, ids, logprobs, 0)
        o.publish(2, units=[(1, unit)])
    assert o.emitter.overloaded({1, 2}.__contains__) == [1]
    while not o.emitter.is_relieved():
        assert o.read()
        o.emitter.flush()
    assert o.emitter.overloaded({1, 2}.__contains__) == []
