"""The text of any ids, in a stream, for each kind of tokenizer: what the library's decode of all of them gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.token_bytes import TokenBytes, byte_of_character
from shmserve.token_text import MOST_HELD_TOKENS, Decoding, StreamDecoder

BOUNDARY = "\u2581"
WORDS = [
    BOUNDARY,
    "a",
    BOUNDARY + "a",
    "b",
    BOUNDARY + "bc",
    ".",
    "\u20ac",
    BOUNDARY + "\U0001f600",
]


def byte_level():
    vocab = {character: i for i, character in enumerate(sorted(byte_of_character()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback():
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(BOUNDARY, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def unigram(pieces=()):
    scores = [("<unk>", 0.0), *((piece, -1.0) for piece in (*WORDS, *pieces))]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram_with_double_blanks():
    return unigram([BOUNDARY * 2, BOUNDARY * 2 + "a"])


def word_piece():
    words = [
        "[UNK]",
        "he",
        "##llo",
        "a",
        "##\u20ac",
        ".",
        ",",
        "n't",
        "##'s",
        "'",
        "do",
        "\U0001f600",
        "\ufffd",
    ]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


# Whether the table is exact, and whether it strips.
KINDS = {
    byte_level: (True, False),
    byte_fallback: (True, True),
    unigram: (True, True),
    unigram_with_double_blanks: (False, True),
    word_piece: (False, False),
}


class Kind:
    def __init__(self, make):
        self.tokenizer = make()
        self.tokenizer.add_special_tokens(["<s>", "</s>"])
        self.special = frozenset(map(self.tokenizer.token_to_id, ("<s>", "</s>")))
        self.bytes, self.is_exact = TokenBytes.from_tokenizer(self.tokenizer)
        self.decoding = Decoding(
            self.bytes.strips_leading_space, None if self.is_exact else self.tokenizer
        )
        table = self.bytes.table()
        self.pieces = {
            True: Pieces(table, self.special, self.decoding),
            False: Pieces(table, frozenset(), self.decoding),
        }
        # Bytes of fallback tokens come as whole characters: a broken run is the library's own business.
        self.units = [
            [i] for i in range(len(table)) if not self.tokenizer.id_to_token(i).startswith("<0x")
        ]
        if make is byte_fallback:
            self.units += [[1 + byte for byte in c.encode()] for c in "a\u20ac\U0001f600 "] * 3


BUILT = {make: Kind(make) for make in KINDS}
kinds = pytest.mark.parametrize("kind", [pytest.param(BUILT[m], id=m.__name__) for m in KINDS])


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_check_at_load_knows_each_kind(make):
    kind = BUILT[make]
    assert (kind.is_exact, kind.bytes.strips_leading_space) == KINDS[make]


@kinds
@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_the_decode_of_all_ids(kind, data, skip):
    units = st.one_of(
        st.sampled_from(kind.units), st.sampled_from([[i] for i in sorted(kind.special)])
    )
    ids = [i for unit in data.draw(st.lists(units, max_size=30)) for i in unit]
    text = TextStream(kind.pieces[skip])
    shown = "".join([text.feed(token_id) for token_id in ids])
    shown += text.finish()
    assert shown == kind.tokenizer.decode(ids, skip_special_tokens=skip)


@kinds
@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(data=st.data())
def test_a_plain_stream_may_go_on_by_the_table(kind, data):
    """What the pump does by itself: the pieces of tokens that are whole characters."""
    ids = [
        i for unit in data.draw(st.lists(st.sampled_from(kind.units), max_size=30)) for i in unit
    ]
    pieces, text, shown = kind.pieces[False], TextStream(kind.pieces[False]), ""
    for token_id in ids:
        if text.is_plain and pieces.direct[token_id]:
            shown += pieces.raw(token_id).decode()
        else:
            shown += text.feed(token_id)
    assert shown + text.finish() == kind.tokenizer.decode(ids, skip_special_tokens=False)


def test_an_inexact_table_is_never_plain():
    text = TextStream(BUILT[word_piece].pieces[True])
    assert not text.is_plain
    assert [text.feed(i) for i in (1, 2, 3)] == ["he", "llo", " a"]
    assert not text.is_plain


def test_the_dummy_space_is_taken_off_once():
    kind = BUILT[unigram]
    a = kind.tokenizer.token_to_id(BOUNDARY + "a")
    text = TextStream(kind.pieces[True])
    assert not text.is_plain
    assert [text.feed(i) for i in (min(kind.special), a, a)] == ["", "a", " a"]
    assert text.is_plain


def test_a_run_of_replacement_characters_is_decoded_in_linear_work():
    kind, decoded = BUILT[word_piece], 0

    class Counting:
        def decode(self, ids, skip_special_tokens):
            nonlocal decoded
            decoded += len(ids)
            return kind.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    broken, amounts = kind.tokenizer.token_to_id("\ufffd"), []
    for count in (1300, 5200):
        decoded = 0
        source = StreamDecoder(Counting(), lambda _: b"x")
        text = b"".join([source.feed(broken) for _ in range(count)]) + source.finish()
        assert text.decode() == kind.tokenizer.decode([broken] * count)
        amounts.append(decoded)
    assert amounts[1] <= 4.3 * amounts[0] and amounts[0] < 1300 * 3 * MOST_HELD_TOKENS
