"""A model made ready to be served: a small folder that every process can read quickly.

Owns: `prepare`, which runs in the supervisor before any child is started, and `PreparedModel`,
which the children load. Never: reads or converts weights; the folder only says where they are.

    model.json            the fields of PreparedModel
    tokenizer.json        the tokenizer, built from the GGUF's metadata or copied
    chat_template.jinja   only if the model has one
    token_bytes.bin       the table of `token_bytes.py`

A folder is named by a hash of everything it was made from (the model's content, its place, the
spec, FORMAT_VERSION), so it is never changed: another model is another folder. Raw prompts are to
be encoded without the tokenizer's own special tokens, with `bos_token_id` before if
`add_bos_token`, and the first of `eos_token_ids` behind if `add_eos_token`.
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import msgspec
from tokenizers import Tokenizer

from shmserve.model_cache import (
    ModelError,
    Progress,
    cache_root,
    exclusive,
    publish,
    remembered_sha256,
)
from shmserve.model_facts import ModelFacts, facts_of_folder, facts_of_gguf
from shmserve.model_source import DEFAULT_MODEL, Source, locate
from shmserve.token_bytes import TokenBytes

__all__ = ["DEFAULT_MODEL", "FORMAT_VERSION", "ModelError", "PreparedModel", "prepare"]

FORMAT_VERSION = 4
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """All that a process needs to know of a model, besides its weights.

    `name` is what clients call it; `weights` a .gguf file or a folder with *.safetensors files.
    An id is a special token exactly if it is in `special_token_ids`.
    """

    folder: Path
    name: str
    spec: str
    weights: Path
    format: Literal["gguf", "safetensors"]
    architecture: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    unk_token_id: int | None
    add_bos_token: bool
    special_token_ids: tuple[int, ...]
    chat_template: str | None
    token_bytes_exact: bool
    strips_leading_space: bool
    add_eos_token: bool = False

    @classmethod
    def load(cls, folder: Path) -> "PreparedModel":
        """Reads a folder that `prepare` made. A ModelError if it is not one of this version."""
        try:
            values = msgspec.json.decode((folder / "model.json").read_bytes(), type=dict)
            template = folder / "chat_template.jinja"  # bytes: line ends are kept as they are
            values["chat_template"] = template.read_bytes().decode() if template.exists() else None
            version = values.pop("format_version", None)
            if version != FORMAT_VERSION:
                raise ModelError(f"{folder}: prepared by another version ({version!r})")
            return msgspec.convert({**values, "folder": folder}, cls, dec_hook=_to_path)
        except OSError as error:
            reason = error.strerror or error
            raise ModelError(f"{folder}: not a prepared model folder: {reason}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{folder}: the prepared model is damaged: {error}") from None

    def tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path}: the prepared tokenizer is damaged: {error}") from None

    def num_token_ids(self) -> int:
        """Ids from here to `vocab_size` have no token: they pad the model's matrices, and must never be sampled."""
        named = (*self.special_token_ids, *self.eos_token_ids)
        return max(self.token_bytes().num_used, *(token_id + 1 for token_id in named), 0)

    def token_bytes(self) -> TokenBytes:
        try:
            return TokenBytes.load(self.folder / "token_bytes.bin")
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.folder}: the prepared model is damaged: {error}") from None


def prepare(
    spec: str, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> PreparedModel:
    """Fetches the model if need be and makes its folder, or finds the one made before.

    `progress` gets a line of text and the done fraction, or None where that is not known. Safe in
    several processes at once. Every failure is a ModelError of one line.
    """
    cache = cache_dir or cache_root()
    report = progress or _ignore
    try:
        source = locate(spec, cache, report)
        key = _key(source, cache, report)
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in source.name)
        folder = cache / "models" / f"{name}-{key[:16]}"
        if (found := _load_if_whole(folder)) is not None:
            return found
        report(f"preparing {source.name}", None)
        facts = facts_of_gguf(source.path) if source.is_gguf else facts_of_folder(source.path)
        with exclusive(folder, report) as partial:
            if (found := _load_if_whole(folder)) is None:
                _write(source, facts, partial)
                publish(partial, folder)
                found = PreparedModel.load(folder)
        return found
    except OSError as error:
        place = error.filename or cache
        raise ModelError(
            f"{place}: {error.strerror or error}, while preparing {spec}; the cache directory is "
            f"{cache}, XDG_CACHE_HOME chooses another"
        ) from None


def _key(source: Source, cache: Path, progress: Progress) -> str:
    """A hash over everything that the prepared folder depends on."""
    digest = hashlib.sha256()
    parts = [str(FORMAT_VERSION), source.spec, source.name, str(source.path)]
    if source.is_gguf:
        parts.append(remembered_sha256(source.path, cache, progress))
    else:
        for file in (source.path / name for name in _SMALL_FILES):
            content = file.read_bytes() if file.is_file() else b""
            parts.append(hashlib.sha256(content).hexdigest())
        for weights in sorted(source.path.glob("*.safetensors")):
            stat = weights.stat()
            parts.append(f"{weights.name} {stat.st_size} {stat.st_mtime_ns}")
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _load_if_whole(folder: Path) -> PreparedModel | None:
    """The folder's model; None if there is none, or one that cannot be used."""
    if not folder.is_dir():
        return None
    try:
        model = PreparedModel.load(folder)
        whole = len(model.token_bytes()) == model.vocab_size
    except ModelError:
        return None  # made again by the caller
    return model if whole and (folder / "tokenizer.json").is_file() else None


def _write(source: Source, facts: ModelFacts, folder: Path) -> None:
    table, is_exact = TokenBytes.from_tokenizer(facts.tokenizer, facts.vocab_size)
    model = _model(source, folder, facts, table, is_exact)
    table.save(folder / "token_bytes.bin")
    facts.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if model.chat_template is not None:
        (folder / "chat_template.jinja").write_bytes(model.chat_template.encode())
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    for place in ("folder", "chat_template"):
        del values[place]
    values["format_version"] = FORMAT_VERSION
    (folder / "model.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(values, enc_hook=str), indent=2)
    )


def _model(
    source: Source, folder: Path, facts: ModelFacts, table: TokenBytes, is_exact: bool
) -> PreparedModel:
    added = facts.tokenizer.get_added_tokens_decoder()
    return PreparedModel(
        folder=folder,
        name=source.name,
        spec=source.spec,
        weights=source.path,
        format="gguf" if source.is_gguf else "safetensors",
        architecture=facts.architecture,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id,
        unk_token_id=facts.unk_token_id,
        add_bos_token=facts.add_bos_token,
        special_token_ids=tuple(
            # A tokenizer may have more of them than the model has rows: those cannot come.
            sorted(i for i, token in added.items() if token.special and i < facts.vocab_size)
        ),
        chat_template=facts.chat_template,
        token_bytes_exact=is_exact,
        strips_leading_space=table.strips_leading_space,
        add_eos_token=facts.add_eos_token,
    )


def _to_path(kind: type, value: object) -> object:
    if kind is Path:
        return value if isinstance(value, Path) else Path(str(value))
    raise NotImplementedError(f"{kind} is not a type of model.json")


def _ignore(_message: str, _fraction: float | None) -> None:
    """Nobody watches the progress."""
