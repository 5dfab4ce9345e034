"""Token ids to text: against the tokenizers library for any ids in any split, and against the worker's stop decision."""

import codecs
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve import stop_regex
from shmserve.http import detokenizer
from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.http.ways import Marks
from shmserve.stop import StopMatcher

VOCAB = 49152
PARTS = [
    10813,
    242,
    218,
    230,
    131,
    143,
    233,
    321,
    118,
    40303,
    15107,
]  # parts of characters, and beginnings behind a blank


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return default_model.tokenizer()


@pytest.fixture(scope="module")
def table(default_model):
    return default_model.token_bytes().table()


@pytest.fixture(scope="module")
def skipping(default_model, table):
    return Pieces(table, frozenset(default_model.special_token_ids))


@pytest.fixture(scope="module")
def showing(table):
    return Pieces(table, frozenset())


any_id = st.one_of(
    st.integers(0, VOCAB - 1),
    st.sampled_from(PARTS),
    st.integers(0, 16),
    st.sampled_from([905, 17]),
)


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(ids=st.lists(any_id, max_size=40), skip=st.booleans())
def test_deltas_add_up_to_the_decode_of_all_ids_A6(tokenizer, skipping, showing, ids, skip):
    text = TextStream(skipping if skip else showing)
    deltas = [text.feed(token_id) for token_id in ids]
    assert "".join(deltas) + text.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def feed(pieces, ids, **more):
    text = TextStream(pieces, **more)
    return [text.feed(token_id) for token_id in ids], text


def test_characters_split_over_tokens_come_whole_A1(skipping):
    deltas, text = feed(skipping, [143, 233, 5415, 82, 1025, 91, 2756])
    assert "".join(deltas) == "ďábelské" and text.finish() == ""
    assert deltas[0] == "" and not any("\ufffd" in delta for delta in deltas)
    deltas, _ = feed(skipping, [19556, 10813, 242, 218, 17])
    assert deltas == ["Hello", "", "", "😀", "!"]


def test_blanks_belong_to_their_tokens_A2(skipping):
    assert feed(skipping, [19556, 905, 905])[0] == ["Hello", " world", " world"]
    assert feed(skipping, [905])[0] == [" world"]


def test_hopeless_bytes_are_sent_at_once_and_the_work_is_linear_A3(skipping, monkeypatch):
    """Bytes given to the decoder are counted: each once, whatever they are."""
    given_bytes = 0

    class Counting(codecs.getincrementaldecoder("utf-8")):
        def decode(self, data, final=False):
            nonlocal given_bytes
            given_bytes += len(data)
            return super().decode(data, final)

    monkeypatch.setattr(detokenizer, "_new_decoder", Counting)
    for count in (4000, 16000):
        given_bytes = 0
        deltas, text = feed(skipping, [218] * count)
        assert deltas == ["\ufffd"] * count and text.finish() == ""
        assert given_bytes == count
    deltas, text = feed(skipping, [10813] * 300)
    assert "".join(deltas) + text.finish() == "\ufffd" * 300
    for k in range(1, 296):  # number k is out by token k + 4 at the latest
        assert len("".join(deltas[: k + 4])) >= k


def test_with_stop_strings_the_work_is_linear_too_A3(skipping, monkeypatch):
    fed = 0

    class Counting(StopMatcher):
        def feed(self, data, *, is_matching=True):
            nonlocal fed
            fed += len(self._tail) + len(data)
            return super().feed(data, is_matching=is_matching)

    monkeypatch.setattr(stop_regex, "StopMatcher", Counting)
    amounts = []
    for count in (1000, 4000):
        fed = 0
        feed(skipping, [218] * count, stop=(b"\x80" * 20 + b"x",))
        amounts.append(fed)
    assert amounts[1] <= 4.1 * amounts[0]


def test_a_genuine_replacement_character_is_text_A4(skipping):
    assert feed(skipping, [19556, 24211, 17])[0] == ["Hello", "\ufffd", "!"]
    assert feed(skipping, [486, 24211])[0] == ["end", "\ufffd"]


def test_special_tokens_are_skipped_or_shown_A5(skipping, showing):
    assert "".join(feed(skipping, [19556, 0, 905])[0]) == "Hello world"
    assert "".join(feed(showing, [19556, 0, 905])[0]) == "Hello<|endoftext|> world"


def test_a_character_that_never_ends_is_one_replacement_character_A7(skipping):
    deltas, text = feed(skipping, [40303])
    assert (deltas, text.finish()) == ([" "], "\ufffd")


def test_never_more_than_three_bytes_are_held(skipping):
    text = TextStream(skipping)
    for token_id in itertools.chain(PARTS * 5, range(100)):
        text.feed(token_id)
        assert len(text._decoder.getstate()[0]) <= 3


def test_a_stream_is_plain_while_nothing_is_held(skipping):
    text = TextStream(skipping)
    assert text.is_plain
    text.feed(10813)
    assert not text.is_plain
    text.feed(17)
    assert text.is_plain
    assert not TextStream(skipping, stop_regex=("x",)).is_plain
    assert not TextStream(skipping, stop=(b"x",), min_tokens=1).is_plain
    text = TextStream(skipping, stop=(b"g w",))
    assert text.is_plain
    text.feed(2767)
    assert not text.is_plain, "its g may begin one"
    text.feed(17)
    assert text.is_plain


def test_direct_pieces_are_the_escaped_text_of_whole_tokens_only(skipping, showing, table):
    for pieces in (skipping, showing):
        for token_id, piece in enumerate(pieces.direct):
            if piece:
                assert json.loads(b'"' + piece + b'"').encode() == table[token_id]
                assert b"\n" not in piece
    assert skipping.direct[905] == b" world"
    assert skipping.direct[10813] == b"" and skipping.direct[218] == b""
    assert skipping.direct[0] == b"" and showing.direct[0] == b"<|endoftext|>"
    assert skipping.direct[198] == b"\\n"


def decide(pieces, ids, stop, min_tokens, include_stop):
    """The worker's way: (ids that were kept, keep_bytes or None if no stop string was found)."""
    matcher = StopMatcher(stop)
    for number, token_id in enumerate(ids, 1):
        match = matcher.feed(pieces.raw(token_id), is_matching=number >= min_tokens)
        if match is not None:
            return ids[:number], match.end if include_stop else match.start
    return ids, None


stop_bytes = st.one_of(
    st.text("abdegno wrl", min_size=1, max_size=5).map(str.encode),
    st.sampled_from(["😀", "é", "\ufffd", "\n"]).map(str.encode),
)


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.sampled_from([2767, 905, 19556, 17, 48124, *PARTS]), any_id), max_size=25
    ),
    stop=st.lists(stop_bytes, min_size=1, max_size=4, unique=True).map(tuple),
    min_tokens=st.integers(0, 8),
    include_stop=st.booleans(),
)
def test_held_text_agrees_with_the_workers_decision(skipping, ids, stop, min_tokens, include_stop):
    """Nothing that the worker cuts off was ever sent, and nothing that it keeps is lost."""
    kept, keep_bytes = decide(skipping, ids, stop, min_tokens, include_stop)
    whole = b"".join(skipping.raw(token_id) for token_id in kept)
    expected = (whole if keep_bytes is None else whole[:keep_bytes]).decode("utf-8", "replace")
    text = TextStream(skipping, stop, min_tokens)
    sent = ""
    for token_id in kept:
        sent += text.feed(token_id)
        assert expected.startswith(sent)
    last = text.finish() if keep_bytes is None else text.finish(keep_bytes)
    assert sent + last == expected


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.sampled_from([2767, 905, 19556, 17, 48124, *PARTS]), any_id), max_size=25
    ),
    stop=st.lists(stop_bytes, min_size=1, max_size=4, unique=True).map(tuple),
    min_tokens=st.integers(0, 8),
    include_stop=st.booleans(),
    lengths=st.lists(st.integers(0, 3), min_size=25, max_size=25),
)
def test_tokens_that_touch_no_stop_string_may_be_written_past_the_text(
    skipping, ids, stop, min_tokens, include_stop, lengths
):
    """What the pump writes by itself and what the text releases add up to what all of it gives, at every moment."""
    kept, keep_bytes = decide(skipping, ids, stop, min_tokens, include_stop)
    whole = b"".join(skipping.raw(token_id) for token_id in kept)
    expected = (whole if keep_bytes is None else whole[:keep_bytes]).decode("utf-8", "replace")
    text = TextStream(skipping, stop, min_tokens, (), include_stop)
    has_piece = skipping.direct.__getitem__
    sent, num_past = "", 0
    for token_id, length in zip(kept, lengths, strict=False):
        piece = b""
        if length and text.is_plain:  # else in a record of several tokens, say
            text.pass_by()
            piece = text.plain_pieces()[token_id]
        num_past += bool(piece)
        sent += json.loads(b'"' + piece + b'"') if piece else text.feed(token_id)
        assert expected.startswith(sent)
    last = text.finish() if keep_bytes is None else text.finish(keep_bytes)
    assert sent + last == expected
    if all(lengths) and not set(b"".join(stop)) & set(whole) and all(map(has_piece, kept)):
        assert num_past == len(kept[min_tokens:])


def test_the_pieces_of_a_stream_with_stops_are_bounded_and_know_the_vocabulary(
    skipping, monkeypatch
):
    monkeypatch.setattr(detokenizer, "MOST_CLEAR_PIECES", 3)
    pieces = TextStream(skipping, (b"g w",)).plain_pieces()
    assert pieces is TextStream(skipping, (b"g w",)).plain_pieces()
    assert [pieces[i] for i in (2767, 905, 17, 19556, 2767)] == [
        b"",
        b" world",
        b"!",
        b"Hello",
        b"",
    ]
    assert len(pieces) <= 3
    for beyond in (49_152, 0xFFFF_FFFF):
        with pytest.raises(IndexError):
            pieces[beyond]
    monkeypatch.setattr(detokenizer, "MOST_STOP_SETS", 2)
    few = Pieces([b"a", b"b"], frozenset())
    for stop in (b"a", b"b", b"a", b"c"):
        few.clear_of(Marks((stop,)))
    assert list(few._clear) == [Marks((b"a",)), Marks((b"c",))]


def test_text_is_held_only_as_long_as_it_may_become_a_stop(skipping):
    deltas, text = feed(skipping, [2767, 2767, 905], stop=(b"g w!",))
    assert deltas == [" do", "g do", "g world"]
    assert text.finish() == ""
    deltas, text = feed(skipping, [2767, 2767], stop=(b"g w!",))
    assert text.finish() == "g"


@pytest.mark.parametrize(
    ("keep", "text"), [(2, " d"), (3, " do"), (5, " dog ")], ids=["before", "inside", "behind"]
)
def test_keep_bytes_cuts_the_held_text(skipping, keep, text):
    stream = TextStream(skipping, (b"og d",))
    sent = stream.feed(2767) + stream.feed(2767)
    assert sent == " d"
    assert sent + stream.finish(keep) == text


def test_what_several_tables_have_in_common_is_the_same_in_each(table, skipping):
    few = Pieces(table, frozenset({0}), others=skipping)
    fewer = Pieces(table, frozenset(), others=few)
    for pieces in (skipping, few, fewer):
        assert pieces.common is skipping.direct
        assert all(
            piece == ours for piece, ours in zip(pieces.common, pieces.direct, strict=True) if piece
        )
    assert fewer.direct[0] and not skipping.direct[0]


def test_a_token_that_ends_in_a_blank_is_not_clear_where_blanks_are_held():
    texts = ["a", " a", "a ", "\n", "a\u3000", "a\u00a0b", "a\u200b"]
    clear = Pieces([text.encode() for text in texts], frozenset()).clear_of(Marks((), True))
    assert [bool(clear[i]) for i in range(len(texts))] == [True, True, False, False, False, True, True]  # fmt: skip
