"""A tokenizer of the tokenizers library, built from the metadata of a GGUF file.

Owns: what `tokenizer.ggml.*` means: the model kind, the merges, which tokens are special, what a raw
prompt gets in front and behind (`gguf_pre_tokenizers.py` has the names of pre-tokenizers). Never:
guesses a pre-tokenizer, adds a BOS, reads tensors.

A tokenizer that is nearly right is worse than none: ids come out, and the model answers badly
without any error. So an unknown name, missing merges or a form that cannot be rebuilt exactly is a
`ModelError`. Used while a model is prepared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from shmserve.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from shmserve.model_cache import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_WORD_BOUNDARY = "\u2581"


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """`adds_bos`, `adds_eos`: whether a raw prompt gets a BOS in front, an EOS behind."""

    tokenizer: Tokenizer
    adds_bos: bool
    adds_eos: bool


def build_tokenizer(metadata: dict[str, object], path: Path) -> BuiltTokenizer:
    """What the file describes. `path` is for errors."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata, path)
    types = _token_types(metadata, tokens, path)
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, path)
        vocab = _vocabulary(tokens, types)
        tokenizer = _byte_level_bpe(vocab, _merges(metadata, path), pre, path)
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
    return BuiltTokenizer(
        tokenizer,
        adds_bos=_flag(metadata, "add_bos_token", path, default=adds_bos),
        adds_eos=_flag(metadata, "add_eos_token", path, default=False),
    )


def _flag(metadata: dict[str, object], name: str, path: Path, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"{path}: tokenizer.ggml.{name} is {value!r}, neither true nor false")
    return value


def _tokens(metadata: dict[str, object], path: Path) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError(f"{path}: the file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{path}: the tokenizer has the same token twice")
    return tokens


def _token_types(metadata: dict[str, object], tokens: list[str], path: Path) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not _are_numbers(types, "iu", len(tokens)):
        raise ModelError(
            f"{path}: tokenizer.ggml.token_type does not give a type for each of the "
            f"{len(tokens)} tokens, so special tokens cannot be told from text"
        )
    return [int(kind) for kind in types]


def _are_numbers(values: object, kinds: str, count: int) -> TypeGuard[NDArray[np.generic]]:
    """Whether it is an array of `count` numbers of one of numpy's kinds."""
    return isinstance(values, np.ndarray) and values.dtype.kind in kinds and len(values) == count


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


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Ids by token, without the made-up names of unused ids at the end: those pad the model's matrices and are no tokens."""
    used = [i for i, kind in enumerate(types) if kind != UNUSED]
    return {token: token_id for token_id, token in enumerate(tokens[: max(used, default=-1) + 1])}


def _byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer, path: Path
) -> Tokenizer:
    tokenizer = Tokenizer(_bpe(path, vocab, merges, ignore_merges=pre.ignore_merges))
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    metadata: dict[str, object], tokens: list[str], types: list[int], path: Path
) -> Tokenizer:
    """SentencePiece's BPE: the pair whose piece has the best score merges first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not _are_numbers(scores, "f", len(tokens)) or not np.isfinite(scores).all():
        raise ModelError(f"{path}: tokenizer.ggml.scores does not give a score for each token")
    for token, kind in zip(tokens, types, strict=True):
        if kind == USER_DEFINED and _WORD_BOUNDARY in token:
            raise ModelError(
                f"{path}: the tokenizer has the added token {token!r} with a word boundary in it, "
                "which cannot be rebuilt exactly; use the model's Hugging Face folder instead"
            )
    vocab = _vocabulary(tokens, types)
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
    space_prefix = _flag(metadata, "add_space_prefix", path, default=True)
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
