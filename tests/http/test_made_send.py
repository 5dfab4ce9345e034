"""Tokens that the pump writes for formats with numbers, intervals or splitters: byte for byte what the slow way writes."""

import asyncio
import logging
import secrets

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from puppet import Rings, finish_record, tokens_record, until
from sockets import DirectStream

from shmserve.config import RingConfig
from shmserve.http.anthropic.formats import MessageChoice
from shmserve.http.choice import Choice
from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.direct import direct_path
from shmserve.http.interval import EveryFewTokens
from shmserve.http.made_send import MadePath
from shmserve.http.native_answer import NativeAnswer
from shmserve.http.openai.choice import Extras, OpenAIChoice
from shmserve.http.openai.event_forms import NUMBER, TEXT, form_of
from shmserve.http.openai.formats import Envelope
from shmserve.http.openai.response_items import ResponseChoice
from shmserve.http.reasoning import ContentOnly, ReasoningSplitter
from shmserve.http.timing import Entrance, TokenTimes
from shmserve.http.tool_formats import FORMATS, ToolSplitter
from shmserve.http.ways import Made, PassedTokens, Unmarked
from shmserve.request import SamplingParams
from shmserve.wire.finish import pack_finish
from shmserve.wire.tokens import TokenKind

# Marks, whole and in parts; blanks; calls; parts of a character; what JSON and lines must not see; a special token.
WORDS = [b"a", b" b", b"word", b" ", b"\n\n", b"x ", "\u00a0".encode(), b"<", b"</", b"think", b">"]
WORDS += [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"tool_call>"]
WORDS += [b'{"name": "f", "arguments": {"x": 1}}', b'{"name": "f"', b"{", b"}", "é".encode()]
WORDS += [b"\xf0\x9f", b"\x98\x80", "\u2028".encode(), b"\x1a", b"%", b'"', b"\\", b"stop", b"<s>"]
SPECIAL = frozenset({len(WORDS) - 1})
VOCAB = len(WORDS)
ARRIVAL_NS = 5_000
HARD_NAME = 'a \u2028\x1a "\x1a" %d model'


def reasoning(*, is_inside):
    return ReasoningSplitter(ContentOnly(), is_inside=is_inside)


def tools(name="hermes"):
    return ToolSplitter(FORMATS[name], frozenset({"f"}))


def both():
    return ReasoningSplitter(tools(), is_inside=True)


SPLITTERS = {
    "none": lambda: None,
    "thinking": lambda: reasoning(is_inside=True),
    "may think": lambda: reasoning(is_inside=False),
    "hermes": tools,
    "llama3": lambda: tools("llama3"),
    "both": both,
}


def openai(kind, entry, **extras):
    params = SamplingParams(max_tokens=99)
    return OpenAIChoice(Envelope(kind, "x-1", HARD_NAME, 1), 1, params, (), Extras(**extras)).attach(entry)  # fmt: skip


def numbers(kind, **extras):
    return lambda entry: openai(kind, entry, num_prompt_tokens=7, **extras)


def split(name):
    return lambda entry: openai(
        "chat", entry, new_splitter=None if name == "none" else SPLITTERS[name]
    )


def message(name):
    params = SamplingParams(max_tokens=99)
    return lambda entry: MessageChoice("msg_1", HARD_NAME, params, entry, SPLITTERS[name]())


def native(*, incremental, rid=HARD_NAME, index=None):
    params = SamplingParams(max_tokens=99)
    return lambda entry: NativeAnswer(entry, params, index, rid, incremental, None, [], -1)


FORMS = {
    "ids": numbers("chat", with_token_ids=True),
    "usage": numbers("completion", with_usage=True),
    "times": numbers("chat", with_timing=True),
    "all numbers": numbers("completion", with_token_ids=True, with_usage=True, with_timing=True),
    "thinking, all numbers": numbers(
        "chat",
        with_token_ids=True,
        with_usage=True,
        with_timing=True,
        new_splitter=SPLITTERS["thinking"],
    ),
    "native": native(incremental=False),
    "native, new text only": native(incremental=True, rid="\x1a", index=3),
    "every third": lambda entry: EveryFewTokens(openai("chat", entry), 3),
    "every third with ids": lambda entry: EveryFewTokens(
        openai("completion", entry, with_token_ids=True), 3
    ),
    **{f"chat, {name}": split(name) for name in SPLITTERS},
    **{f"message, {name}": message(name) for name in SPLITTERS},
    **{
        f"response, {name}": lambda entry, name=name: ResponseChoice(
            {"id": "r", "model": HARD_NAME}, entry, SPLITTERS[name]()
        )
        for name in SPLITTERS
    },
}
TIMED = {"times", "all numbers", "thinking, all numbers", "native", "native, new text only"}


class Stream(DirectStream):
    """One choice of a stream on a socket that is a list. `goes_direct` False: the pump never writes it by itself."""

    def __init__(self, entry, form, stop, *, goes_direct):
        super().__init__(entry)
        entry.arrival_ns = ARRIVAL_NS
        if form in TIMED:
            entry.timing = TokenTimes(Entrance(ARRIVAL_NS, ARRIVAL_NS, ARRIVAL_NS))
        self.pieces = Pieces(WORDS, SPECIAL)
        self.format = FORMS[form](entry)
        self.choice = Choice(entry, TextStream(self.pieces, stop), self.pieces, self.format)
        self.goes_direct = goes_direct
        self.sent.append(self.format.opening())
        self.noted = []
        self.num_tokens = 0
        entry.on_tokens = self.on_tokens
        self.go_direct()

    def note(self, choice):
        self.noted.append(choice.num_unwritten)
        choice.num_unwritten = 0
        if choice.entry.timing is not None:
            choice.entry.timing.written(choice.framed_ns)

    def on_tokens(self, entry):
        text, ids = self.choice.take_joined()
        if event := self.format.delta(text, ids):
            self.sent.append(event)
            self.note(self.choice)
        self.go_direct()

    def go_direct(self):
        way, text = self.format.way, self.choice.text
        self.entry.direct = None
        if not self.goes_direct or way is None or not text.is_plain:
            return
        text.pass_by()
        out = (False, self.send, self.spill)
        if isinstance(way, Made):
            pieces = text.plain_pieces(way.marks)
            self.entry.direct = MadePath(self.choice, way.frame, pieces, *out, self.note)
            return
        pieces = text.plain_pieces()
        if isinstance(way, Unmarked):
            way, pieces = way.around, text.plain_pieces(way.marks)
        self.entry.direct = direct_path(
            *way, False, pieces, self.pieces.longest, self.send, self.spill
        )

    def end(self):
        """What stands at its end, if that came; times of day are in the ends of some."""
        if self.entry.finish is None or self.entry.error is not None:
            return b"", None
        rest = b"".join(self.format.delta(*taken) for taken in self.choice.take())
        rest += self.choice.closing()
        counted = getattr(self.format, "num_reasoning_tokens", None)
        return (b"" if self.entry.timing is not None else rest), counted


def started_record(req_id, num_prompt_tokens):
    return pack_finish(
        TokenKind.STARTED,
        req_id,
        time_ns=1,
        step=1,
        prompt_tokens=num_prompt_tokens,
        stamps=(1, 1, 1, 0, 0),
    )


class Wired(Rings):
    def __init__(self):
        super().__init__(RingConfig(token_slots=8192, submit_slots=64))
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

    def put_tokens(self, streams, *token_ids):
        """The same for each, sampled at the same times."""
        slots = b""
        for stream in streams:
            slot = bytearray(tokens_record(stream.entry.req_id, token_ids, stream.num_tokens))
            slot[8:16] = np.uint64(ARRIVAL_NS + 3_000 * stream.num_tokens).tobytes()
            stream.num_tokens += len(token_ids)
            slots += slot
        self.put(slots)


# Words pass; every other phrase is held, sorted or cut by somebody, whole or in parts.
CALL = b'{"name": "f", "arguments": {"x": 1}}'
PHRASES = [
    (b"a",),
    (b" b", b"word"),
    (b"word", b" b", b"a"),
    (b"x ", b"a"),
    (b"\n\n", b" b"),
    (b" ",),
]
PHRASES += [
    (b"</think>",),
    (b"</", b"think", b">"),
    (b"</", b"a"),
    (b"<think>",),
    (b"\n\n", b"</think>"),
]
PHRASES += [
    (b"<tool_call>", CALL, b"</tool_call>"),
    (b" ", b"<tool_call>", b'{"name": "f"', b"}"),
    (CALL,),
]
PHRASES += [
    (b"<tool_call>", b"a"),
    (b"<", b"tool_call>"),
    (b"\xf0\x9f", b"\x98\x80"),
    (b"\xf0\x9f", b"a"),
]
PHRASES += [
    (b"stop",),
    (b"word", b"x "),
    (b"<s>",),
    (b"%", b'"'),
    (b"\\", b"\x1a"),
    ("\u2028".encode(), b" b"),
]
phrases = st.sampled_from(PHRASES).map(lambda words: [WORDS.index(word) for word in words])
whose = st.integers(0, len(FORMS) - 1)
STEP = st.one_of(
    *[st.tuples(st.just("tokens"), phrases)] * 6,
    st.tuples(st.just("at once"), phrases),
    st.tuples(st.just("started"), whose),
    st.tuples(st.just("finish"), whose),
    st.tuples(st.just("no token"), whose),
    st.tuples(st.just("full"), st.sampled_from([0, 1, 100, 500])),
    st.tuples(st.just("turn"), whose),
)


async def outcome(steps, stop, *, goes_direct):
    """Of streams of all forms, with the same tokens: what each has sent, how it stands, and the counts on the board."""
    async with Wired() as rings:
        streams = [await rings.stream(form, stop, goes_direct=goes_direct) for form in FORMS]

        def finish(stream):
            req_id, count = stream.entry.req_id, stream.num_tokens
            rings.put(finish_record(req_id, prompt_tokens=1, completion_tokens=count))

        for what, arg in steps:
            if what == "tokens":
                for token_id in arg:
                    rings.put_tokens(streams, token_id)
            elif what == "at once":
                rings.put_tokens(streams, *arg)
            elif what == "no token":
                rings.put_tokens([streams[arg]], VOCAB + arg)
            elif what == "started":  # again and again: so it is after a retraction
                rings.put(*(started_record(stream.entry.req_id, arg) for stream in streams))
            elif what == "finish":
                finish(streams[arg])
            elif what == "full":
                for stream in streams:
                    stream.room = arg
            else:
                await rings.settle()
        for stream in streams:
            finish(stream)
        await rings.settle()
        words = [rings.board[word] for word in ("tokens", "num_bad_records")]
        ends = [(s.entry.error is None, s.end()) for s in streams]
        return [b"".join(stream.sent) for stream in streams], ends, words


@pytest.fixture
def no_chance(monkeypatch):
    """Ids that formats draw are always the same."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    monkeypatch.setattr(secrets, "choice", lambda letters: letters[0])


@pytest.mark.usefixtures("no_chance")
def test_the_bytes_are_those_of_the_slow_way():
    @settings(deadline=None)
    @given(
        steps=st.lists(STEP, min_size=8, max_size=24),
        stop=st.sampled_from([(), (b"stop", b"wordx")]),
    )
    def law(steps, stop):
        direct = asyncio.run(outcome(steps, stop, goes_direct=True))
        slow = asyncio.run(outcome(steps, stop, goes_direct=False))
        for form, ours, theirs in zip(FORMS, direct[0], slow[0], strict=True):
            assert (form, ours) == (form, theirs)
        assert direct == slow

    law()


@pytest.mark.parametrize("form", FORMS)
def test_plain_words_go_past_the_slow_way(form):
    """Where nothing is held and no call is open: of a splitter that waits for the text's beginning, behind that."""

    async def scenario():
        async with Wired() as rings:
            stream = await rings.stream(form, (), goes_direct=True)
            rings.put_tokens([stream], 2)
            await rings.settle()
            stream.entry.on_tokens = None
            before = stream.num_direct
            for token_id in (0, 1, 2, 0, 1, 2):
                rings.put_tokens([stream], token_id)
            await rings.settle()
            return stream, stream.num_direct - before

    stream, num_direct = asyncio.run(scenario())
    if form == "every third":
        assert stream.noted == [1, 3, 3]
    if form == "every third with ids":
        assert num_direct == 0 and stream.format.way is None
    else:
        assert stream.entry.token_ids == []
        assert num_direct == (2 if form == "every third" else 6)


def test_reasoning_tokens_are_counted_though_nobody_saw_them():
    async def scenario():
        async with Wired() as rings:
            stream = await rings.stream("chat, thinking", (), goes_direct=True)
            for word in (b"a", b" b", b"word", b" b", b"</", b"think", b">", b"word", b" b", b"a"):
                rings.put_tokens([stream], WORDS.index(word))
                await rings.settle()
            rings.put(finish_record(stream.entry.req_id, completion_tokens=stream.num_tokens))
            await rings.settle()
            stream.end()
            return stream

    stream = asyncio.run(scenario())
    assert stream.num_direct == 3 + 2  # all words but the first of each part
    assert stream.format.num_reasoning_tokens == 6  # the one that closes it is none


def test_a_format_that_fails_ends_its_own_stream_only(caplog):
    async def scenario():
        async with Wired() as rings:
            bad, good = [await rings.stream("ids", (), goes_direct=True) for _ in range(2)]

            def fails(piece, token_id):
                raise RuntimeError("on purpose")

            bad.entry.direct = MadePath(
                bad.choice, fails, bad.pieces.direct, False, bad.send, bad.spill, bad.note
            )
            for _ in range(2):
                rings.put_tokens([bad, good], 0)
            await rings.settle()
            ((_, req_id, _),) = rings.take()
            assert req_id == bad.entry.req_id  # its ABORT
            assert bad.entry.error.status == 500 and "on purpose" not in bad.entry.error.message
            assert good.num_direct == 2 and not good.entry.is_over
            assert rings.link.is_serving

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "could not be written" in caplog.text


def test_a_records_place_that_cannot_be_never_lowers_the_count():
    passed = PassedTokens(2)
    for index, count, expected in ((2, 1, 0), (5, 1, 2), (0, 1, 2), (7, 2, 2), (12, 1, 5)):
        passed.came(tokens_record(1, [0] * count, index), count)
        assert passed.count == expected
    passed.ended(3)
    assert passed.count == 5
    passed.ended(20)
    assert passed.count == 12


def test_a_form_has_its_holes_where_ours_are_and_not_where_a_client_wrote_one():
    hole = b'"\\u001a"'
    event = b'{"model":"%d ' + hole + b'","text":' + hole + b',"n":[' + hole + b"]}"
    assert form_of(event, (), (TEXT, NUMBER)) % (b"%b", 5) == event.replace(
        b'"text":' + hole + b',"n":[' + hole, b'"text":"%b","n":[5'
    )
    event = b'{"text":' + hole + b',"rid":' + hole + b',"n":' + hole + b"}"
    form = form_of(event, (TEXT,), (NUMBER,))
    assert form % (b"x", 1) == b'{"text":"x","rid":"\\u001a","n":1}'
