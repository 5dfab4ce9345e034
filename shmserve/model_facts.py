"""What the front end and the worker must know about a model besides its weights.

Owns: reading those facts from a GGUF file's metadata, or from the JSON files of a Hugging Face
folder. Never: reads weights, writes anything, or makes up what a file does not say (a model without
a chat template has none), but for the well-known ends of answers.

Used while a model is prepared. Every failure is a `ModelError` that names the file.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.model_cache import ModelError
from shmserve.tokenizer_build import build_tokenizer

END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
        *("<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    )
)
"""Control tokens that end an answer, whatever a GGUF file says: it has room for three, and many files name but one. Without them the
answers of a Llama 3 whose file says <|end_of_text|>, and those of a Qwen to a plain prompt, would never end."""

CLASS_TIMEOUT_S = 120
MOST_IDS = 1 << 24
"""Of a vocabulary: there is a table with an entry for each, so a number that is absurd must not get that far."""

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    tokenizer: Tokenizer
    architecture: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    unk_token_id: int | None
    add_bos_token: bool
    add_eos_token: bool
    chat_template: str | None


def facts_of_gguf(path: Path) -> ModelFacts:
    try:
        file = GGUFFile(path)
    except GGUFError as error:
        raise ModelError(str(error)) from None
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path}: the file does not say what model it is (general.architecture)")
    if _number(metadata, "split.count", path) not in (None, 0, 1):
        raise ModelError(f"{path}: one part of a split model; join the parts into one file first")
    context_length = _number(metadata, f"{architecture}.context_length", path)
    if context_length is None or context_length < 1:
        found = "no" if context_length is None else f"{context_length} tokens as"
        raise ModelError(f"{path}: the file gives {found} {architecture}.context_length")
    built = build_tokenizer(metadata, path)
    tokenizer = built.tokenizer
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        vocab_size = max(vocab_size, embedding.shape[0])

    def token_id(name: str, *, is_needed: bool = True) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = _number(metadata, key, path)
        if value is not None and not 0 <= value < vocab_size:
            if not is_needed:  # converters wrote 4294967295 for a model that has none
                return None
            raise ModelError(f"{path}: {key} is {value}, the vocabulary has {vocab_size} ids")
        return value

    unknown = token_id("unknown", is_needed=False)
    named = [
        i
        for i, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if token.special and token.content in END_TEXTS and i != unknown  # that one has its meaning
    ]
    ends = (token_id("eos"), token_id("eot"), token_id("eom"), *named)
    bos = token_id("bos")
    template = metadata.get("tokenizer.chat_template")
    return ModelFacts(
        tokenizer=tokenizer,
        architecture=architecture,
        vocab_size=vocab_size,
        context_length=context_length,
        bos_token_id=bos,
        eos_token_ids=_distinct(ends),
        pad_token_id=token_id("padding", is_needed=False),
        unk_token_id=unknown,
        add_bos_token=built.adds_bos and bos is not None,
        add_eos_token=built.adds_eos and token_id("eos") is not None,
        chat_template=template if isinstance(template, str) and template else None,
    )


def facts_of_folder(folder: Path) -> ModelFacts:
    if not (folder / "config.json").is_file():
        hint = ""
        if files := sorted(folder.glob("*.gguf")):
            hint = f"; to serve the GGUF file in it give {files[0]}"
        raise ModelError(f"{folder}: not a model folder, it has no config.json{hint}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: no weights found, the folder has no *.safetensors file")
    config = _json(folder / "config.json")
    text = config.get("text_config")
    body: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    generation = _json(folder / "generation_config.json", optional=True)
    settings = _json(folder / "tokenizer_config.json", optional=True)
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    where = folder / "config.json"

    def ids_of(values: Mapping[str, Any], name: str) -> list[int]:
        """Some files have -1 for a token that the model does not have."""
        return [i for i in _ids(values.get(f"{name}_token_id")) if 0 <= i < (vocab_size or 0)]

    def named(name: str) -> int | None:
        """The id of a token that tokenizer_config.json gives as text."""
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        return tokenizer.token_to_id(content) if isinstance(content, str) else None

    def token_id(name: str) -> int | None:
        by_name = named(name)
        if by_name is not None:
            return by_name
        if settings.get(f"{name}_token", "") is None:  # it says that there is none
            return None
        return next(iter(ids_of(body, name)), None)

    architecture = body.get("model_type")
    if not isinstance(architecture, str):
        raise ModelError(f"{where}: it does not say what model it is (model_type)")
    vocab_size = _number(body, "vocab_size", where)
    lengths = (_number(body, key, where) for key in _CONTEXT_KEYS)
    context_length = next((length for length in lengths if length), None)
    if isinstance(text, dict) and not (vocab_size and context_length):
        unsaid = _sizes_of_class(folder)
        vocab_size = vocab_size or unsaid.get("vocab_size")
        context_length = context_length or unsaid.get("context_length")
    if context_length and context_length > 0:
        context_length = max(context_length, _stretched(body, context_length))
    if not vocab_size or not context_length:
        missing = "vocab_size" if not vocab_size else _CONTEXT_KEYS[0]
        raise ModelError(f"{where}: it gives no {missing} (model_type {architecture!r})")
    if not 0 < vocab_size <= MOST_IDS or context_length < 1:
        sizes = f"a vocabulary of {vocab_size}, a context of {context_length} tokens"
        raise ModelError(f"{where}: no model has {sizes}")
    bos = token_id("bos")
    ends = ids_of(generation, "eos") or ids_of(body, "eos")
    return ModelFacts(
        tokenizer=tokenizer,
        architecture=architecture,
        vocab_size=vocab_size,
        context_length=context_length,
        bos_token_id=bos,
        eos_token_ids=_distinct((named("eos"), *ends)),  # the first is the template's eos_token
        pad_token_id=token_id("pad"),
        unk_token_id=token_id("unk"),
        add_bos_token=_adds_bos(tokenizer, settings, bos),
        add_eos_token=False,
        chat_template=_chat_template(folder, settings),
    )


_SIZES_OF_CLASS = """
import json, sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
text = config.get_text_config(decoder=True)
print(json.dumps({"vocab_size": text.vocab_size, "context_length": text.max_position_embeddings}))
"""


def _sizes_of_class(folder: Path) -> dict[str, int]:
    """What transformers' class takes where the text part of a larger model says nothing, as in Gemma 3's files; empty if it knows neither.

    In a process of its own: transformers takes seconds and much memory, and nothing else here needs it.
    """
    command = [sys.executable, "-P", "-c", _SIZES_OF_CLASS, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLASS_TIMEOUT_S)
        found = json.loads((done.stdout.splitlines() or ["{}"])[-1])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}  # the caller says what is missing
    return {key: value for key, value in found.items() if isinstance(value, int)}


def _stretched(config: Mapping[str, Any], context_length: int) -> int:
    """What YaRN makes of the context, where `max_position_embeddings` is still that of the training; 0 without it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]  # by layer type, as in Gemma 3
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    original = rope.get("original_max_position_embeddings") or context_length
    factor = rope.get("factor")
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return 0  # who loads the model says what is wrong
    return int(original * factor) if 0 < factor < 1e6 else 0


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelError(
            f"{path.parent}: the folder has no tokenizer.json; save the tokenizer once with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a usable tokenizer: {error}") from None
    # Left over from training in some repositories; they would cut or pad prompts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _adds_bos(tokenizer: Tokenizer, settings: Mapping[str, Any], bos: int | None) -> bool:
    """What the config says; else what the tokenizer itself does to a prompt."""
    if bos is None:
        return False
    explicit = settings.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit
    return tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of the folder: its own file first, then the one called `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_bytes().decode() or None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: cannot read it: {error}") from None
    template = settings.get("chat_template")
    if template is None:
        template = _json(folder / "chat_template.json", optional=True).get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) and template else None


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        # Not msgspec: some published configs have Infinity in them, which Python's reader takes.
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: not a JSON object")
    return values


def _number(values: Mapping[str, object], key: str, path: Path) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{path}: {key} is {value!r}, not a whole number")
    return value


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]


def _distinct(ids: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(i for i in ids if i is not None))
