"""How text is cut before byte-level BPE, by the name that a GGUF file gives its pre-tokenizer.

Owns: the table of names, and the cut that each stands for. Never: guesses, or reads a file. The names are llama.cpp's; the cuts
are those of the models' own tokenizer files, which llama.cpp imitates with what its expressions can say.

Add a name only after comparing ids with the model's own tokenizer: the cut of a model decides its ids, and one that is
nearly right is worse than none. Used while a model is prepared.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer as Cut

GPT2 = "gpt2"
"""Among `cuts`: GPT-2's own, which the byte-level step of the library does by itself."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Each of `cuts` is an expression that cuts what the ones before it left: its matches and what lies between them."""

    cuts: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken without merging
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def build(self) -> Cut:
        """The cuts, and the step to the alphabet of bytes, which is the last but where GPT-2's cut is not the last."""
        stages: list[Cut] = []
        for cut in self.cuts:
            if cut == GPT2:
                stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
            else:
                stages.append(pre_tokenizers.Split(Regex(cut), behavior="isolated"))
        if GPT2 not in self.cuts:
            stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(stages)


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CL100K = _CONTRACTIONS + "|" + _LETTERS + r"|\p{N}{1,3}" + _SYMBOLS + _BLANKS
_ONE_DIGIT = _CONTRACTIONS + "|" + _LETTERS + r"|\p{N}" + _SYMBOLS + _BLANKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(suffix: str, digits: str) -> str:
    """Words are cut where lower case turns to upper, as in o200k and its kin."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
    return words + "|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _BLANKS


# The letters of alphabets with two cases, as deepseek-llm lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS,
)
_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer((_CL100K,), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_ONE_DIGIT,), nfc=True)
_NEOX = PreTokenizer((GPT2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # No model has this cut: it is what llama.cpp does to files whose converter knew no better name, and so what they are
    # known to work with.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS),
    "command-r": PreTokenizer((r"\p{N}", GPT2), nfc=True),
    **dict.fromkeys(("mpt", "olmo"), _NEOX),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    "dbrx": PreTokenizer((_CL100K,)),
    "smaug-bpe": PreTokenizer((_CL100K,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": PreTokenizer((_by_case("", r"\p{N}"),), ignore_merges=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4"), PreTokenizer((_by_case(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))
    ),
    # Numbers are cut in the alphabet of bytes, where six bytes look like numbers to the library: its vocabulary shows it.
    "falcon": PreTokenizer((_PUNCTUATION, GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
}
