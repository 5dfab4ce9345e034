"""A tokenizer of the tokenizers library, built from the metadata of a GGUF file.

Owns: what `tokenizer.ggml.*` means: the model kind, the pre-tokenizer that a name stands for, which
tokens are special. Never: guesses a pre-tokenizer, adds a BOS, reads tensors.

A tokenizer that is nearly right is worse than none: ids come out, and the model answers badly
without any error. So an unknown name, missing merges or a form that cannot be rebuilt exactly is a
`ModelError`. Used while a model is prepared.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from shmserve.model_cache import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_WORD_BOUNDARY = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_BLANKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _SYMBOLS_AND_BLANKS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _SYMBOLS_AND_BLANKS
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before byte-level BPE. Without `pattern` GPT-2's own cut applies."""

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False  # a piece that is a token as a whole is taken without merging
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)

# `tokenizer.ggml.pre`. Add a name only after comparing ids with the model's own tokenizer file, as
# for llama-bpe and qwen2 (3,000 texts, no difference), or at least its pattern, as for tekken.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "default": _GPT2,  # what converters write that name no model; nothing better is known
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
}


def build_tokenizer(metadata: dict[str, object], path: Path) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a raw prompt gets a BOS in front. `path` is for errors."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata, path)
    types = _token_types(metadata, tokens, path)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, path)
        tokenizer = _byte_level_bpe(tokens, _merges(metadata, path), pre, path)
        adds_bos = pre.adds_bos
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, tokens, types, path)
        adds_bos = True
    else:
        raise ModelError(
            f"{path}: tokenizer kind {kind!r} is not supported (gpt2 and llama are); "
            "use the model's Hugging Face folder instead"
        )
    typed = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in typed if k in (CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in typed if k == USER_DEFINED]
    )
    explicit = metadata.get("tokenizer.ggml.add_bos_token")
    return tokenizer, adds_bos if explicit is None else bool(explicit)


def _tokens(metadata: dict[str, object], path: Path) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{path}: the file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{path}: the tokenizer has the same token twice")
    return tokens


def _token_types(metadata: dict[str, object], tokens: list[str], path: Path) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.token_type does not give a type for each of the "
            f"{len(tokens)} tokens, so special tokens cannot be told from text"
        )
    return [int(kind) for kind in types]


def _merges(metadata: dict[str, object], path: Path) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise ModelError(
            f"{path}: the tokenizer has no merges (tokenizer.ggml.merges), so text cannot be "
            "tokenised; convert the model again with a current converter"
        )
    pairs = []
    for merge in merges:
        left, blank, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and blank and right) or " " in right:
            raise ModelError(f"{path}: tokenizer.ggml.merges has {merge!r}, which is no pair")
        pairs.append((left, right))
    return pairs


def _pre_tokenizer(metadata: dict[str, object], path: Path) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise ModelError(
            f"{path}: the file does not name its pre-tokenizer (tokenizer.ggml.pre), so its "
            "tokenizer cannot be rebuilt exactly; convert the model again with a current converter"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported "
            f"({', '.join(sorted(PRE_TOKENIZERS))} are); "
            "use the model's Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(
    tokens: list[str], merges: list[tuple[str, str]], pre: PreTokenizer, path: Path
) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(path, vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    to_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_alphabet])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    metadata: dict[str, object], tokens: list[str], types: list[int], path: Path
) -> Tokenizer:
    """SentencePiece's BPE: the pair whose piece has the best score merges first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.scores does not give a score for each token")
    for token, kind in zip(tokens, types, strict=True):
        if kind == USER_DEFINED and _WORD_BOUNDARY in token:
            raise ModelError(
                f"{path}: the tokenizer has the added token {token!r} with a word boundary in it, "
                "which cannot be rebuilt exactly; use the model's Hugging Face folder instead"
            )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    normal = [i for i, kind in enumerate(types) if kind == NORMAL]
    unknown = [token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN]
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    model = _bpe(
        path,
        vocab,
        _merges_from_scores({tokens[i]: float(scores[i]) for i in normal}),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    tokenizer = Tokenizer(model)
    space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_boundary = normalizers.Replace(" ", _WORD_BOUNDARY)
    stages: list[decoders.Decoder] = [
        decoders.Replace(_WORD_BOUNDARY, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_WORD_BOUNDARY), to_boundary]
        )
        stages.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_boundary
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def _merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two pieces, best score of the result first.

    SentencePiece breaks ties by place, leftmost first; with ranks the same comes out if a longer
    left part is preferred (compared with the original on 20,000 texts with long runs of one sign).
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, -len(left), -len(right), left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(
    path: Path,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
) -> models.BPE:
    try:
        return models.BPE(
            vocab=vocab,
            merges=merges,
            ignore_merges=ignore_merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: the tokenizer's merges do not fit its tokens: {error}") from None
