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
from shmserve.http.openai.event_forms import HOLE, NUMBER, TEXT, around_hole, form_of
from shmserve.http.openai.formats import Envelope, event, finish_word, stop_details
from shmserve.http.ways import NO_MARKS, Made, PassedTokens, Passing, Unmarked, Way
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

    @property
    def passing(self) -> Passing | None:
        """What `feed` would make of text that changes nothing; None while something is held, or every text matters."""

    def feed(self, text: str) -> list[Delta]:
        """The deltas that `text` completes; some of it may be held."""

    def finish(self) -> list[Delta]:
        """The deltas of what was held. Called once, at the end."""


class Extras(msgspec.Struct, frozen=True):
    """What one request wants of its choices beside text. The default is nothing."""

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
    def num_numbers(self) -> int:
        """In the event of one token, beside its text."""
        return self.with_token_ids + self.with_timing + 2 * self.with_usage


PLAIN: Final = Extras()
_ALL_TEXT: Final = Passing("content")


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
        self._passed: PassedTokens | None = None
        self._num_passed = 0
        self._entry: InFlight | None = None
        self._owes_echo = False
        self._ways: dict[Passing, tuple[bytes, bytes] | Unmarked | LogprobFrames] = {}
        self._forms: dict[Passing, bytes] = {}
        self._around: tuple[bytes, bytes] | None = None  # where every event is its text
        if self._splitter is None and extras.texts is None and not extras.num_numbers:
            self._around = self._ways[_ALL_TEXT] = self._around_in(self._with_text(HOLE))

    @property
    def way(self) -> Way | None:
        passing = self._passing
        if passing is None or self._owes_echo:
            return None
        if self._extras.num_numbers:
            return Made(self._numbered, passing.marks) if self._extras.texts is None else None
        found = self._ways.get(passing)
        if found is None:
            found = self._ways[passing] = self._way_in(passing)
        return found

    @property
    def _passing(self) -> Passing | None:
        return self._splitter.passing if self._splitter is not None else _ALL_TEXT

    @property
    def has_splitter(self) -> bool:
        return self._splitter is not None

    def attach(self, entry: InFlight) -> OpenAIChoice:
        """The request whose logprobs and counts this choice shows."""
        self._entry = entry
        if self._splitter is not None:
            entry.passed = self._passed = PassedTokens(len(entry.token_ids))
        return self

    def _around_in(self, inner: Delta) -> tuple[bytes, bytes]:
        return around_hole(event(self._chunk(inner)))

    def _way_in(self, passing: Passing) -> tuple[bytes, bytes] | Unmarked | LogprobFrames:
        inner = self._with_text(HOLE, passing.key)
        has_logprobs = self._extras.texts is not None
        around = self._frames_in(inner) if has_logprobs else self._around_in(inner)
        return around if passing.marks == NO_MARKS else Unmarked(around, passing.marks)

    def _frames_in(self, inner: Delta) -> LogprobFrames:
        """As `_around_in`, with a second hole for the logprobs."""
        whole = event(self._chunk(inner, logprobs=HOLE))
        before, _, after = whole.rpartition(b'"\\u001a"')
        before, _, between = before.rpartition(b"\\u001a")
        around, texts = (before, between, after), self._extras.texts
        assert texts is not None
        if self._is_chat:
            return ChatFrames(around, self._extras.num_top, texts)
        assert self._offsets is not None
        return CompletionFrames(around, self._extras.num_top, texts, self._offsets)

    def _form_in(self, passing: Passing) -> bytes:
        """An event of one token, with a hole for its text and for each number."""
        more: dict[str, Any] = {}
        if self._extras.with_token_ids:
            more["token_ids"] = [HOLE]
        if self._extras.with_timing:
            more["timing"] = {"token_us": [HOLE]}
        chunk = self._chunk(self._with_text(HOLE, passing.key), **more)
        if self._extras.with_usage:
            chunk["usage"] |= {"completion_tokens": HOLE, "total_tokens": HOLE}
        return form_of(event(chunk), (), (TEXT, *[NUMBER] * self._extras.num_numbers))

    def _numbered(self, piece: bytes, token_id: int) -> bytes:
        """`delta` of one token that is whole text and passes."""
        passing, extras = self._passing, self._extras
        assert passing is not None, "who is asked for a frame was asked for the way"
        form = self._forms.get(passing)
        if form is None:
            form = self._forms[passing] = self._form_in(passing)
        self._num_tokens += 1
        numbers: list[int] = []
        if extras.with_token_ids:
            numbers.append(token_id)
        if extras.with_timing:
            assert self._entry is not None and self._entry.timing is not None
            numbers += self._entry.timing.take(1)
        if extras.with_usage:
            numbers += (self._num_tokens, extras.num_prompt_tokens + self._num_tokens)
        return form % (piece, *numbers)

    def _with_text(self, text: str, key: str = "content") -> Delta:
        return {"delta": {key: text}} if self._is_chat else {"text": text}

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
            inner = {"delta": {"role": "assistant", "content": self._extras.echo}}
            return event(self._chunk(inner, **more) | more)  # of the one prompt: vLLM's place, too
        if not self._extras.echo and not more:
            return b""
        entry = self._entry
        if self._extras.echo_ids and entry and not (entry.has_tokens or entry.is_over):
            self._owes_echo = True  # the 200 goes out early: the prompt's logprobs come later
            return b""
        return self._echo(more)

    def _echo(self, more: dict[str, Any]) -> bytes:
        return event(
            self._chunk({"text": self._extras.echo}, logprobs=self._echoed_logprobs(), **more)
        )

    def _owed(self) -> bytes:
        """The echo that could not be told in `opening`."""
        if not self._owes_echo:
            return b""
        self._owes_echo = False
        ids = self._extras.prompt_ids
        return self._echo({"prompt_token_ids": list(ids)} if self._extras.with_token_ids else {})

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        if self._around is not None:
            before, after = self._around
            return b"".join((before, escape(text), after)) if text else b""
        return self._owed() + self._events(self._split(text, len(token_ids)), token_ids)

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        if self._passed is not None and entry.finish is not None:
            self._passed.ended(entry.finish.completion_tokens)
        owed = self._owed()
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
            return owed + event(self._chunk(deltas[0] if deltas else {"text": ""}, **more))
        inner: Delta = {"delta": {}} if self._is_chat else {"text": ""}
        return owed + self._events(deltas, token_ids) + event(self._chunk(inner, **end))

    def _split(self, text: str, num_tokens: int) -> list[Delta]:
        if self._splitter is not None:
            self._count_passed(self._splitter.is_reasoning)
            deltas = self._splitter.feed(text)
            # By where the text is behind these tokens: the mark that ends the reasoning is none of it.
            self.num_reasoning_tokens += num_tokens * self._splitter.is_reasoning
            return [{"delta": delta} for delta in deltas]
        return [self._with_text(text)] if text else []

    def _count_passed(self, is_reasoning: bool) -> None:
        """Tokens that were written past the splitter since it was last fed, when it was as it is now."""
        if (passed := self._passed) is not None:
            self.num_reasoning_tokens += is_reasoning * (passed.count - self._num_passed)
            self._num_passed = passed.count

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
