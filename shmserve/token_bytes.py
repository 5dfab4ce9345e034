"""The bytes that each token id stands for, and the check that bytes are all there is to decoding.

Owns: the table, its file, how it is made from a tokenizer, and the proof by samples that it is
exact. Never: decodes a stream (the front end does, through an incremental UTF-8 decoder) or matches
a stop string.

    exact:   decode(ids) == b"".join(table[i] for i in ids).decode("utf-8", "replace")
             (special ids left out where they are skipped; one leading space gone where
             `strips_leading_space` is set), checked when the model is prepared

A tokenizer whose decoder looks at neighbouring tokens (WordPiece) is not exact: then the table is
an approximation, and text comes from the tokenizers library's stream decoder. With byte-fallback
tokens (<0x41>) the law holds for bytes that form whole characters; a run that does not gives one
U+FFFD per maximal invalid part here, and one per byte of the whole run in the library, which has to
wait for the end of the run to know it. Both processes may use it; nothing here imports torch.
"""

import itertools
import json
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MAGIC = b"SHMTOKB1"
_HEADER = struct.Struct("<8sQQQ")  # magic, ids, bytes, flags
_STRIPS_LEADING_SPACE = 1
_WORD_BOUNDARY = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Real text for the check: scripts, blanks, digits, code, characters of two to four bytes.
SAMPLE_TEXTS = (
    "Hello world, this is 3.14159 and 1,000,000.  Two  blanks,\tone tab.\n\nA new paragraph.",
    "def f(x: int) -> str:\n    return f'{x!r}'  # don't\n\n\nclass A(B):\n\tpass\r\n",
    "\u010f\u00e1belsk\u00e9 \u00fap\u011bn\u00ed; na\u00efve caf\u00e9, Stra\u00dfe; "
    "\u03bb\u03ac\u03b4\u03b1; \u043c\u0438\u0440!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093 \uc548\ub155 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600 \U0001f336\ufe0f \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028\ufffd \u00a0end",
    " leading blank",
    "   three leading blanks and trailing   ",
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBytes:
    """The bytes of id i are `data[offsets[i]:offsets[i + 1]]`; an id without a token has none."""

    data: bytes
    offsets: NDArray[np.uint32]
    strips_leading_space: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self):
            raise IndexError(f"token id {token_id} is outside 0..{len(self) - 1}")
        return self.data[self.offsets[token_id] : self.offsets[token_id + 1]]

    @property
    def num_used(self) -> int:
        """Ids from here on have no token: they pad a model's matrices."""
        used = np.flatnonzero(np.diff(self.offsets))
        return int(used[-1]) + 1 if used.size else 0

    def table(self) -> list[bytes]:
        """All entries as Python objects: for loops that look up one id after the other."""
        ends = self.offsets.tolist()
        return [self.data[a:b] for a, b in itertools.pairwise(ends)]

    @classmethod
    def from_list(cls, entries: list[bytes], *, strips_leading_space: bool = False) -> "TokenBytes":
        offsets = np.zeros(len(entries) + 1, np.uint32)
        np.cumsum([len(entry) for entry in entries], out=offsets[1:], dtype=np.uint32)
        return cls(b"".join(entries), offsets, strips_leading_space)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, vocab_size: int | None = None
    ) -> tuple["TokenBytes", bool]:
        """The table, and whether it is exact. Ids up to `vocab_size` without a token are empty."""
        if vocab_size is None:
            vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        to_bytes, strips = _token_rule(tokenizer)
        entries = [b""] * vocab_size
        for token_id in range(vocab_size):
            token = tokenizer.id_to_token(token_id)
            if token is not None:
                entries[token_id] = to_bytes(token)
        table = cls.from_list(entries, strips_leading_space=strips)
        return table, _is_exact(tokenizer, table)

    def save(self, path: Path) -> None:
        """One flat file: header, offsets, data. Never pickle."""
        flags = _STRIPS_LEADING_SPACE if self.strips_leading_space else 0
        with open(path, "wb") as file:
            file.write(_HEADER.pack(MAGIC, len(self), len(self.data), flags))
            file.write(self.offsets.astype("<u4").tobytes())
            file.write(self.data)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: Path) -> "TokenBytes":
        """Reads what `save` wrote; anything else is a ValueError that names the file."""
        content = path.read_bytes()
        if len(content) < _HEADER.size:
            raise ValueError(f"{path}: not a token byte table")
        magic, num_ids, num_bytes, flags = _HEADER.unpack_from(content)
        start = _HEADER.size + 4 * (num_ids + 1)
        if magic != MAGIC or len(content) != start + num_bytes:
            raise ValueError(f"{path}: not a token byte table, or a damaged one")
        offsets = np.frombuffer(content, "<u4", count=num_ids + 1, offset=_HEADER.size)
        if offsets[0] != 0 or offsets[-1] != num_bytes or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{path}: the offsets of the token byte table are damaged")
        strips = bool(flags & _STRIPS_LEADING_SPACE)
        return cls(content[start:], offsets.astype(np.uint32), strips)


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte; printable ASCII is itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(256 + place), byte) for place, byte in enumerate(others))
    return alphabet


def _token_rule(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How this tokenizer's decoder turns one token into bytes, and if it strips a leading space."""
    stages = list(_decoder_stages(json.loads(tokenizer.to_str()).get("decoder")))
    names = {stage["type"] for stage in stages}
    if "ByteLevel" in names:
        alphabet = byte_of_character()

        def byte_level(token: str) -> bytes:
            # As the library: one character outside the alphabet makes the whole token literal.
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:
                return token.encode()

        return byte_level, False
    if names & {"ByteFallback", "Metaspace", "Replace"}:
        has_fallback = "ByteFallback" in names
        strips = "Strip" in names or any(
            stage["type"] == "Metaspace" and stage.get("prepend_scheme", "always") != "never"
            for stage in stages
        )

        def sentence_piece(token: str) -> bytes:
            byte = _BYTE_TOKEN.fullmatch(token) if has_fallback else None
            if byte:
                return bytes([int(byte[1], 16)])
            return token.replace(_WORD_BOUNDARY, " ").encode()

        return sentence_piece, strips
    return str.encode, False


def _decoder_stages(decoder: dict[str, object] | None) -> Iterator[dict[str, object]]:
    if decoder is None:
        return
    stages = decoder.get("decoders")
    if decoder["type"] == "Sequence" and isinstance(stages, list):
        for stage in stages:
            yield from _decoder_stages(stage)
    else:
        yield decoder


def _is_exact(tokenizer: Tokenizer, table: TokenBytes) -> bool:
    special = {
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    entries = table.table()
    for ids in _sample_sequences(tokenizer, entries, special):
        for skip in (True, False):
            kept = [i for i in ids if not (skip and i in special)]
            text = b"".join([entries[i] for i in kept]).decode("utf-8", "replace")
            if table.strips_leading_space:
                text = text.removeprefix(" ")
            if tokenizer.decode(ids, skip_special_tokens=skip) != text:
                return False
    return True


def _sample_sequences(
    tokenizer: Tokenizer, entries: list[bytes], special: set[int]
) -> Iterator[list[int]]:
    """Real text, then random ids with more parts of characters and special tokens than chance."""
    num_ids = len(entries)
    for text in SAMPLE_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if all(i < num_ids for i in ids):
            yield ids
    for first_id, entry in enumerate(entries):
        if b" " in entry[1:]:  # Metaspace takes every space off its first token, Strip one
            yield [first_id]
    byte_tokens = {
        byte: token_id
        for byte in range(256)
        if (token_id := tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None
    }
    fallback = set(byte_tokens.values())
    plain = [i for i in range(num_ids) if i not in fallback]
    if not plain:
        return
    partial = [i for i in plain if not _is_whole_text(entries[i])] or plain
    marked = [i for i in special if i < num_ids] or plain
    rng = random.Random(20_240_229)
    for _ in range(600):
        ids = []
        for _ in range(rng.randint(1, 40)):
            draw = rng.random()
            if len(byte_tokens) == 256 and draw < 0.2:
                ids += [byte_tokens[byte] for byte in rng.choice("aé\u20ac\U0001f600").encode()]
            else:
                ids.append(rng.choice(partial if draw < 0.4 else marked if draw < 0.5 else plain))
        yield ids


def _is_whole_text(entry: bytes) -> bool:
    try:
        entry.decode()
    except UnicodeDecodeError:
        return False
    return True
