"""From the messages of a chat request to its prompt, its grammar, and what will read its answer.

Owns: messages as templates want them, tools and reasoning of one request. Shared by chat completions, responses, messages and
/tokenize. Everything here is refused before anything is submitted. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shmserve.http.errors import ApiError, bad_field
from shmserve.http.reasoning import CLOSER, OPENER, ContentOnly, ReasoningSplitter
from shmserve.http.template import ChatTemplate, continued_prompt
from shmserve.http.tool_formats import ToolSplitter
from shmserve.http.tools import (
    ToolUse,
    refuse_with_format,
    told_in_words,
    tool_use,
    with_calls_as_objects,
)

if TYPE_CHECKING:
    from shmserve.http.front_end import FrontEnd
    from shmserve.http.openai.choice import Splitter
    from shmserve.http.openai.schemas import ChatRequest

INLINE_CHARS: Final = 10_000
INLINE_MESSAGES: Final = 200
"""Messages this short, and so few, are rendered on the event loop: less than a thread's round trip costs it."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat request comes to. `shows` are special tokens that the splitter must see in the text."""

    prompt: str
    grammar: str
    new_splitter: Callable[[], Splitter] | None
    shows: tuple[int, ...]


async def plan_chat(front: FrontEnd, parsed: ChatRequest) -> ChatPlan:
    """Raises ApiError 400."""
    template = await _template(front, parsed)
    use = tool_use(
        parsed.tools,
        parsed.tool_choice,
        parsed.parallel_tool_calls,
        template.source,
        front.tokenizer.special_id,
    )
    grammar = await front.grammars.wanted_by(parsed)
    has_format = bool(grammar)
    # What holds the answer from its first token on leaves no room for reasoning, even if the prompt has opened it.
    is_held = (use is not None and use.is_forced) or _holds_all(parsed, grammar)
    refuse_with_format(use, has_format)
    # A format holds the whole answer to itself: no call can come then, strict or not.
    if use is not None and use.grammar is not None and not has_format:
        name, text = use.grammar
        grammar = await front.grammars.checked((name, front.grammars.of_lark(text)))
    prompt = await _prompt(template, parsed, use)
    splits_reasoning = _splits_reasoning(template, parsed)
    marks = [OPENER, CLOSER] if splits_reasoning else []
    if use is not None:
        marks += [use.format.opener, use.format.closer, use.format.prefix]
    found = (front.tokenizer.special_id(mark) for mark in marks)
    return ChatPlan(
        prompt,
        grammar,
        _splitter(template, parsed, prompt, use, is_held),
        tuple(sorted({token_id for token_id in found if token_id is not None})),
    )


async def chat_prompt(front: FrontEnd, parsed: ChatRequest) -> str:
    """The prompt alone. Raises ApiError 400."""
    template = await _template(front, parsed)
    use = tool_use(parsed.tools, None, None, template.source, front.tokenizer.special_id)
    return await _prompt(template, parsed, use)


async def _template(front: FrontEnd, parsed: ChatRequest) -> ChatTemplate:
    if parsed.chat_template is not None or "chat_template" in (parsed.chat_template_kwargs or {}):
        is_trusted = front.config.http.trust_request_chat_template
        return await front.own_templates.of(parsed, is_trusted=is_trusted)
    if front.template is None:
        raise ApiError(
            400,
            f"The model `{front.served_name}` has no chat template; use /v1/completions, or start the "
            "server with --chat-template FILE.",
            code="no_chat_template",
        )
    return front.template


def _splits_reasoning(template: ChatTemplate, parsed: ChatRequest) -> bool:
    has_marks = OPENER in template.source or CLOSER in template.source
    return has_marks and parsed.separate_reasoning is not False


def _holds_all(parsed: ChatRequest, grammar: str) -> bool:
    """Whether a response format leaves no room before it. A structural tag does, and a grammar that ends the reasoning itself."""
    outputs = parsed.structured_outputs
    is_tag = (
        parsed.structural_tag is not None
        or (parsed.response_format or {}).get("type") == "structural_tag"
        or (isinstance(outputs, Mapping) and outputs.get("structural_tag") is not None)
    )
    ends_it = CLOSER in grammar.replace("\\", "")  # of a regex the slash is escaped
    return bool(grammar) and not is_tag and not ends_it


def _splitter(
    template: ChatTemplate, parsed: ChatRequest, prompt: str, use: ToolUse | None, is_held: bool
) -> Callable[[], Splitter] | None:
    """None where the whole text is content. `is_held`: the answer begins as its grammar says, whatever the prompt ended with."""
    splits_reasoning = _splits_reasoning(template, parsed)
    if use is None and not splits_reasoning:
        return None
    is_inside = not is_held and prompt.rstrip().endswith(OPENER)
    is_begun = not is_held and not is_inside and _ends_in_reasoning(parsed)
    is_streaming = parsed.stream_reasoning is not False
    is_shown = parsed.include_reasoning is not False

    def new_splitter() -> Splitter:
        inner: Splitter = ContentOnly()
        if use is not None:
            inner = ToolSplitter(use.format, use.names, only_one=use.only_one)
        if splits_reasoning:
            return ReasoningSplitter(
                inner,
                is_inside=is_inside or is_begun,
                is_begun=is_begun,
                is_streaming=is_streaming,
                is_shown=is_shown,
            )
        return inner

    return new_splitter


def _ends_in_reasoning(parsed: ChatRequest) -> bool:
    """Whether the answer goes on with a message that has opened its reasoning and not ended it."""
    said = parsed.messages[-1].get("content") if parsed.continue_final_message else None
    return isinstance(said, str) and said.rfind(OPENER) > said.rfind(CLOSER)


async def _prompt(template: ChatTemplate, parsed: ChatRequest, use: ToolUse | None) -> str:
    has_developers = template.knows_developers
    messages = [
        with_calls_as_objects(i, _message(i, message, has_developers))
        for i, message in enumerate(parsed.messages)
    ]
    if not messages:
        raise ApiError(400, "messages must not be empty", param="messages", code="empty_prompt")
    kwargs = dict(parsed.chat_template_kwargs or {})
    if parsed.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", parsed.reasoning_effort)
    if use is not None and template.knows_tools:
        kwargs["tools"] = list(use.tools)
    elif use is not None:
        messages = told_in_words(messages, use.tools)
    elif not (template.knows_tools or template.knows_calls):  # those of earlier turns
        messages = told_in_words(messages, ())
    opens_turn = parsed.add_generation_prompt is None or parsed.add_generation_prompt
    if parsed.continue_final_message:
        if parsed.add_generation_prompt:
            raise bad_field(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true",
            )
        if messages[-1]["role"] != "assistant":
            raise bad_field(
                "continue_final_message",
                "continue_final_message needs a last message of role 'assistant'",
            )
        return await asyncio.to_thread(continued_prompt, template, messages, kwargs)
    is_short = (
        len(messages) <= INLINE_MESSAGES
        and sum(len(message.get("content") or "") for message in messages) < INLINE_CHARS
    )
    if is_short and not template.is_foreign:
        return template.render(messages, add_generation_prompt=opens_turn, kwargs=kwargs)
    return await asyncio.to_thread(
        template.render, messages, add_generation_prompt=opens_turn, kwargs=kwargs
    )


def _message(index: int, message: dict[str, Any], has_developers: bool) -> dict[str, Any]:
    """A message as templates want it. 400 for parts that are no text.

    Its text parts are joined, in order, by nothing. What is null is not there, as in transformers: some templates ask `'tool_calls' in
    message` (Llama 3), and clients send back what they got with all its nulls. `developer` is `system` where the template knows no such role.
    """
    at = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_field(f"{at}.role", f"{at}.role must be a string")
    message = {key: value for key, value in message.items() if value is not None}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    if role == "developer" and not has_developers:
        message["role"] = "system"
    if "reasoning" in message:  # vLLM's and OpenRouter's name of it
        message.setdefault("reasoning_content", message["reasoning"])
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list) or not content:
        raise bad_field(
            f"{at}.content", f"{at}.content must be a string or a list of text parts, and not empty"
        )
    texts = []
    for i, part in enumerate(content):
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad_field(
                f"{at}.content[{i}]",
                f"{at}.content[{i}] must be a text part with a text (this is a text model), got {kind!r}",
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
