"""Text to token ids, off the event loop when it takes long.

Owns: the tokenizer, its threads, and the shared tables of text pieces. Never: decodes (`detokenizer.py` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shmserve.http.detokenizer import Pieces, TextStream
from shmserve.models import PreparedModel
from shmserve.token_text import Decoding

INLINE_CHARS: Final = 2_000
"""A text this short is encoded in a fraction of a millisecond: less than a thread's round trip costs the loop."""

IDS_AT_ONCE: Final = 8_192
LONG_CHARS: Final = 50_000
"""Texts that are longer than this, some 20 ms of work, have threads of their own."""


class Tokenizer:
    """The model's tokenizer. `encode` is called on the event loop."""

    def __init__(self, model: PreparedModel, num_threads: int) -> None:
        self._tokenizer = model.tokenizer()
        # Template and clients write special tokens as text; whether they count as such is the template's business.
        self._bos = (
            [model.bos_token_id] if model.add_bos_token and model.bos_token_id is not None else []
        )
        self._eos = list(model.eos_token_ids[:1]) if model.add_eos_token else []
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        # A long text takes seconds: it never stands before a short one.
        self._long_threads = ThreadPoolExecutor(
            max(1, num_threads // 2), thread_name_prefix="tokenize-long"
        )
        table = model.token_bytes().table()
        self.vocab_size = model.num_token_ids()
        self.special_tokens = {
            name: self._tokenizer.id_to_token(token_id) or ""
            for name, token_id in (
                ("bos_token", model.bos_token_id),
                ("eos_token", model.eos_token_ids[0] if model.eos_token_ids else None),
                ("pad_token", model.pad_token_id),
                ("unk_token", model.unk_token_id),
            )
            if token_id is not None
        }
        self._table = table
        self._longest_token = max(1, max(map(len, table), default=1))  # bytes, so characters
        self._special_ids = frozenset(model.special_token_ids)
        self._showing: dict[frozenset[int], Pieces] = {}
        self._decoding = Decoding(
            model.strips_leading_space, None if model.token_bytes_exact else self._tokenizer
        )
        self.pieces = Pieces(table, self._special_ids, self._decoding)
        self.pieces_with_special = Pieces(table, frozenset(), self._decoding, self.pieces)

    def special_id(self, text: str) -> int | None:
        """The id of a special token, None for a text that ordinary tokens spell."""
        token_id: int | None = self._tokenizer.token_to_id(text) if text else None
        return token_id if token_id in self._special_ids else None

    def pieces_showing(self, shown: frozenset[int]) -> Pieces:
        """The pieces that skip special tokens, but for these: a handful of sets at most, one a tool format."""
        if shown not in self._showing:
            silent_ids = self._special_ids - shown
            self._showing[shown] = Pieces(self._table, silent_ids, self._decoding, self.pieces)
        return self._showing[shown]

    def pieces_for(self, skip_special_tokens: bool) -> Pieces:
        return self.pieces if skip_special_tokens else self.pieces_with_special

    def name(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def decode(
        self, token_ids: npt.NDArray[np.integer[Any]], *, skip_special_tokens: bool = False
    ) -> str:
        """The text of ids that came from outside."""
        pieces = self.pieces_for(skip_special_tokens)
        if pieces.token_text() is None:  # their bytes are all there is to it: a tenth of the time
            return b"".join(map(pieces.raw, token_ids.tolist())).decode("utf-8", "replace")
        text = TextStream(pieces)
        return "".join([text.feed(token_id) for token_id in token_ids.tolist()]) + text.finish()

    async def encode(self, text: str, *, add_bos: bool) -> npt.NDArray[np.int32]:
        """Token ids of `text`, framed as the model wants if `add_bos` says that nobody did it yet.

        That is BOS in front; and an EOS behind, which a few GGUF files ask for.
        """
        if len(text) <= INLINE_CHARS:
            ids = self._encode(text)
        else:
            lane = self._threads if len(text) <= LONG_CHARS else self._long_threads
            ids = await asyncio.get_running_loop().run_in_executor(lane, self._encode_long, text)
        if add_bos and (self._bos or self._eos):
            ids = np.array([*self._bos, *ids, *self._eos], np.int32)
        return ids

    async def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Token ids of short texts, without anything around them."""

        def encode() -> list[tuple[int, ...]]:
            return [tuple(self._encode(text).tolist()) for text in texts]

        if sum(map(len, texts)) <= INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)

    def least_tokens(self, prompts: Sequence[str | npt.NDArray[np.int32]]) -> int:
        """So many tokens they have together, at least: known without tokenising them."""
        return sum(
            -(-len(each) // self._longest_token) if isinstance(each, str) else len(each)
            for each in prompts
        )

    def _encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.array(self._ids_of(text), np.int32)

    def _ids_of(self, text: str) -> list[int]:
        # `encode` makes offsets, too, with the interpreter's lock in its hand: a fifth of the time of a short text, and 50 ms for
        # 200,000 tokens, in which no stream moves.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _encode_long(self, text: str) -> npt.NDArray[np.int32]:
        ids = self._ids_of(text)
        array = np.empty(len(ids), np.int32)
        for at in range(
            0, len(ids), IDS_AT_ONCE
        ):  # one conversion of all would keep the lock for 10 ms
            array[at : at + IDS_AT_ONCE] = ids[at : at + IDS_AT_ONCE]
        return array

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_threads.shutdown(wait=False, cancel_futures=True)
