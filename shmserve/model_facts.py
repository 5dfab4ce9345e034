"""What the front end and the worker must know about a model besides its weights.

Owns: reading those facts from a GGUF file's metadata, or from the JSON files of a Hugging Face
folder. Never: reads weights, writes anything, or makes up what a file does not say (a model without
a chat template has none).

Used while a model is prepared. Every failure is a `ModelError` that names the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shmserve.gguf import GGUFError, GGUFFile
from shmserve.model_cache import ModelError
from shmserve.tokenizer_build import build_tokenizer

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

    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = _number(metadata, key, path)
        if value is not None and not 0 <= value < vocab_size:
            raise ModelError(f"{path}: {key} is {value}, the vocabulary has {vocab_size} ids")
        return value

    ends = (token_id("eos"), token_id("eot"), token_id("eom"))
    bos = token_id("bos")
    template = metadata.get("tokenizer.chat_template")
    return ModelFacts(
        tokenizer=tokenizer,
        architecture=architecture,
        vocab_size=vocab_size,
        context_length=context_length,
        bos_token_id=bos,
        eos_token_ids=_distinct(ends),
        pad_token_id=token_id("padding"),
        unk_token_id=token_id("unknown"),
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

    def named(name: str) -> int | None:
        """The id of a token that tokenizer_config.json gives as text."""
        token = settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        return tokenizer.token_to_id(content) if isinstance(content, str) else None

    def token_id(name: str) -> int | None:
        by_name = named(name)
        if by_name is not None:
            return by_name
        return next(iter(_ids(body.get(f"{name}_token_id"))), None)

    architecture = body.get("model_type")
    if not isinstance(architecture, str):
        raise ModelError(f"{where}: it does not say what model it is (model_type)")
    vocab_size = _number(body, "vocab_size", where)
    lengths = (_number(body, key, where) for key in _CONTEXT_KEYS)
    context_length = next((length for length in lengths if length), None)
    if not vocab_size or not context_length:
        missing = "vocab_size" if not vocab_size else _CONTEXT_KEYS[0]
        raise ModelError(f"{where}: it gives no {missing} (model_type {architecture!r})")
    bos = token_id("bos")
    ends = _ids(generation.get("eos_token_id")) or _ids(body.get("eos_token_id"))
    return ModelFacts(
        tokenizer=tokenizer,
        architecture=architecture,
        vocab_size=vocab_size,
        context_length=context_length,
        bos_token_id=bos,
        eos_token_ids=_distinct((*ends, named("eos"))),
        pad_token_id=token_id("pad"),
        unk_token_id=token_id("unk"),
        add_bos_token=_adds_bos(tokenizer, settings, bos),
        add_eos_token=False,
        chat_template=_chat_template(folder, settings),
    )


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
