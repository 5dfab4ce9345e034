"""Anthropic's message objects: whole, and as the events of a stream.

Owns: content blocks, stop reasons, usage, errors. Both ways sort the same deltas into blocks, so a stream adds up to the plain answer.
Front end only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from shmserve.http.detokenizer import escape_separators
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight
from shmserve.http.openai.choice import Delta, Splitter
from shmserve.http.openai.event_forms import HOLE, around_hole
from shmserve.http.openai.formats import finish_word
from shmserve.http.ways import Passing, Unmarked, Way
from shmserve.request import FinishReason, SamplingParams

_encode = msgspec.json.encode

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def event(value: dict[str, Any]) -> bytes:
    """One SSE event, named as its object is."""
    name: bytes = value["type"].encode()
    return b"event: " + name + b"\ndata: " + escape_separators(_encode(value)) + b"\n\n"


def error_object(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: ApiError) -> web.Response:
    """The status and headers of `error`, in Anthropic's shape."""
    response = error.response()
    response.body = _encode(error_object(error))
    return response


def usage_of(entry: InFlight, num_output: int) -> dict[str, int]:
    """Input tokens are those that were not found in the cache, as Anthropic counts them."""
    record = entry.finish or entry.started
    prompt, cached = (record.prompt_tokens, record.cached_tokens) if record is not None else (0, 0)
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": num_output,
    }


class Blocks:
    """Deltas of a chat answer, sorted into content blocks: `begin`, `add` and `end` are told of each, in order."""

    def __init__(
        self,
        begin: Callable[[int, dict[str, Any]], None],
        add: Callable[[int, dict[str, str]], None],
        end: Callable[[int], None],
    ) -> None:
        self._begin, self._add, self._end = begin, add, end
        self.index = -1
        self._kind: object = None

    def take(self, delta: Delta) -> None:
        if text := delta.get("reasoning_content"):
            self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._add(self.index, {"type": "thinking_delta", "thinking": text})
        if text := delta.get("content"):
            self._open("text", {"type": "text", "text": ""})
            self._add(self.index, {"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            function = call.get("function", {})
            if function.get("name") is not None:
                block = {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": {},
                }
                self._open(("call", call["index"]), block)
            if part := function.get("arguments"):
                self._add(self.index, {"type": "input_json_delta", "partial_json": part})

    @property
    def kind(self) -> object:
        """Of the block that is open; None: none is."""
        return self._kind

    def _open(self, kind: object, block: dict[str, Any]) -> None:
        if kind == self._kind:
            return
        self.close()
        self._kind = kind
        self.index += 1
        self._begin(self.index, block)

    def close(self) -> None:
        if self._kind is not None:
            self._end(self.index)
        self._kind = None


class MessageChoice:
    """ChoiceFormat of a message; `whole` is its object. One choice is all that a message has."""

    def __init__(
        self,
        message_id: str,
        model: str,
        params: SamplingParams,
        entry: InFlight,
        splitter: Splitter | None,
    ) -> None:
        self._id = message_id
        self._model = model
        self._params = params
        self._entry = entry
        self._splitter = splitter
        self._events: list[bytes] = []
        self._content: list[dict[str, Any]] = []
        self._blocks = Blocks(self._begin, self._add, self._end)
        self._around = self._around_in("text", 0)  # without a splitter all text is in block 0
        self._unmarked: dict[tuple[Passing, int], Unmarked] = {}

    def _around_in(self, kind: str, index: int) -> tuple[bytes, bytes]:
        """Of text in a block."""
        delta = {"type": f"{kind}_delta", kind: HOLE}
        return around_hole(event({"type": "content_block_delta", "index": index, "delta": delta}))

    @property
    def way(self) -> Way | None:
        if self._splitter is None:
            return self._around
        passing = self._splitter.passing
        if passing is None:
            return None
        kind = "thinking" if passing.key == "reasoning_content" else "text"
        if self._blocks.kind != kind:  # the next text begins a block
            return None
        key = passing, self._blocks.index
        found = self._unmarked.get(key)
        if found is None:
            around = self._around_in(kind, self._blocks.index)
            found = self._unmarked[key] = Unmarked(around, passing.marks)
        return found

    # Blocks tells us of these.

    def _begin(self, index: int, block: dict[str, Any]) -> None:
        self._content.append(dict(block))
        self._events.append(
            event({"type": "content_block_start", "index": index, "content_block": block})
        )

    def _add(self, index: int, delta: dict[str, str]) -> None:
        block = self._content[index]
        if delta["type"] == "input_json_delta":
            block["input"] = (block["input"] or "") + delta["partial_json"]
        else:
            name = "thinking" if delta["type"] == "thinking_delta" else "text"
            block[name] += delta[name]
        self._events.append(event({"type": "content_block_delta", "index": index, "delta": delta}))

    def _end(self, index: int) -> None:
        self._events.append(event({"type": "content_block_stop", "index": index}))

    def _said(self) -> bytes:
        said, self._events = b"".join(self._events), []
        return said

    # -- streamed ---------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        message = self._message([], usage_of(self._entry, 0))
        begin = event({"type": "message_start", "message": message})
        if self._splitter is None:
            self._blocks._open("text", {"type": "text", "text": ""})
        return begin + self._said()

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        self._feed(text)
        return self._said()

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        self._feed(text)
        self._finish()
        reason, sequence = self._stop()
        assert entry.finish is not None
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_of(entry, entry.finish.completion_tokens),
        }
        return self._said() + event(end)

    def _feed(self, text: str) -> None:
        if self._splitter is None:
            deltas: list[Delta] = [{"content": text}] if text else []
        else:
            deltas = self._splitter.feed(text)
        for delta in deltas:
            self._blocks.take(delta)

    def _finish(self) -> None:
        for delta in self._splitter.finish() if self._splitter is not None else ():
            self._blocks.take(delta)
        self._blocks.close()

    def _stop(self) -> tuple[str, str | None]:
        word, finish = finish_word(self._entry), self._entry.finish
        assert finish is not None
        # A call that the length has cut is none to run.
        has_calls = self._splitter is not None and self._splitter.has_tool_calls
        if has_calls and word != "length":
            return "tool_use", None
        if finish.finish == FinishReason.STOP_STRING:
            return "stop_sequence", self._entry.matched_stop(self._params.stop)
        return ("max_tokens" if word == "length" else "end_turn"), None

    # -- whole ------------------------------------------------------------------------------------------------------------

    def whole(self, parts: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """The message of a completion that has ended."""
        for text, _ in parts:
            self._feed(text)
        self._finish()
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        reason, sequence = self._stop()
        assert self._entry.finish is not None
        message = self._message(
            self._content or [{"type": "text", "text": ""}],
            usage_of(self._entry, self._entry.finish.completion_tokens),
        )
        return message | {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


def _object(text: Any) -> Any:
    """The input of a call; what the length cut is given as text, for the client to see."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {"_incomplete": text}


class MessageStream:
    """ResponseFormat: message_stop, and no [DONE]."""

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        return event({"type": "message_stop"})

    def failing(self, error: ApiError) -> bytes:
        return event(error_object(error))
