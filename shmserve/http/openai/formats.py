"""OpenAI's response objects: whole answers and SSE events.

Owns: ids, choices, finish reasons, usage. Never: decides anything about a request. Pure functions and small objects; front end
only. The detail behind OpenAI's finish_reason is in `stop_reason` (vLLM's name: null for EOS) and `matched_stop` (SGLang's name).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from shmserve.http.detokenizer import escape_separators
from shmserve.http.errors import ApiError, aborted
from shmserve.http.in_flight import InFlight
from shmserve.http.stream import DONE
from shmserve.request import FinishReason, SamplingParams

Kind = Literal["chat", "completion"]

_encode = msgspec.json.encode


def event(value: Any) -> bytes:
    """One SSE event. JSON never holds a raw line end; other separators are escaped where text is (`detokenizer.escape`)."""
    return b"data: " + escape_separators(_encode(value)) + b"\n\n"


def finish_word(entry: InFlight) -> str:
    """OpenAI's finish_reason. Raises ApiError for an end that is none of a completion."""
    assert entry.finish is not None
    reason = FinishReason(entry.finish.finish)
    if reason.is_stop:
        return "stop"
    if reason in (FinishReason.LENGTH, FinishReason.TIMEOUT):
        return "length"
    raise aborted()


def stop_details(entry: InFlight, params: SamplingParams, eos_ids: Sequence[int]) -> dict[str, Any]:
    """`stop_reason` and `matched_stop` of a completion that has ended."""
    finish = entry.finish
    assert finish is not None
    if finish.finish == FinishReason.STOP_STRING:
        text = entry.matched_stop(params.stop)
        return {"stop_reason": text, "matched_stop": text}
    if finish.finish == FinishReason.STOP_TOKEN:
        is_eos = (
            finish.matched_token in eos_ids and finish.matched_token not in params.stop_token_ids
        )
        token = finish.matched_token
        return {"stop_reason": None if is_eos else token, "matched_stop": token}
    return {
        "stop_reason": "timeout" if finish.finish == FinishReason.TIMEOUT else None,
        "matched_stop": None,
    }


def usage(
    entries: Sequence[InFlight],
    num_choices_per_prompt: int,
    num_reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Counts over a response: a prompt once, however many choices it has; generated tokens over all choices, EOS included."""
    finishes = [entry.finish for entry in entries if entry.finish is not None]
    prompt = sum(f.prompt_tokens for f in finishes[::num_choices_per_prompt])
    cached = sum(f.cached_tokens for f in finishes[::num_choices_per_prompt])
    completion = sum(f.completion_tokens for f in finishes)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if num_reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return counts


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one response share. The id ends in the req_id of the first choice (16 hex digits)."""

    kind: Kind
    id: str
    model: str
    created: int

    @classmethod
    def of(cls, kind: Kind, model: str, first: InFlight) -> Envelope:
        prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
        return cls(kind, f"{prefix}{first.req_id:016x}", model, int(time.time()))

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            "id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices,
            "usage": usage,
        }  # fmt: skip


class DoneStream:
    """ResponseFormat that ends in [DONE], whatever comes before it."""

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        return DONE

    def failing(self, error: ApiError) -> bytes:
        return error.frame() + DONE


class OpenAIStream(DoneStream):
    """The usage event if it was asked for, then [DONE]."""

    def __init__(
        self,
        envelope: Envelope,
        num_choices_per_prompt: int,
        include_usage: bool,
        count_reasoning: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._envelope = envelope
        self._n = num_choices_per_prompt
        self._include_usage = include_usage
        self._count_reasoning = count_reasoning

    def ending(self, entries: Sequence[InFlight]) -> bytes:
        if not self._include_usage:
            return DONE
        counts = usage(entries, self._n, self._count_reasoning())
        return event(self._envelope.chunk([], usage=counts)) + DONE
