"""The two processes of a stress run, and the truth that both can compute: run as `sides.py ROLE NAME FDS ARGS...`.

What a record must say follows from its key and its index alone, so the reader checks every token without being told anything.
The writer prints what it offered, the reader what it saw; the test adds up.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time

import numpy as np

from shmserve.rings.channel import Ring
from shmserve.rings.policy import Blocking, Coalescing, Dropping, RingWriter
from shmserve.wire.finish import pack_finish, pack_message
from shmserve.wire.tokens import (
    TOKEN_SLOT_BYTES,
    TOKENS_DTYPE,
    TokenKind,
    fold_tokens,
    stamp_publish,
    weigh_tokens,
)

LAST_KEY = 2**40
ENDED = 2**31
"""The index that no key reaches: expected of those that have had their FINISH."""

UNIT_DTYPE = np.dtype(
    [("key", "<u8"), ("number", "<u8"), ("at", "<u4"), ("length", "<u4"), ("body", "<u8", (5,))]
)
"""A slot of a unit: the `number`-th unit of `key`, its slot `at` of `length`."""


def token_of(key, index):
    return ((key * 1_000_003 + index * 7_919) & 0x7FFF_FFFF).astype(np.int32)


def time_of(key, index):
    """ns, whole us (merging keeps 1 us), strictly rising in `index`, unevenly."""
    return (key * 1_000_000 + index * 13 + index % 5) * 1000


def logprob_of(key, index):
    return (-((key + index) % 997) / 8).astype(np.float32)


def body_of(key, number, at):
    return (key * 0x9E37_79B9 + number * 31 + at)[..., None] * np.arange(1, 6, dtype=np.uint64)


def token_batch(keys: np.ndarray, indices: np.ndarray, counts: np.ndarray) -> np.ndarray:
    batch = np.zeros(len(keys), TOKENS_DTYPE)
    lanes = np.arange(8, dtype=np.uint64)
    every = indices[:, None] + lanes
    times = time_of(keys[:, None], every)
    batch["req_id"], batch["index"], batch["count"] = keys, indices, counts
    batch["kind"] = TokenKind.TOKENS
    batch["time_ns"] = times[:, 0]
    mask = lanes < counts[:, None]
    batch["token_ids"] = np.where(mask, token_of(keys[:, None], every), -1)
    batch["dt_us"] = np.where(mask, (times - times[:, :1]) // 1000, 0)
    batch["logprobs"] = np.where(mask, logprob_of(keys[:, None], every), 0)
    return batch


class Tokens:
    """A scheduler of sorts: 48 requests at a time, each with a length; a step gives some of them a token or a few."""

    NUM_LIVE = 48
    MOST_PENDING_TOKENS = 4096

    def __init__(self, writer: RingWriter, ring: Ring, seed: int) -> None:
        self.writer, self.ring = writer, ring
        self.rng = np.random.default_rng(seed)
        self.next_key = 0
        self.keys = np.zeros(self.NUM_LIVE, np.uint64)
        self.indices = np.zeros(self.NUM_LIVE, np.uint64)
        self.lengths = np.zeros(self.NUM_LIVE, np.uint64)
        self.choices = self.rng.integers(1, 400, 2**16).tolist()
        for place in range(self.NUM_LIVE):
            self.begin(place)
        self.offered_records = self.offered_tokens = self.dropped_tokens = 0
        self.num_dropped_keys = self.kept_slots = 0

    def begin(self, place: int) -> None:
        self.keys[place], self.indices[place] = self.next_key, 0
        self.lengths[place] = self.choices[self.next_key % len(self.choices)]
        self.next_key += 1

    def end(self, place: int, *, is_dropped: bool) -> None:
        key, index = int(self.keys[place]), int(self.indices[place])
        unit = pack_finish(
            TokenKind.FINISH, key, time_ns=0, step=0, finish=2 if is_dropped else 1, completion_tokens=index
        )  # fmt: skip
        if is_dropped:
            unit = pack_message(key, "the ring was full", time_ns=0) + unit
            self.num_dropped_keys += 1
        self.writer.keep(key, unit)
        self.kept_slots += len(unit) // TOKEN_SLOT_BYTES
        self.begin(place)

    def step(self) -> None:
        places = self.rng.permutation(self.NUM_LIVE)[: self.rng.integers(1, self.NUM_LIVE + 1)]
        if self.writer.pending_weight > self.MOST_PENDING_TOKENS:
            paused = np.array(self.writer.heaviest(self.NUM_LIVE // 2), np.uint64)
            places = places[~np.isin(self.keys[places], paused)]
        left = self.lengths[places] - self.indices[places]
        counts = np.minimum(left, self.rng.choice([1, 1, 1, 1, 2, 3], len(places))).astype(
            np.uint64
        )
        keys = self.keys[places]
        batch = token_batch(keys, self.indices[places], counts)
        names = keys.tolist()
        dropped = set(self.writer.write(memoryview(batch.view(np.uint8)), names))
        self.offered_records += len(names)
        self.offered_tokens += int(counts.sum())
        if dropped:
            lost = np.isin(keys, np.array(list(dropped), np.uint64))
            self.dropped_tokens += int(counts[lost].sum())
            for place in places[lost].tolist():
                self.end(place, is_dropped=True)
            places, counts = places[~lost], counts[~lost]
            self.ring.wait_credits(0.001)  # a step takes its time
        self.indices[places] += counts
        for place in places[self.indices[places] == self.lengths[places]].tolist():
            self.end(place, is_dropped=False)
        # As in the product: what must not be dropped is bounded by the table, here by waiting.
        while len(self.writer.pending_keys) > 2 * self.NUM_LIVE:
            assert self.ring.wait_credits(30.0), "the reader has stopped"
            self.writer.flush()


def produce_tokens(ring: Ring, policy: str, seed: int, num_records: int) -> dict[str, int]:
    producer = ring.producer()
    shared = {"weigh": weigh_tokens, "stamp": stamp_publish}
    writer: RingWriter
    if policy == "coalesce":
        writer = Coalescing(producer, fold=fold_tokens, **shared)
    elif policy == "block":
        writer = Blocking(
            producer, wait_credits=ring.wait_credits, deadline_s=0.003, fold=fold_tokens, **shared
        )
    else:
        writer = Dropping(producer, **shared)
    tokens = Tokens(writer, ring, seed)
    while tokens.offered_records < num_records:
        tokens.step()
    for place in range(tokens.NUM_LIVE):
        tokens.end(place, is_dropped=False)
    num_keys = tokens.next_key - tokens.NUM_LIVE  # those begun by the last ends have had nothing
    writer.keep(LAST_KEY, pack_finish(TokenKind.READY, LAST_KEY, time_ns=0, step=0))  # behind all
    drain(writer, ring)
    return {
        "offered_records": tokens.offered_records,
        "offered_tokens": tokens.offered_tokens,
        "dropped_tokens": tokens.dropped_tokens,
        "num_dropped_keys": tokens.num_dropped_keys,
        "num_keys": num_keys,
        "kept_slots": tokens.kept_slots + 1,
    }


def drain(writer: RingWriter, ring: Ring) -> None:
    while writer.is_starved:
        assert ring.wait_credits(30.0), "the reader has stopped"
        writer.flush()


def produce_units(ring: Ring, policy: str, seed: int, num_slots: int) -> dict[str, int]:
    """Units of 1 to 6 slots of 32 keys: refused at once, or after waiting, or kept; one in 16 must not be lost in any case."""
    writer = RingWriter(ring.producer())
    choose = random.Random(seed)
    numbers = [0] * 32
    offered = accepted = accepted_slots = kept = refused = 0
    while accepted_slots < num_slots:
        key, length = choose.randrange(32), choose.randint(1, 6)
        unit = np.zeros(length, UNIT_DTYPE)
        unit["key"], unit["number"], unit["length"] = key, numbers[key], length
        unit["at"] = at = np.arange(length, dtype=np.uint64)
        unit["body"] = body_of(np.uint64(key), np.uint64(numbers[key]), at)
        data = unit.tobytes()
        offered += 1
        if policy == "keep" or not offered % 16:
            writer.keep(key, data)
            kept += 1
        elif not writer.try_unit(data, length) and not (
            policy == "wait" and wait_for_room(writer, ring, data, length)
        ):
            writer.refuse()
            refused += 1
            continue
        numbers[key] += 1
        accepted += 1
        accepted_slots += length
        while writer.pending_slots > 512:
            assert ring.wait_credits(30.0), "the reader has stopped"
            writer.flush()
    last = np.zeros(1, UNIT_DTYPE)
    last["key"], last["length"] = LAST_KEY, 1
    writer.keep(LAST_KEY, last.tobytes())
    drain(writer, ring)
    return {
        "offered": offered,
        "accepted": accepted,
        "accepted_slots": accepted_slots,
        "kept": kept,
        "refused": refused,
    }


def wait_for_room(writer: RingWriter, ring: Ring, unit: bytes, num_slots: int) -> bool:
    deadline = time.monotonic() + 0.002
    while (left := deadline - time.monotonic()) > 0:
        ring.wait_credits(left)
        if writer.try_unit(unit, num_slots):
            return True
    return False


class TokenCheck:
    """Every key's tokens: each once, in order, with its own time and logprob; then one FINISH that agrees, then nothing."""

    def __init__(self) -> None:
        self.expected = np.zeros(2**22, np.int64)
        self.num_tokens = self.num_slots = self.num_finished = self.num_dropped = self.largest = 0

    def check(self, chunk: bytes) -> int:
        """Check whole units at the front of `chunk`; the number of bytes checked."""
        rows = np.frombuffer(chunk, TOKENS_DTYPE)
        if len(rows) and rows["kind"][-1] == TokenKind.MESSAGE:
            rows = rows[:-1]  # its FINISH comes in the next chunk
        is_message = rows["kind"] == TokenKind.MESSAGE
        after = rows[1:][is_message[:-1]]
        assert (after["kind"] == TokenKind.FINISH).all(), "a unit was split"
        assert (after["req_id"] == rows["req_id"][is_message]).all(), "a unit was split"
        assert (after["finish"] == 2).all()
        self.num_slots += len(rows)
        self.num_dropped += len(after)
        rows = rows[~is_message]
        rows = rows[rows["req_id"] != LAST_KEY]
        rows = rows[np.argsort(rows["req_id"], kind="stable")]
        is_finish = rows["kind"] == TokenKind.FINISH
        assert (is_finish | (rows["kind"] == TokenKind.TOKENS)).all()
        keys, begin = rows["req_id"].astype(np.int64), rows["index"].astype(np.int64)
        count = np.where(is_finish, 0, rows["count"]).astype(np.int64)
        end = np.where(is_finish, ENDED, begin + count)
        is_first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
        wanted = np.where(is_first, self.expected[keys], np.roll(end, 1))
        assert (begin == wanted).all(), "a key has a hole, a repetition, or a token after its end"
        is_last = np.append(is_first[1:], True)[: len(keys)]
        self.expected[keys[is_last]] = end[is_last]
        self.check_tokens(rows[~is_finish])
        self.num_tokens += int(count.sum())
        self.largest = max(self.largest, int(count.max(initial=0)))
        self.num_finished += int(is_finish.sum())
        return self.num_slots * TOKEN_SLOT_BYTES

    def check_tokens(self, rows: np.ndarray) -> None:
        lanes = np.arange(8, dtype=np.uint64)
        keys, every = rows["req_id"][:, None], rows["index"][:, None].astype(np.uint64) + lanes
        mask = lanes < rows["count"][:, None]
        since = np.where(lanes > 0, rows["dt_us"], 0).astype(np.uint64) * np.uint64(1000)
        assert (rows["token_ids"] == token_of(keys, every))[mask].all()
        assert (rows["time_ns"][:, None] + since == time_of(keys, every))[mask].all()
        assert (rows["logprobs"] == logprob_of(keys, every))[mask].all()


class UnitCheck:
    """Every key's units: each once, in order, whole and in one piece."""

    def __init__(self) -> None:
        self.expected = np.zeros(32, np.int64)
        self.num_slots = self.num_units = 0

    def check(self, chunk: bytes) -> int:
        rows = np.frombuffer(chunk, UNIT_DTYPE)
        ends = np.flatnonzero(rows["at"] + 1 == rows["length"])
        rows = rows[: ends[-1] + 1] if len(ends) else rows[:0]
        self.num_slots += len(rows)
        rows = rows[rows["key"] != LAST_KEY]
        is_head = rows["at"] == 0
        heads = np.flatnonzero(is_head)
        unit = np.cumsum(is_head) - 1
        assert not len(rows) or is_head[0]
        assert (np.diff(np.append(heads, len(rows))) == rows["length"][heads]).all(), "split"
        for field in ("key", "number", "length"):
            assert (rows[field] == rows[field][heads][unit]).all(), "two units are mixed"
        assert (rows["at"] == np.arange(len(rows)) - heads[unit]).all()
        bodies = body_of(rows["key"], rows["number"], rows["at"].astype(np.uint64))
        assert (rows["body"] == bodies).all()
        for key in range(32):
            numbers = rows["number"][heads][rows["key"][heads] == key].astype(np.int64)
            assert (numbers == self.expected[key] + np.arange(len(numbers))).all()
            self.expected[key] += len(numbers)
        self.num_units += len(heads)
        return self.num_slots * UNIT_DTYPE.itemsize


def consume(ring: Ring, check: TokenCheck | UnitCheck, seed: int, patience: int) -> dict[str, int]:
    """Wait a little for a full ring, then handle a random part of it; a nap of 8 ms now and then."""
    consumer = ring.consumer()
    choose = random.Random(seed)
    poll = select.poll()
    poll.register(ring.data.fd, select.POLLIN)
    size = consumer.slot_size
    log, num_checked = bytearray(), 0
    is_done = False
    num_rounds = num_full = 0
    while not is_done:
        if not consumer.owed:
            assert poll.poll(30_000), "the writer has stopped"
        time.sleep(0.008 if choose.random() < 0.002 else 0.0001)
        for _ in range(patience):
            if consumer.poll() > ring.capacity - 8:
                break
            time.sleep(0.0001)
        num_rounds += 1
        num_full += consumer.poll() > ring.capacity - 8  # less than the largest unit is free
        left = min(consumer.owed, choose.randint(1, ring.capacity))
        while left:
            view = consumer.view(left)
            log += view
            is_done = bytes(view[-size : 8 - size or None][:8]) == LAST_KEY.to_bytes(8, "little")
            left -= len(view) // size
            consumer.release(len(view) // size)
        if len(log) > 20_000 * size or is_done:
            upto = check.check(bytes(log)) - num_checked
            num_checked += upto
            del log[:upto]
    assert not log and not consumer.owed and not consumer.poll()
    seen = {k: v for k, v in vars(check).items() if k.startswith(("num_", "largest"))}
    return {**seen, "num_rounds": num_rounds, "num_full": num_full}


def main(role: str, name: str, fds: str, *args: str) -> None:
    ring = Ring.from_fds(name, 1, [int(fd) for fd in fds.split(",")])
    if role == "consume_tokens":
        answer = consume(ring, TokenCheck(), int(args[0]), int(args[1]))
    elif role == "consume_units":
        answer = consume(ring, UnitCheck(), int(args[0]), int(args[1]))
    else:
        produce = {"produce_tokens": produce_tokens, "produce_units": produce_units}[role]
        answer = produce(ring, args[0], int(args[1]), int(args[2]))
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
