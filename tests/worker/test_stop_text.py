"""Stop strings where the byte table is not the text: worker and front end cut the same text at the same place."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.request import FinishReason, SamplingParams
from shmserve.stop import StopMatcher
from shmserve.token_bytes import TokenBytes
from shmserve.token_text import Decoding
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions


def word_piece():
    vocab = {word: i for i, word in enumerate(["[UNK]", "he", "##llo", "a", ".", "##b"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspace():
    words = ["<unk>", "\u2581he", "llo", "\u2581a", ".", "b"]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize("make", [word_piece, metaspace])
@pytest.mark.parametrize(
    ("stop", "kept", "num_fed"),
    [(b"hello a", "", 3), (b"o ab", "hell", 4), (b" a", "hello", 3), (b" he", "hello ab.", 6)],
)
def test_a_stop_string_is_found_in_the_text_that_is_shown(make, stop, kept, num_fed):
    tokenizer = make()
    table, is_exact = TokenBytes.from_tokenizer(tokenizer)
    decoding = Decoding(table.strips_leading_space, None if is_exact else tokenizer)
    params = SamplingParams(max_tokens=100, stop=(stop,))
    sequence = Sequence(1, 0, params, np.zeros(1, np.int32), 1, 1, matcher=StopMatcher(params.stop))
    conditions = StopConditions(table, (0,), decoding)
    text, shown = TextStream(Pieces(table.table(), frozenset({0}), decoding), params.stop), ""
    for number, token_id in enumerate([1, 2, 3, 5, 4, 1], 1):
        shown += text.feed(token_id)
        ending = conditions.judge_one(sequence, token_id, number, 100 - number)
        if ending is not None:
            break
    assert ending is not None and ending.reason is FinishReason.STOP_STRING
    assert number == num_fed
    assert kept.startswith(shown)
    assert shown + text.finish(ending.keep_bytes) == kept


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("shown_ids", [(), (5,), (5, 6)])
@pytest.mark.parametrize("stop", [b"c", b"bc", b"b<call>c", b"<call>", b"b</call>c"])
def test_special_tokens_that_are_shown_are_text_on_both_sides(stop, shown_ids, skips):
    """Marks of a tool format may be special tokens: the front end reads them, so the worker counts them."""
    words = [b"?", b"a", b"b", b"c", b"d", b"<call>", b"</call>", b"<eos>"]
    special = frozenset({5, 6, 7})
    params = SamplingParams(
        max_tokens=99, stop=(stop,), shown_ids=shown_ids, skip_special_tokens=skips
    )
    silent = (special - set(shown_ids)) if skips else frozenset()
    table = TokenBytes.from_list(words)
    sequence = Sequence(1, 0, params, np.zeros(1, np.int32), 1, 1, matcher=StopMatcher(params.stop))
    conditions = StopConditions(table, tuple(special))
    text, given = TextStream(Pieces(words, silent), params.stop), ""
    ids = [1, 7, 2, 5, 3, 4, 6, 1, 2, 6, 3, 7, 2, 3]
    whole = b"".join(b"" if i in silent else words[i] for i in ids)
    ending = None
    for number, token_id in enumerate(ids, 1):
        given += text.feed(token_id)
        ending = conditions.judge_one(sequence, token_id, number, 99 - number)
        if ending is not None:
            break
    at = whole.find(stop)
    assert (ending is not None) == (at >= 0)
    if ending is not None:
        assert given + text.finish(ending.keep_bytes) == whole[:at].decode()
