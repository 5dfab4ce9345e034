"""The Responses API's objects: output items, whole and as the events of a stream.

Owns: items, their events with sequence numbers, the response object. Both ways sort the same deltas into items, so a stream adds up to
the plain answer. Stateless: nothing is stored, and `store` says so. Front end only.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from shmserve.http.detokenizer import escape_separators
from shmserve.http.errors import ApiError
from shmserve.http.in_flight import InFlight
from shmserve.http.openai.choice import Delta, Splitter
from shmserve.http.openai.event_forms import HOLE, NUMBER, TEXT, form_of
from shmserve.http.openai.formats import finish_word
from shmserve.http.ways import Made, Passing

_encode = msgspec.json.encode
_CONTENT: Final = Passing("content")


class ResponseChoice:
    """ChoiceFormat of a response, and its object (`whole`). `head` holds the fields that echo the request."""

    def __init__(self, head: dict[str, Any], entry: InFlight, splitter: Splitter | None) -> None:
        self._head = head
        self._entry = entry
        self._splitter = splitter
        self._events: list[bytes] = []
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._kind: object = None  # of the item that is open
        self._num_reasoning_tokens = 0
        self._passed: list[bytes] = []  # texts of the open item that are not yet in it, escaped
        self._form = b""  # of an event with its text
        self._form_index = -1  # of the item that the form was made for

    # -- streamed ---------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        for name in ("response.created", "response.in_progress"):
            self._tell(name, response=self._response("in_progress"))
        return self._said()

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        self._feed(text, len(token_ids))
        return self._said()

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        self._feed(text, len(token_ids))
        self._finish()
        response = self._response(self._status())
        self._tell(f"response.{response['status']}", response=response)
        return self._said()

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        """ResponseFormat: the last event has said it all, and this API has no [DONE]."""
        return b""

    def failing(self, error: ApiError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        self._tell("response.failed", response=response)
        return self._said()

    @property
    def way(self) -> Made | None:
        passing = self._splitter.passing if self._splitter is not None else _CONTENT
        if passing is None:
            return None
        kind = "reasoning" if passing.key == "reasoning_content" else "message"
        if self._kind != kind:  # the next text begins an item
            return None
        return Made(self._piece, passing.marks)

    def _piece(self, piece: bytes, token_id: int) -> bytes:
        """`delta` of one token that is whole text, of the open item's kind."""
        index = len(self._items) - 1
        if self._form_index != index:
            told = _event(*self._text_delta(HOLE), HOLE)
            self._form_index, self._form = index, form_of(told, (), (NUMBER, TEXT))
        self._num_reasoning_tokens += self._kind == "reasoning"
        self._passed.append(piece)
        number = self._sequence_number
        self._sequence_number += 1
        return self._form % (number, piece)

    def _tell(self, name: str, /, **fields: Any) -> None:
        self._events.append(_event(name, fields, self._sequence_number))
        self._sequence_number += 1

    def _said(self) -> bytes:
        said, self._events = b"".join(self._events), []
        return said

    # -- items ------------------------------------------------------------------------------------------------------------

    def _feed(self, text: str, num_tokens: int) -> None:
        if self._splitter is None:
            deltas: list[Delta] = [{"content": text}] if text else []
        else:
            deltas = self._splitter.feed(text)
            self._num_reasoning_tokens += num_tokens * self._splitter.is_reasoning
        for delta in deltas:
            self._take(delta)

    def _take(self, delta: Delta) -> None:
        if text := delta.get("reasoning_content"):
            self._open("reasoning", {"type": "reasoning", "summary": [], "content": []}, "rs_")
            self._add_text(text)
        if text := delta.get("content"):
            self._open("message", {"type": "message", "role": "assistant", "content": []}, "msg_")
            self._add_text(text)
        for call in delta.get("tool_calls", ()):
            function = call.get("function", {})
            if function.get("name") is not None:
                item = {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": function["name"],
                    "arguments": "",
                }
                self._open(("call", call["index"]), item, "fc_")
            if part := function.get("arguments"):
                self._items[-1]["arguments"] += part
                self._tell("response.function_call_arguments.delta", **self._at(), delta=part)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, kind: object, item: dict[str, Any], prefix: str) -> None:
        if kind == self._kind:
            return
        self._close("completed")
        self._kind = kind
        item = {"id": prefix + secrets.token_hex(12), "status": "in_progress"} | item
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if item["type"] != "function_call":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            if item["type"] == "reasoning":
                part = {"type": "reasoning_text", "text": ""}
            item["content"] = [part]
            self._tell("response.content_part.added", **self._at(), content_index=0, part=part)

    def _add_text(self, text: str) -> None:
        self._settle()
        self._items[-1]["content"][0]["text"] += text
        name, fields = self._text_delta(text)
        self._tell(name, **fields)

    def _text_delta(self, text: str) -> tuple[str, dict[str, Any]]:
        """Name and fields of the event of new text in the open item."""
        name = self._items[-1]["content"][0]["type"]
        more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return f"response.{name}.delta", self._at() | {"content_index": 0, "delta": text} | more

    def _settle(self) -> None:
        """The open item has all of its text."""
        if self._passed:
            passed, self._passed = b"".join(self._passed), []
            self._items[-1]["content"][0]["text"] += msgspec.json.decode(b'"%b"' % passed)

    def _close(self, status: str) -> None:
        if self._kind is None:
            return
        self._settle()
        self._kind = None
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            self._tell(
                "response.function_call_arguments.done",
                **self._at(),
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            self._tell(
                f"response.{part['type']}.done",
                **self._at(),
                content_index=0,
                text=part["text"],
                **more,
            )
            self._tell("response.content_part.done", **self._at(), content_index=0, part=part)
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _finish(self) -> None:
        for delta in self._splitter.finish() if self._splitter is not None else ():
            self._take(delta)
        if not self._items:  # nothing was said: a message all the same
            self._open("message", {"type": "message", "role": "assistant", "content": []}, "msg_")
        self._close(self._status())

    def _status(self) -> str:
        return "incomplete" if finish_word(self._entry) == "length" else "completed"

    # -- whole ------------------------------------------------------------------------------------------------------------

    def whole(self, parts: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """The response of a completion that has ended."""
        for text, ids in parts:
            self._feed(text, len(ids))
        self._finish()
        self._events = []
        return self._response(self._status())

    def _response(self, status: str) -> dict[str, Any]:
        self._settle()
        finish = self._entry.finish
        usage = None
        if finish is not None:
            usage = {
                "input_tokens": finish.prompt_tokens,
                "input_tokens_details": {"cached_tokens": finish.cached_tokens},
                "output_tokens": finish.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": finish.prompt_tokens + finish.completion_tokens,
            }
        is_cut = status == "incomplete"
        return self._head | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": usage,
        }


def _event(name: str, fields: dict[str, Any], sequence_number: Any) -> bytes:
    value = {"type": name, "sequence_number": sequence_number} | fields
    return b"event: " + name.encode() + b"\ndata: " + escape_separators(_encode(value)) + b"\n\n"
