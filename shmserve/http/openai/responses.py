"""POST /v1/responses: OpenAI's Responses API, stateless, over the same completions as chat.

Owns: its schema and its way to a chat request. What would need a memory between requests (`previous_response_id`, background) is refused
by name; `store` is taken and answered with false. Event loop's thread only.
"""

from __future__ import annotations

import time
from typing import Any, Final

from aiohttp import web

from shmserve.http import fields
from shmserve.http.chat import plan_chat
from shmserve.http.errors import ApiError, bad_field
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation import external_id_of
from shmserve.http.in_flight import InFlight
from shmserve.http.openai.endpoints import response_headers
from shmserve.http.openai.response_items import ResponseChoice
from shmserve.http.openai.sampling import single_wanted, take_sampling
from shmserve.http.openai.schemas import Beyond, ChatRequest
from shmserve.http.single import answer_single
from shmserve.http.slow_client import rules_of


class ResponsesRequest(Beyond, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None
    user: str | None = None
    include: list[str] | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    top_k: int | None = None  # ours
    stop: str | list[str] | None = None  # ours
    # Named, and not honoured.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None


_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (None, False),
    "prompt": (None,),
    "max_tool_calls": (None,),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}


async def responses(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, ResponsesRequest, _UNSUPPORTED)
    front.check_model(parsed.model)
    front.admit(
        request,
        1,
        priority=parsed.priority,
        timeout_ms=parsed.timeout_ms,
        rank=parsed.data_parallel_rank,
    )
    chat = chat_request(parsed)
    plan = await plan_chat(front, chat)
    most = ("max_output_tokens", parsed.max_output_tokens)
    want = await single_wanted(front, chat, plan, most=most, prompt_name="input")
    rules = rules_of(front.config.http, parsed)
    headers = response_headers(request, parsed.request_id, ignored)

    def formats_of(entry: InFlight) -> tuple[ResponseChoice, ResponseChoice]:
        splitter = plan.new_splitter() if plan.new_splitter is not None else None
        head = _head(front, parsed, f"resp_{entry.req_id:016x}")
        response = ResponseChoice(head, entry, splitter)
        return response, response

    is_streamed = bool(parsed.stream)
    name = external_id_of(request, parsed.request_id)
    return await answer_single(front, request, want, name, headers, is_streamed, rules, formats_of)


def _head(front: FrontEnd, parsed: ResponsesRequest, response_id: str) -> dict[str, Any]:
    """The response's fields that are known from the first event on."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": parsed.instructions,
        "max_output_tokens": parsed.max_output_tokens,
        "model": front.served_name,
        "output": [],
        "parallel_tool_calls": parsed.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (parsed.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": 1.0 if parsed.temperature is None else parsed.temperature,
        "text": parsed.text or {"format": {"type": "text"}},
        "tool_choice": parsed.tool_choice or "auto",
        "tools": parsed.tools or [],
        "top_p": 1.0 if parsed.top_p is None else parsed.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": parsed.user,
        "metadata": parsed.metadata or {},
    }


def chat_request(parsed: ResponsesRequest) -> ChatRequest:
    """The chat request that means the same. Raises ApiError 400 that names the field."""
    messages: list[dict[str, Any]] = []
    if parsed.instructions:
        messages.append({"role": "system", "content": parsed.instructions})
    if isinstance(parsed.input, str):
        messages.append({"role": "user", "content": parsed.input})
    else:
        for index, item in enumerate(parsed.input):
            _add_item(messages, f"input[{index}]", item)
    if not parsed.input:
        raise ApiError(400, "input must not be empty", param="input", code="empty_prompt")
    choice = parsed.tool_choice
    if isinstance(choice, dict) and "function" not in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    chat = ChatRequest(
        messages=messages,
        stop=parsed.stop,
        tools=[_tool(i, tool) for i, tool in enumerate(parsed.tools)] if parsed.tools else None,
        tool_choice=choice,
        parallel_tool_calls=parsed.parallel_tool_calls,
        response_format=_format(parsed.text),
        reasoning_effort=(parsed.reasoning or {}).get("effort"),
    )
    return take_sampling(chat, parsed)


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_field(
            f"tools[{index}].type",
            f"tools[{index}].type must be 'function' (this server runs no tools), got {tool.get('type')!r}",
        )
    names = ("name", "description", "parameters", "strict")
    inner = {k: tool[k] for k in names if tool.get(k) is not None}
    return {"type": "function", "function": inner}


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise bad_field("text.format", "text.format must be an object")
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form


def _add_item(messages: list[dict[str, Any]], at: str, item: dict[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise bad_field(f"{at}.role", f"{at}.role must be user, assistant, system or developer")
        text = _text(f"{at}.content", item.get("content"))
        last = messages[-1] if messages else {}
        if role == "assistant" and "reasoning_content" in last and not last["content"]:
            last["content"] = text  # what was thought belongs to what is said behind it
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments") or "{}"},
        }
        if messages and messages[-1]["role"] == "assistant":  # text and calls of one turn
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _text(f"{at}.output", output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind == "reasoning":
        # Whether it is shown is the template's to say, as in chat completions.
        if thought := _thought(item):
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise bad_field(f"{at}.type", f"{at}.type {kind!r} is not known to this server")


def _thought(item: dict[str, Any]) -> str:
    """The text of a reasoning item: its content, or the summary where that is all there is."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list):
            continue
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if thought := "".join(text for text in texts if isinstance(text, str)):
            return thought
    return ""


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(at, f"{at} must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        known = isinstance(part, dict) and part.get("type") in (
            "input_text",
            "output_text",
            "text",
        )
        if not known or not isinstance(part.get("text"), str):
            raise bad_field(f"{at}[{i}]", f"{at}[{i}] must be a text part (this is a text model)")
        texts.append(part["text"])
    return "".join(texts)
