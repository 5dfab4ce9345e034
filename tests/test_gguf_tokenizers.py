"""Tokenizers that went into a GGUF file and came back: the same ids as the ones they were made from.

Each is trained here with the cut, the normalizer and the settings of a family's own tokenizer file, written as the converters
write it, and read. The texts have what tokenizers differ in: digits, blanks, line ends, contractions, CJK, marks, emoji.
"""

import json
import random

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from shmserve.models import ModelError, prepare
from shmserve.token_bytes import byte_of_character

PROSE = [
    "The kettle had been on the stove for 12 minutes when the letter came; it wasn't hers.",
    "don't DON'T we'Ll you're I'VE he'd o'clock 'tis rock'n'roll",
    "1 12 123 1234 12345 1234567 3.14159 1,000,000 0x1F \u00bd \u00b2\u00b3 \u0663\u0664 \u2167",
    "a  b   c    d\te\t\tf \n g\n\nh\r\ni\r\n\r\n  j   \n   \n  ",
    "x = foo_bar(Baz, 'qux')  # helloWorld HTTPServer2 camelCase\n\treturn x**2 / y // z\n",
    "\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e \u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4",
    "\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f \u2705 \U0001f999\U0001f999 fin.",
    "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 \u0432 caf\u00e9 na\u00efve e\u0301te\u0301 \u017dlut\u00fd \u01c5 \u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "!!!??? ... --- === <<>> $5 +7 ^_^ ~~ `code` |a|b| \"quoted\" ''''' ``````",
    "https://example.org/a/b?c=d&e=f#g user@host.net /usr/lib//x",
    "\u00a0nbsp \u3000wide \u2028ls \u0085nel \ufeffbom",
    "   leading and trailing   ",
    "",
    "\n",
    " ",
]


def texts() -> list[str]:
    """The prose, and pieces of it thrown together so that every kind borders on every other."""
    rng = random.Random(17)
    pieces = [text[i : i + rng.randint(1, 9)] for text in PROSE for i in range(0, len(text), 4)]
    mixed = ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(400)]
    return PROSE + mixed


def byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


DIGIT = pre_tokenizers.Digits(individual_digits=True)
PUNCTUATION = pre_tokenizers.Punctuation(behavior="contiguous")
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_STAGES = [byte_level(True)]
# name -> (the stages of the pre-tokenizer of the family's tokenizer.json, NFC or not, ignore_merges)
FAMILIES = {
    "gpt-2": (GPT2_STAGES, False, False),
    "smollm": ([DIGIT, *GPT2_STAGES], False, False),
    "starcoder": ([DIGIT, *GPT2_STAGES], False, False),
    "refact": ([DIGIT, *GPT2_STAGES], False, False),
    "command-r": ([DIGIT, *GPT2_STAGES], True, False),
    "mpt": (GPT2_STAGES, True, False),
    "olmo": (GPT2_STAGES, True, False),
    "llama-bpe": ([split(WORDS + r"|\p{N}{1,3}" + TAIL), byte_level(False)], False, True),
    "dbrx": ([split(WORDS + r"|\p{N}{1,3}" + TAIL), byte_level(False)], False, False),
    "qwen2": ([split(WORDS + r"|\p{N}" + TAIL), byte_level(False)], True, False),
    "deepseek-r1-qwen": ([split(WORDS + r"|\p{N}" + TAIL), byte_level(False)], True, False),
    "gpt-4o": ([split(O200K), byte_level(False)], False, False),
    "tekken": (
        [
            split(O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")),
            byte_level(False),
        ],
        False,
        True,
    ),
    "falcon": (
        [
            PUNCTUATION,
            *GPT2_STAGES,
            pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ],
        False,
        False,
    ),
    "deepseek-coder": (
        [
            *map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK)),
            DIGIT,
            byte_level(False),
        ],
        False,
        False,
    ),
    "deepseek-v3": (
        [
            *map(split, (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK_V3)),
            byte_level(False),
        ],
        False,
        False,
    ),
}


def trained(stages, nfc: bool, ignore_merges: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=sorted(byte_of_character()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, toy_metadata, **changes) -> dict[str, object]:
    """As a converter writes it."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [1 if i not in added else 3 if added[i].special else 4 for i in range(len(tokens))]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return toy_metadata(
        tokens=tokens, token_type=kinds, merges=[" ".join(pair) for pair in merges], **changes
    )


@pytest.mark.parametrize("pre", FAMILIES)
def test_a_tokenizer_written_into_a_gguf_gives_the_same_ids(
    write_gguf, cache_dir, toy_metadata, pre
):
    source = trained(*FAMILIES[pre])
    path = write_gguf(metadata_of(source, toy_metadata, pre=pre))
    ours = prepare(str(path), cache_dir=cache_dir).tokenizer()
    for text in [*texts(), "a<|end|>b<tool> c<|start|>"]:
        theirs = source.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == theirs.ids, repr(text)
        assert ours.decode(theirs.ids, skip_special_tokens=False) == source.decode(
            theirs.ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("default", "a 1234567!=b", ["a", "\u0120", "123", "456", "7", "!=", "b"]),
        ("deepseek-llm", "ab 12\u4f60\u597d!\n", ["ab", "\u0120", "1", "2", "你好", "!", "\n"]),
        ("smaug-bpe", "I'LL 12345", ["I", "'LL", "\u0120", "123", "45"]),
    ],
)
def test_cuts_without_a_source_to_compare_with(
    write_gguf, cache_dir, toy_metadata, pre, text, cuts
):
    model = prepare(str(write_gguf(toy_metadata(pre=pre))), cache_dir=cache_dir)
    decoder = decoders.ByteLevel()
    found = model.tokenizer().pre_tokenizer.pre_tokenize_str(text)
    assert [decoder.decode([cut]) for cut, _ in found] == [
        decoder.decode([c]) if c.isascii() or c == "\u0120" else c for c in cuts
    ]


@pytest.mark.parametrize("name", ["add_bos_token", "add_eos_token"])
def test_a_flag_that_is_no_flag_is_refused(write_gguf, cache_dir, toy_metadata, name):
    path = write_gguf(toy_metadata(**{name: "yes"}))
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{name} is 'yes'"):
        prepare(str(path), cache_dir=cache_dir)


def test_an_eos_behind_a_prompt_is_what_the_file_says(write_gguf, cache_dir, toy_metadata):
    for said, expected in (
        ({}, False),
        ({"add_eos_token": False}, False),
        ({"add_eos_token": True}, True),
    ):
        model = prepare(str(write_gguf(toy_metadata(**said))), cache_dir=cache_dir)
        assert model.add_eos_token is expected
