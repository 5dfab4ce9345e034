"""The tokenizer built from a GGUF's metadata is exact, or there is none and one line says why."""

import jinja2
import pytest

from shmserve.models import ModelError, prepare


def encode(model, text):
    return model.tokenizer().encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("a  5", [81, 256, 37]),
        (" dog dog", [2767, 2767]),
        ("\u010f", [143, 233]),
        ("a\u2028b\u0085c\r\nd", [81, 321, 118, 82, 141, 223, 83, 201, 198, 84]),
        ("12345", [33, 34, 35, 36, 37]),
        ("<|im_start|>\n<|im_end|>", [1, 198, 2]),
    ],
)
def test_the_default_model_tokenises_exactly_K4(default_model, text, ids):
    assert encode(default_model, text) == ids


def test_a_chat_prompt_has_31_tokens_and_no_bos_before_the_template(default_model):
    template = jinja2.Environment().from_string(default_model.chat_template)
    messages = [{"role": "user", "content": "Hi"}]
    ids = encode(default_model, template.render(messages=messages, add_generation_prompt=True))
    assert len(ids) == 31
    assert ids[:3] == [1, 9690, 198] and ids[-4:] == [1, 520, 9531, 198]
    assert ids.count(1) == 3


@pytest.mark.parametrize(
    ("dropped", "changes", "says"),
    [
        ("tokenizer.ggml.merges", {}, "no merges"),
        ("", {"merges": ["h e", "nopair"]}, "'nopair', which is no pair"),
        ("", {"merges": ["h \u20ac"]}, "merges do not fit its tokens"),
        ("", {"pre": "strange-bpe"}, "pre-tokenizer 'strange-bpe'.* not supported"),
        ("tokenizer.ggml.pre", {}, "does not name its pre-tokenizer"),
        ("", {"model": "rwkv"}, "tokenizer kind 'rwkv' is not supported"),
        ("tokenizer.ggml.tokens", {}, "holds no tokenizer"),
        ("", {"tokens": ["a"] * 262}, "same token twice"),
        ("", {"token_type": [1]}, "token_type does not give a type for each"),
        ("", {"eos_token_id": 9999}, "eos_token_id is 9999, the vocabulary has 262 ids"),
        ("llama.context_length", {}, r"no llama\.context_length"),
        ("general.architecture", {}, r"general\.architecture"),
        ("split", {}, "one part of a split model"),
    ],
)
def test_a_gguf_that_cannot_be_served_exactly_is_refused_K4(
    write_gguf, cache_dir, dropped, changes, says, toy_metadata
):
    more = {"split.count": 3} if dropped == "split" else {}
    path = write_gguf(toy_metadata(dropped, **changes) | more)
    with pytest.raises(ModelError, match=says) as caught:
        prepare(str(path), cache_dir=cache_dir)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert not list(cache_dir.glob("models/*"))


def test_user_defined_tokens_are_matched_whole_but_are_not_special(
    write_gguf, cache_dir, toy_metadata
):
    types = [3, 4] + [1] * 260
    model = prepare(str(write_gguf(toy_metadata(token_type=types))), cache_dir=cache_dir)
    assert model.special_token_ids == (0,)
    assert encode(model, "<|start|>he")[0] == 1


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("smollm", "a  12", ["a", "\u0120\u0120", "1", "2"]),
        ("gpt-2", "don't 123", ["don", "'t", "\u0120123"]),
        ("llama-bpe", "I'LL 12345!\n", ["I", "'LL", "\u0120", "123", "45", "!\u010a"]),
        ("qwen2", "x 12", ["x", "\u0120", "1", "2"]),
        ("tekken", "helloWorld/\n1", ["hello", "World", "/\u010a", "1"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_do(
    write_gguf, cache_dir, pre, text, cuts, toy_metadata
):
    model = prepare(str(write_gguf(toy_metadata(pre=pre))), cache_dir=cache_dir)
    assert [cut for cut, _ in model.tokenizer().pre_tokenizer.pre_tokenize_str(text)] == cuts


def test_bos_by_default_follows_the_pre_tokenizer_and_the_file_overrides_it(
    write_gguf, cache_dir, toy_metadata
):
    for pre, explicit, expected in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ):
        said = {} if explicit is None else {"add_bos_token": explicit}
        path = write_gguf(toy_metadata(pre=pre, bos_token_id=1, **said))
        assert prepare(str(path), cache_dir=cache_dir).add_bos_token is expected


def sentence_piece(toy_metadata, pieces, scores, **changes):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return toy_metadata(
        "tokenizer.ggml.merges",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.eot_token_id",
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + scores,
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


# Scores as SentencePiece's BPE gives them: the earlier merged, the higher.
PIECES = ["\u2581a", "ab", "bc", "abc", "\u2581", "a", "b", "c"]
SCORES = [-float(i) for i in range(len(PIECES))]


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(
    write_gguf, cache_dir, toy_metadata
):
    model = prepare(
        str(write_gguf(sentence_piece(toy_metadata, PIECES, SCORES))), cache_dir=cache_dir
    )
    token = model.tokenizer().id_to_token
    # "\u2581a" outscores "ab", which outscores "bc"
    assert [token(i) for i in encode(model, "abc")] == ["\u2581a", "bc"]
    assert [token(i) for i in encode(model, "bab")] == ["\u2581", "b", "ab"]
    assert [token(i) for i in encode(model, "\u20ac")] == ["\u2581", "<0xE2>", "<0x82>", "<0xAC>"]
    assert encode(model, "<s>c")[0] == 1
    assert model.add_bos_token and model.unk_token_id is None
    assert model.token_bytes_exact and model.strips_leading_space
    assert model.tokenizer().decode(encode(model, "a b\u20ac c")) == "a b\u20ac c"


def test_sentence_piece_without_a_dummy_blank_keeps_the_first_blank(
    write_gguf, cache_dir, toy_metadata
):
    path = write_gguf(sentence_piece(toy_metadata, PIECES, SCORES, add_space_prefix=False))
    model = prepare(str(path), cache_dir=cache_dir)
    assert not model.strips_leading_space
    assert model.tokenizer().decode(encode(model, " a b")) == " a b"


def test_sentence_piece_breaks_ties_leftmost_first(write_gguf, cache_dir, toy_metadata):
    # One score for all, as a real vocabulary has for runs of blanks. The run of 6 cannot take one
    # more (there is no 7), but it takes the 2 behind it before that becomes a 3.
    pieces = ["\u2581", *("-" * length for length in (1, 2, 3, 4, 5, 6, 8))]
    path = write_gguf(sentence_piece(toy_metadata, pieces, [-1e9] * len(pieces)))
    model = prepare(str(path), cache_dir=cache_dir)
    tokens = model.tokenizer().encode("-" * 9, add_special_tokens=False).tokens
    assert tokens == ["\u2581", "-" * 8, "-"]


def test_unused_names_at_the_end_are_no_tokens(write_gguf, cache_dir, toy_metadata):
    """Converters name the rows that pad the model's matrices [PAD262], [PAD263] ...: nothing may sample them."""
    plain = toy_metadata()
    words, types = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    padding = [f"[PAD{len(words) + index}]" for index in range(3)]
    rows = len(words) + 3
    metadata = toy_metadata(tokens=words + padding, token_type=types + [5] * 3)
    tensors = {"token_embd.weight": ((rows, 1), "F32", bytes(4 * rows))}
    model = prepare(str(write_gguf(metadata, tensors)), cache_dir=cache_dir)
    assert model.vocab_size == rows and model.num_token_ids() == len(words)
    assert encode(model, "[PAD262]") == encode(model, "[") + encode(model, "PAD262]")
