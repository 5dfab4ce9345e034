"""Request bodies of /v1/messages and /v1/messages/count_tokens, and what they come to as a chat request.

Owns: names, types and content blocks of Anthropic's Messages API. Never: decides anything that chat completions decide: a message
becomes the chat request that says the same. Pure; front end only.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from shmserve.http.errors import bad_field
from shmserve.http.openai.sampling import take_sampling
from shmserve.http.openai.schemas import Beyond, ChatRequest


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class CountRequest(Beyond, kw_only=True):
    """Of the fields that change no prompt, none is looked at: a body of /v1/messages may be counted as it is."""

    messages: list[Message]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    output_config: dict[str, Any] | None = None


_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(parsed: CountRequest) -> ChatRequest:
    """The chat request that means the same. Raises ApiError 400 that names the field."""
    messages: list[dict[str, Any]] = []
    if parsed.system:
        messages.append({"role": "system", "content": _text_of("system", parsed.system)})
    for index, message in enumerate(parsed.messages):
        at = f"messages[{index}]"
        if message.role not in ("user", "assistant"):
            raise bad_field(f"{at}.role", f"{at}.role must be user or assistant")
        messages += _messages(at, message)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    choice, parallel = _tool_choice(parsed.tool_choice)
    thinking = (parsed.thinking or {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise bad_field("thinking.type", "thinking.type must be enabled, adaptive or disabled")
    chat = ChatRequest(
        messages=messages,
        tools=[_tool(i, tool) for i, tool in enumerate(parsed.tools)] if parsed.tools else None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        # A last message of the assistant's own is what its answer goes on with.
        continue_final_message=True if continues else None,
        chat_template_kwargs=parsed.chat_template_kwargs,
    )
    if isinstance(parsed, MessagesRequest):
        chat.stop = parsed.stop_sequences
        chat.response_format = _format(parsed.output_config)
        take_sampling(chat, parsed)
    if thinking is not None:
        kwargs = {"enable_thinking": thinking != "disabled"}
        chat.chat_template_kwargs = kwargs | (chat.chat_template_kwargs or {})
    return chat


def _format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """`output_config.format` as chat completions have it."""
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad_field("output_config.format", "output_config.format must be of type json_schema")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_field(
            f"tools[{index}].type",
            f"tools[{index}].type {tool['type']!r} is not run by this server",
        )
    if not isinstance(tool.get("name"), str):
        raise bad_field(f"tools[{index}].name", f"tools[{index}].name must be a string")
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in _CHOICES:
        raise bad_field("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
    return _CHOICES[kind], parallel


def _messages(at: str, message: Message) -> list[dict[str, Any]]:
    """One message of blocks as chat messages: results of tools are messages of their own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    thoughts: list[str] = []  # which of them are shown is the template's to say
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(message.content):
        where = f"{at}.content[{i}]"
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and message.role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "redacted_thinking" and message.role == "assistant":
            continue
        elif kind == "tool_use" and message.role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and message.role == "user":
            content = block.get("content")
            text = "" if content is None else _text_of(f"{where}.content", content)
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            )
        else:
            raise bad_field(where, f"{where} is a {kind!r} block, which a {message.role} message of a text model cannot hold")  # fmt: skip
    out = results
    if texts or calls or not results:
        said: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if calls:
            said["tool_calls"] = calls
        if thoughts:
            said["reasoning_content"] = "".join(thoughts)
        out = [*results, said]
    return out


def _text_of(at: str, content: Any) -> str:
    """The text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(at, f"{at} must be a string or a list of text blocks")
    texts = []
    for i, block in enumerate(content):
        if (
            not isinstance(block, dict)
            or block.get("type") != "text"
            or not isinstance(block.get("text"), str)
        ):
            raise bad_field(f"{at}[{i}]", f"{at}[{i}] must be a text block (this is a text model)")
        texts.append(block["text"])
    return "".join(texts)
