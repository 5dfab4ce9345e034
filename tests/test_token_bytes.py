"""The byte table: equal to the tokenizer's own decoding, or honest about not being so."""

import codecs
import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shmserve.token_bytes import SAMPLE_TEXTS, TokenBytes, byte_of_character

# From the public vocabulary of the default model.
FACTS = {
    19556: b"Hello",
    905: b" world",
    17: b"!",
    10813: b"\xf0\x9f",
    242: b"\x98",
    218: b"\x80",
    40303: b" \xf0\x9f\x98",
    15107: b" \xf0\x9f",
    24211: b"\xef\xbf\xbd",
    143: b"\xc4",
    233: b"\x8f",
    2756: b"\xc3\xa9",
    321: b"\xe2\x80",
    118: b"\xa8",
    131: b"\xb6",
    2767: b" dog",
    48124: b"STOP",
    5022: b" ST",
    7627: b"OP",
    537: b"one",
    827: b" two",
    1296: b" three",
    1876: b" four",
    **{33 + i: str(i + 1).encode() for i in range(5)},
    198: b"\n",
    0: b"<|endoftext|>",
    1: b"<|im_start|>",
    2: b"<|im_end|>",
}


def byte_level(added: list[AddedToken] | None = None) -> Tokenizer:
    alphabet = sorted(byte_of_character())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab["\u0120a"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in added or []:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def sentence_piece(*, strip: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(
        vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    stages = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(stages + [decoders.Strip(" ", 1, 0)] * strip)
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def test_the_default_models_table_has_the_known_bytes(default_model):
    table = default_model.token_bytes()
    assert len(table) == 49152
    assert {token_id: table[token_id] for token_id in FACTS} == FACTS
    assert table.table() == [table[i] for i in range(len(table))]
    assert default_model.token_bytes_exact and not default_model.strips_leading_space


def test_joined_bytes_equal_the_tokenizers_decode_on_random_ids(default_model):
    tokenizer, table = default_model.tokenizer(), default_model.token_bytes().table()
    special = set(default_model.special_token_ids)
    rng = random.Random(11)
    for _ in range(3000):
        ids = [rng.randrange(49152) for _ in range(rng.randint(1, 40))]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = "".join(decoder.decode(table[i]) for i in ids) + decoder.decode(b"", True)
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)
        kept = b"".join(table[i] for i in ids if i not in special).decode("utf-8", "replace")
        assert kept == tokenizer.decode(ids, skip_special_tokens=True)


def test_byte_level_covers_every_byte_once():
    assert sorted(byte_of_character().values()) == list(range(256))
    table, exact = TokenBytes.from_tokenizer(byte_level())
    assert exact and not table.strips_leading_space
    assert sorted(table.table()[:256]) == [bytes([byte]) for byte in range(256)]
    assert table[256] == b" a"


def test_added_tokens_are_their_own_text_even_with_a_blank_inside():
    added = [AddedToken("<|fim start|>", special=True), AddedToken("<tool>", special=False)]
    table, exact = TokenBytes.from_tokenizer(byte_level(added))
    assert exact
    assert table[257] == b"<|fim start|>"
    assert table[258] == b"<tool>"


@pytest.mark.parametrize("strip", [True, False])
def test_sentence_piece_is_exact_up_to_the_first_blank(strip):
    tokenizer = sentence_piece(strip=strip)
    table, exact = TokenBytes.from_tokenizer(tokenizer)
    assert exact
    assert table.strips_leading_space is strip
    assert table[tokenizer.token_to_id("<0xE2>")] == b"\xe2"
    assert table[tokenizer.token_to_id("\u2581a")] == b" a"
    ids = tokenizer.encode(" a \u20ac", add_special_tokens=False).ids
    text = b"".join(table[i] for i in ids).decode()
    assert text == " a \u20ac"
    assert tokenizer.decode(ids) == (text[1:] if strip else text)


def test_a_word_piece_tokenizer_is_not_called_exact():
    vocab = {"[UNK]": 0, "he": 1, "##llo": 2, "a": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    _, exact = TokenBytes.from_tokenizer(tokenizer)
    assert not exact


def test_a_decoder_that_does_more_than_bytes_is_not_called_exact():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")])
    _, exact = TokenBytes.from_tokenizer(tokenizer)
    assert not exact


def test_ids_without_a_token_have_no_bytes():
    table, exact = TokenBytes.from_tokenizer(byte_level(), vocab_size=300)
    assert exact and len(table) == 300
    assert table[256] == b" a" and table[257] == b"" and table[299] == b""


@pytest.mark.parametrize("token_id", [-1, 257])
def test_an_id_outside_the_vocabulary_is_an_index_error(token_id):
    table, _ = TokenBytes.from_tokenizer(byte_level())
    with pytest.raises(IndexError, match=str(token_id)):
        table[token_id]


def test_a_saved_table_loads_as_it_was(tmp_path):
    table, _ = TokenBytes.from_tokenizer(sentence_piece(strip=True))
    table.save(tmp_path / "t.bin")
    again = TokenBytes.load(tmp_path / "t.bin")
    assert again.table() == table.table()
    assert again.strips_leading_space


def test_a_damaged_table_file_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    TokenBytes.from_list([b"ab", b"", b"c"]).save(path)
    content = path.read_bytes()
    swapped = content[:36] + content[44:48] + content[40:44] + content[36:40] + content[48:]
    for damaged in (b"", content[:-1], content + b"x", b"XXXXXXXX" + content[8:], swapped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"t\.bin"):
            TokenBytes.load(path)


def test_the_sample_texts_survive_a_round_trip_through_the_default_model(default_model):
    tokenizer, table = default_model.tokenizer(), default_model.token_bytes().table()
    for text in SAMPLE_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(table[i] for i in ids).decode() == text


def test_ids_that_only_pad_a_vocabulary_are_told_from_those_with_a_token():
    table = TokenBytes.from_list([b"a", b"", b"b", b"", b""])
    assert (len(table), table.num_used) == (5, 3)
    assert TokenBytes.from_list([b"", b""]).num_used == 0
