"""Tokens with logprobs that the pump writes by itself: byte for byte what the slow way writes, whatever comes in whatever order."""

import asyncio
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppet import Rings, finish_record, started_record, tokens_record, until
from sockets import DirectStream

from shmserve.config import RingConfig
from shmserve.http import logprob_frames
from shmserve.http.choice import Choice
from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.logprob_send import LogprobPath
from shmserve.http.logprobs import FLOOR, LogprobLog, TokenTexts
from shmserve.http.openai.choice import Extras, OpenAIChoice
from shmserve.http.openai.formats import Envelope
from shmserve.http.reasoning import ContentOnly, ReasoningSplitter
from shmserve.http.ways import Unmarked
from shmserve.request import SamplingParams
from shmserve.wire.logprobs import pack_top_logprobs

# Two of one name; parts of a character; what JSON and lines must not see; a special token.
WORDS = [
    b"a",
    b"b",
    b" a",
    b"a",
    b'"',
    b"\\",
    b"\n",
    "é".encode(),
    "\u2028".encode(),
    "😀".encode(),
]
WORDS += [b"\xf0\x9f", b"\x98\x80", b"\x00", b"\x1a", b"<s>", b"stop", b"st", b"%", b"%b%%"]
SPECIAL = frozenset({14})
VOCAB = len(WORDS)


def record(req_id, token_id, index, logprob):
    slot = bytearray(tokens_record(req_id, [token_id], index))
    slot[96:100] = np.float32(logprob).tobytes()
    return bytes(slot)


def tops(req_id, index, ids, logprobs):
    if not ids:
        return b""
    return pack_top_logprobs(
        req_id, index, np.array(ids, np.int32), np.array(logprobs, np.float32), 1
    )


def thinking():
    return ReasoningSplitter(ContentOnly(), is_inside=True)


class Stream(DirectStream):
    """One choice of a stream on a socket that is a list. `goes_direct` False: the pump never writes it by itself."""

    def __init__(self, entry, kind, num_top, stop, *, goes_direct, is_chunked=True):
        super().__init__(entry)
        self.pieces = Pieces(WORDS, SPECIAL)
        shown = Pieces(WORDS, frozenset())
        params = SamplingParams(max_tokens=99, num_logprobs=num_top, stop=stop)
        texts = TokenTexts(self.pieces, shown)
        splits = kind == "thinking"  # its text is all reasoning
        envelope = Envelope("chat" if splits else kind, "x-1", "a \u2028\x1a model", 1)
        extras = Extras(texts=texts, num_top=num_top, new_splitter=thinking if splits else None)
        self.format = OpenAIChoice(envelope, 0, params, (), extras)
        text = TextStream(self.pieces, stop)
        self.choice = Choice(entry, text, self.pieces, self.format.attach(entry))
        self.goes_direct, self.is_chunked = goes_direct, is_chunked
        self.num_slow = 0
        entry.logprobs, entry.on_tokens = LogprobLog(), self.on_tokens
        self.go_direct()

    def on_tokens(self, entry):
        text, ids = self.choice.take_joined()
        event = self.format.delta(text, ids)
        if event:
            self.sent.append(b"%x\r\n%b\r\n" % (len(event), event) if self.is_chunked else event)
        self.num_slow += 1
        self.go_direct()

    def go_direct(self):
        text, way = self.choice.text, self.format.way
        if not self.goes_direct or way is None or not text.is_plain:
            self.entry.direct = None
            return
        text.pass_by()
        pieces = text.plain_pieces()
        if isinstance(way, Unmarked):
            way, pieces = way.around, text.plain_pieces(way.marks)
        self.entry.direct = LogprobPath(way, pieces, self.is_chunked, self.send, self.spill)


class Wired(Rings):
    def __init__(self):
        super().__init__(RingConfig(token_slots=512, submit_slots=64))
        self.client.vocab_size = VOCAB
        self.link.close("made anew with a vocabulary")
        self.connect()

    async def stream(self, *args, **more):
        entry = await self.submit()
        self.take()
        return Stream(entry, *args, **more)

    async def settle(self):
        capacity = self.producer.capacity
        await until(lambda: self.producer.free(capacity) == capacity, "all slots come back")


ids = st.integers(0, VOCAB - 1)
numbers = st.one_of(
    st.floats(-30, 0, width=32), st.sampled_from([-math.inf, math.inf, math.nan, 0.0, -0.0, -1e-30])
)
TOKEN = st.tuples(ids, numbers, st.lists(st.tuples(ids, numbers), min_size=20, max_size=20))


@settings(deadline=None)
@given(
    kind=st.sampled_from(["chat", "completion"]),
    num_top=st.sampled_from([0, 1, 5, 12, 13, 20]),
    tokens=st.lists(TOKEN, min_size=1, max_size=6),
)
def test_an_event_says_what_json_says_of_its_token(kind, num_top, tokens):
    """Against the shapes written down once more, by json and nothing of ours."""

    async def scenario():
        async with Wired() as rings:
            stream = await rings.stream(kind, num_top, (), goes_direct=True, is_chunked=False)
            for i, (token_id, logprob, beside) in enumerate(tokens):
                chosen, values = zip(*beside[:num_top], strict=True) if num_top else ((), ())
                rings.put(
                    tops(stream.entry.req_id, i, chosen, values)
                    + record(stream.entry.req_id, token_id, i, logprob)
                )
            await rings.settle()
            return stream

    stream = asyncio.run(scenario())
    events = [json.loads(event[6:]) for event in b"".join(stream.sent).split(b"\n\n")[:-1]]
    found = [event["choices"][0] for event in events]
    assert all(event["model"] == "a \u2028\x1a model" for event in events)

    def number(value):
        return FLOOR if not math.isfinite(value) else float(np.float32(value))

    def named(token_id, value):
        data = b"" if token_id in SPECIAL else WORDS[token_id]
        name = WORDS[token_id].decode("utf-8", "replace")
        return {"token": name, "logprob": number(value), "bytes": list(data)}

    def key(token_id):
        try:
            return WORDS[token_id].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in WORDS[token_id])

    assert len(found) == len(tokens)
    for choice, (token_id, logprob, beside) in zip(found, tokens, strict=True):
        beside = beside[:num_top]
        if kind == "chat":
            entry = named(token_id, logprob) | {"top_logprobs": [named(*pair) for pair in beside]}
            wanted = {"content": [entry], "refusal": None}
        else:
            top = {key(other): number(value) for other, value in beside}
            top.setdefault(key(token_id), number(logprob))
            wanted = {
                "tokens": [key(token_id)],
                "token_logprobs": [number(logprob)],
                "top_logprobs": [top] if num_top else None,
                "text_offset": choice["logprobs"]["text_offset"],  # below
            }
        assert json.dumps(choice["logprobs"]) == json.dumps(wanted)
    if kind == "completion":
        texts = [choice["text"] for choice in found]
        starts = [0, *itertools.accumulate(map(len, texts))]
        for choice, start, (token_id, *_) in zip(found, starts, tokens, strict=False):
            if stream.pieces.direct[token_id] and "\ufffd" not in "".join(texts):
                assert choice["logprobs"]["text_offset"] == [start]
    whole = [bool(stream.pieces.direct[token_id]) for token_id, *_ in tokens]
    if all(whole):
        assert (stream.num_direct, stream.num_slow) == (len(tokens), 0)


STEP = st.one_of(
    st.tuples(st.just("token"), ids, st.integers(0, 2)),
    st.tuples(st.just("token"), ids, st.integers(0, 2)),
    st.tuples(st.just("two tokens"), ids, st.integers(0, 2)),
    st.tuples(st.just("too few beside"), ids, st.integers(0, 2)),
    st.tuples(st.just("early tops"), ids, st.integers(0, 2)),
    st.tuples(st.just("started"), ids, st.integers(0, 2)),
    st.tuples(st.just("finish"), ids, st.integers(0, 2)),
    st.tuples(st.just("no token"), ids, st.integers(0, 2)),
    st.tuples(st.just("no token beside"), ids, st.integers(0, 2)),
    st.tuples(st.just("full"), st.sampled_from([0, 1, 100, 500]), st.integers(0, 2)),
    st.tuples(st.just("turn"), ids, ids),
)


async def outcome(steps, kinds, num_top, stop, *, goes_direct):
    """What each stream has sent, how it stands, and the counts on the board."""
    async with Wired() as rings:
        streams = [
            await rings.stream(kind, num_top, stop, goes_direct=goes_direct) for kind in kinds
        ]
        for index, (what, token_id, whose) in enumerate(steps):
            stream = streams[whose % len(streams)]
            req_id = stream.entry.req_id
            beside = [(token_id + k) % VOCAB for k in range(num_top)]
            values = [-0.5 * k for k in range(num_top)]
            top, token = (
                tops(req_id, index, beside, values),
                record(req_id, token_id, index, -0.25 * token_id),
            )
            if what == "token":
                rings.put(top + token)
            elif what == "two tokens":
                rings.put(tokens_record(req_id, [token_id, 0], index))
            elif what == "too few beside":
                rings.put(tops(req_id, index, beside[1:], values[1:]) + token)
            elif what == "early tops" and top:
                rings.put(top)
                await rings.settle()
                rings.put(token)
            elif what == "started":
                rings.put(started_record(req_id))
            elif what == "finish":
                rings.put(top, token, finish_record(req_id))
            elif what == "no token":
                rings.put(top + record(req_id, VOCAB + token_id, index, -1))
            elif what == "no token beside" and num_top:
                ids = [*beside[1:], -1 - token_id]
                rings.put(tops(req_id, index, ids, values) + token)
            elif what == "full":
                stream.room = token_id
            else:
                await rings.settle()
        await rings.settle()
        rings.client.times.fold()
        words = [rings.board[word] for word in ("tokens", "num_bad_records")]
        ends = [(stream.entry.is_over, stream.entry.error is None) for stream in streams]
        return [b"".join(stream.sent) for stream in streams], ends, words


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(
    steps=st.lists(STEP, min_size=1, max_size=24),
    kinds=st.lists(st.sampled_from(["chat", "completion", "thinking"]), min_size=1, max_size=3),
    num_top=st.sampled_from([0, 2, 14]),
    stop=st.sampled_from([(), (b"stop", b"\n\n")]),
)
def test_the_bytes_are_those_of_the_slow_way(steps, kinds, num_top, stop):
    direct = asyncio.run(outcome(steps, kinds, num_top, stop, goes_direct=True))
    slow = asyncio.run(outcome(steps, kinds, num_top, stop, goes_direct=False))
    assert direct == slow


def test_parts_of_tokens_are_bounded(monkeypatch):
    monkeypatch.setattr(logprob_frames, "MOST_PARTS", 2)
    texts = TokenTexts(Pieces(WORDS, SPECIAL), Pieces(WORDS, frozenset()))
    for kind in (logprob_frames.ChatParts, logprob_frames.CompletionParts):
        parts = texts.shared(kind)
        assert parts is texts.shared(kind)
        for token_id in range(VOCAB):
            assert parts[token_id] == kind(texts)[token_id]
            assert len(parts) <= 2
        with pytest.raises(IndexError):
            parts[VOCAB]


def test_an_error_of_a_send_that_somebody_keeps_keeps_no_part_of_the_ring():
    """A transport keeps the error that ended it, with the frames it came through; the channel must be closed all the same."""

    async def scenario():
        async with Wired() as rings:
            kept = []

            def fail(frame):
                try:
                    raise BrokenPipeError("gone")
                except BrokenPipeError as error:
                    kept.append(error)
                    raise

            stream = await rings.stream("chat", 0, (), goes_direct=True)
            stream.send = fail
            stream.go_direct()
            rings.put(record(stream.entry.req_id, 0, 0, -1.0))
            await until(lambda: kept, "it was sent")
            rings.link.close("it died")
            assert rings.link.channel is None

    asyncio.run(scenario())
