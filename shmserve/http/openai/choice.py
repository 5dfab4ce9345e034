"""One choice of an OpenAI response, streamed or whole: from text and tokens to its deltas, events and object.

Owns: what a choice carries beside its text (logprobs, token ids, running usage, tool calls, reasoning, an echoed prompt), and who
builds its events. Never: decides when it ends. Both ways go through the same steps, so a stream adds up to the plain answer.
Front end only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from shmserve.http.detokenizer import escape
from shmserve.http.in_flight import InFlight
from shmserve.http.logprob_frames import ChatFrames, CompletionFrames, LogprobFrames
from shmserve.http.logprobs import CompletionLogprobs, TokenTexts, chat_logprobs, prompt_logprobs
from shmserve.http.openai.formats import Envelope, event, finish_word, stop_details
from shmserve.request import SamplingParams

Delta = dict[str, Any]
"""What one event adds to a chat message: `content`, `reasoning_content`, or `tool_calls` in OpenAI's form."""


class Splitter(Protocol):
    """Sorts a chat answer's text into content, reasoning and tool calls, as it comes."""

    @property
    def has_tool_calls(self) -> bool: ...

    @property
    def is_reasoning(self) -> bool:
        """True while the text is inside the reasoning."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that `text` completes; some of it may be held."""

    def finish(self) -> list[Delta]:
        """The deltas of what was held. Called once, at the end."""


class Extras(msgspec.Struct, frozen=True):
    """What one request wants of its choices beside text. The default is nothing: such a choice goes the pump's direct way."""

    texts: TokenTexts | None = None  # with it, logprobs
    names: TokenTexts | None = None  # for those of the prompt
    num_top: int = 0
    with_token_ids: bool = False
    with_usage: bool = False
    with_timing: bool = False
    prompt_ids: tuple[int, ...] = ()
    """Sent with the first event, where token ids are wanted."""
    num_prompt_tokens: int = 0
    echo: str = ""
    echo_ids: tuple[int, ...] = ()
    """Tokens of an echoed prompt whose logprobs are wanted."""
    scored_ids: tuple[int, ...] = ()
    """Tokens of a prompt whose `prompt_logprobs` (vLLM's field) are wanted."""
    new_splitter: Callable[[], Splitter] | None = None
    call_word: str = "tool_calls"
    """The finish reason of a choice that ends with a call."""

    @property
    def is_plain(self) -> bool:
        return self.texts is None and self.is_plain_but_for_logprobs

    @property
    def is_plain_but_for_logprobs(self) -> bool:
        return self.new_splitter is None and not (
            self.with_token_ids or self.with_usage or self.with_timing
        )


PLAIN: Final = Extras()


class OpenAIChoice:
    """ChoiceFormat of one choice: role event (chat), deltas, finish event; or, for a plain answer, its object (`whole`)."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        params: SamplingParams,
        eos_ids: Sequence[int],
        extras: Extras = PLAIN,
    ) -> None:
        self._envelope = envelope
        self._is_chat = envelope.kind == "chat"
        self._index = index
        self._params = params
        self._eos_ids = eos_ids
        self._extras = extras
        self._splitter = extras.new_splitter() if extras.new_splitter is not None else None
        self._offsets = CompletionLogprobs(extras.texts) if extras.texts is not None else None
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        self._entry: InFlight | None = None
        self.around_text: tuple[bytes, bytes] | LogprobFrames | None = None
        if extras.is_plain:
            self.around_text = self._around()
        elif extras.is_plain_but_for_logprobs:
            self.around_text = self._frames()

    @property
    def has_splitter(self) -> bool:
        return self._splitter is not None

    def attach(self, entry: InFlight) -> OpenAIChoice:
        """The request whose logprobs and counts this choice shows."""
        self._entry = entry
        return self

    def _around(self) -> tuple[bytes, bytes]:
        hole = "\x1a"  # escaped to six bytes
        whole = event(self._chunk(self._with_text(hole)))
        before, _, after = whole.rpartition(b"\\u001a")  # nothing behind the text is a client's
        return (before, after)

    def _frames(self) -> LogprobFrames:
        """As `_around`, with a second hole for the logprobs."""
        hole = "\x1a"
        whole = event(self._chunk(self._with_text(hole), logprobs=hole))
        before, _, after = whole.rpartition(b'"\\u001a"')
        before, _, between = before.rpartition(b"\\u001a")
        around, texts = (before, between, after), self._extras.texts
        assert texts is not None
        if self._is_chat:
            return ChatFrames(around, self._extras.num_top, texts)
        assert self._offsets is not None
        return CompletionFrames(around, self._extras.num_top, texts, self._offsets)

    def _with_text(self, text: str) -> Delta:
        return {"delta": {"content": text}} if self._is_chat else {"text": text}

    def _chunk(self, inner: Delta, **more: Any) -> dict[str, Any]:
        choice = {"index": self._index} | inner | {"logprobs": None, "finish_reason": None} | more
        if not self._extras.with_usage:
            return self._envelope.chunk([choice])
        num_prompt = self._extras.num_prompt_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }
        return self._envelope.chunk([choice], usage=usage)

    # -- streamed ---------------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        more: dict[str, Any] = {}
        if self._extras.with_token_ids:
            more["prompt_token_ids"] = list(self._extras.prompt_ids)
        if self._is_chat:
            return event(
                self._chunk({"delta": {"role": "assistant", "content": self._extras.echo}}, **more)
            )
        if not self._extras.echo and not more:
            return b""
        return event(
            self._chunk({"text": self._extras.echo}, logprobs=self._echoed_logprobs(), **more)
        )

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        if isinstance(self.around_text, tuple):
            before, after = self.around_text
            return b"".join((before, escape(text), after)) if text else b""
        return self._events(self._split(text, len(token_ids)), token_ids)

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        deltas = self._split(text, len(token_ids))
        if self._splitter is not None:
            deltas += [{"delta": delta} for delta in self._splitter.finish()]
        end = {"finish_reason": self._finish_word(entry)} | stop_details(
            entry, self._params, self._eos_ids
        )
        if self._extras.with_timing and entry.timing is not None:
            end["timing"] = entry.timing.summary(entry)
        if not self._is_chat and len(deltas) <= 1:
            more = self._beside(token_ids) | end
            return event(self._chunk(deltas[0] if deltas else {"text": ""}, **more))
        inner: Delta = {"delta": {}} if self._is_chat else {"text": ""}
        return self._events(deltas, token_ids) + event(self._chunk(inner, **end))

    def _split(self, text: str, num_tokens: int) -> list[Delta]:
        if self._splitter is not None:
            deltas = self._splitter.feed(text)
            # By where the text is behind these tokens: the mark that ends the reasoning is none of it.
            self.num_reasoning_tokens += num_tokens * self._splitter.is_reasoning
            return [{"delta": delta} for delta in deltas]
        return [self._with_text(text)] if text else []

    def _events(self, deltas: list[Delta], token_ids: Sequence[int]) -> bytes:
        """One event a delta; what belongs to the tokens goes with the first. Tokens without text make an event only if they carry something."""
        beside = self._beside(token_ids)
        if beside and not deltas:
            deltas = [self._with_text("")]
        events = []
        for delta in deltas:
            events.append(event(self._chunk(delta, **beside)))
            beside = {}
        return b"".join(events)

    def _beside(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What stands beside the text of an event with these tokens."""
        self._num_tokens += len(token_ids)
        more: dict[str, Any] = {}
        if not token_ids:
            return more
        if self._extras.texts is not None:
            more["logprobs"] = self._logprobs(len(token_ids))
        if self._extras.with_token_ids:
            more["token_ids"] = list(token_ids)
        if self._extras.with_timing:
            assert self._entry is not None and self._entry.timing is not None
            more["timing"] = {"token_us": self._entry.timing.take(len(token_ids))}
        return more

    def _logprobs(self, count: int) -> dict[str, Any] | None:
        entry, texts = self._entry, self._extras.texts
        assert entry is not None and entry.logprobs is not None and texts is not None
        tokens = entry.logprobs.take(count)
        if self._is_chat:
            return chat_logprobs(tokens, texts)
        assert self._offsets is not None
        return self._offsets.of(tokens, has_top=self._extras.num_top > 0)

    def _echoed_logprobs(self) -> dict[str, Any] | None:
        entry = self._entry
        if self._offsets is None or not self._extras.echo_ids or entry is None:
            return None
        assert entry.logprobs is not None
        tokens = entry.logprobs.of_prompt(self._extras.echo_ids)
        echoed = self._offsets.of(tokens, has_top=self._extras.num_top > 0)
        self._offsets.begin(len(self._extras.echo))
        return echoed

    def _finish_word(self, entry: InFlight) -> str:
        word = finish_word(entry)
        has_calls = self._splitter is not None and self._splitter.has_tool_calls
        return self._extras.call_word if has_calls and word == "stop" else word

    # -- whole ------------------------------------------------------------------------------------------------------------

    def whole(self, parts: Sequence[tuple[str, Sequence[int]]], entry: InFlight) -> dict[str, Any]:
        """The choice's object in an answer that is not streamed; `parts` are text and tokens in the order they came."""
        text = "".join(part for part, _ in parts)
        token_ids = entry.token_ids
        choice: dict[str, Any] = {"index": self._index}
        logprobs = None
        if self._is_chat:
            deltas = [{"content": self._extras.echo + text}]
            if self._splitter is not None:
                deltas = [
                    delta["delta"] for part, ids in parts for delta in self._split(part, len(ids))
                ]
                deltas += self._splitter.finish()
            choice["message"] = message_of(deltas)
            if self._extras.texts is not None:
                logprobs = self._logprobs(len(token_ids))
        else:
            choice["text"] = self._extras.echo + text
            if self._extras.texts is not None:
                logprobs = merged(self._echoed_logprobs(), self._logprobs(len(token_ids)))
        choice |= {"logprobs": logprobs, "finish_reason": self._finish_word(entry)}
        if self._extras.with_token_ids:
            choice["prompt_token_ids"] = list(self._extras.prompt_ids)
            choice["token_ids"] = list(token_ids)
        if self._extras.scored_ids:
            assert entry.logprobs is not None and self._extras.names is not None
            tokens = entry.logprobs.of_prompt(self._extras.scored_ids)
            choice["prompt_logprobs"] = prompt_logprobs(tokens, self._extras.names)
        if self._extras.with_timing and entry.timing is not None:
            entry.timing.framed(time.monotonic_ns())
            choice["timing"] = {"token_us": entry.timing.take_all()} | entry.timing.summary(entry)
        return choice | stop_details(entry, self._params, self._eos_ids)


def reasoning_tokens(choices: Sequence[OpenAIChoice]) -> int | None:
    """Over all choices; None where nothing tells reasoning from text."""
    if not any(choice.has_splitter for choice in choices):
        return None
    return sum(choice.num_reasoning_tokens for choice in choices)


def merged(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Completion logprobs of the prompt and of what follows it."""
    if first is None or second is None:
        return first or second
    return {
        key: None if first[key] is None else first[key] + second[key]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The chat message that deltas add up to. `content` is a string unless tool calls stand in its place."""
    texts = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    has_reasoning = False
    old_call: dict[str, str] | None = None
    for delta in deltas:
        for name in texts:
            texts[name] += delta.get(name) or ""
        has_reasoning |= "reasoning_content" in delta
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(
                part["index"],
                {
                    "id": part.get("id"),
                    "type": "function",
                    "function": {"name": None, "arguments": ""},
                },
            )
            function = part.get("function", {})
            if function.get("name") is not None:
                call["function"]["name"] = function["name"]
            call["function"]["arguments"] += function.get("arguments") or ""
        if (part := delta.get("function_call")) is not None:
            old_call = old_call or {"name": "", "arguments": ""}
            old_call["name"] += part.get("name") or ""
            old_call["arguments"] += part.get("arguments") or ""
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"]}
    if old_call is not None:
        message |= {"content": texts["content"] or None, "function_call": old_call}
    if calls:
        message["content"] = texts["content"] or None
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    if has_reasoning:
        message["reasoning_content"] = texts["reasoning_content"] or None
    return message
