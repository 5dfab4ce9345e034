"""Tools of a chat request: what the template is told of them, how calls are found in the answer, and the grammar that forces one.

Owns: `tools`, `tool_choice`, `parallel_tool_calls`, and messages that carry calls and their results. A template that knows no tools
is told of them in words, in Hermes' format: a small model then does what it can. Never: runs a tool. Front end only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmserve.http.call_grammars import SpecialId, forced_grammar, strict_grammar
from shmserve.http.errors import ApiError, bad_field
from shmserve.http.tool_formats import FORMATS, ToolFormat, format_of

MOST_TOOLS: Final = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_IN_WORDS: Final = """You can call functions. Their signatures:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON:
<tool_call>
{{"name": "function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one request. `grammar` is (field, Lark text) where a call is forced, or must be of its function's schema if one comes."""

    tools: tuple[dict[str, Any], ...]
    format: ToolFormat
    names: frozenset[str]
    only_one: bool
    grammar: tuple[str, str] | None
    is_forced: bool


def tool_use(
    tools: Sequence[Any] | None,
    tool_choice: Any,
    parallel: bool | None,
    template: str,
    special_id: SpecialId,
) -> ToolUse | None:
    """None if no call may come of this request. Raises ApiError 400 that names the field.

    `special_id(text)` is the id of a special token, None for what is spelled out in ordinary tokens.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise bad_field("tool_choice", "When using `tool_choice`, `tools` must be set.")
        return None
    if len(tools) > MOST_TOOLS:
        raise bad_field("tools", f"tools may hold at most {MOST_TOOLS}, got {len(tools)}")
    schemas: dict[str, Any] = {}
    strict: set[str] = set()
    for index, tool in enumerate(tools):
        name, schema = _function(f"tools[{index}]", tool)
        if name in schemas:
            raise bad_field(f"tools[{index}].function.name", f"tools names {name!r} twice")
        schemas[name] = schema
        if _is_strict(f"tools[{index}].function.strict", tool["function"]):
            strict.add(name)
    if tool_choice == "none":
        return None
    fmt = format_of(template)
    only_one = parallel is False
    forced: Sequence[str] = ()
    if tool_choice == "required":
        forced = list(schemas)
    elif isinstance(tool_choice, Mapping):
        forced, only_one = [_named(tool_choice, schemas)], True
    elif tool_choice not in (None, "auto"):
        raise bad_field(
            "tool_choice",
            f"tool_choice must be none, auto, required or a function, got {tool_choice!r:.100}",
        )
    grammar = None
    if forced:
        # Python's calls have no grammar of JSON Schema: a forced call is written as JSON.
        fmt = FORMATS["llama3"] if fmt.is_python else fmt
        text = forced_grammar(fmt, {name: schemas[name] for name in forced}, only_one, special_id)
        grammar = ("tools", text)
    elif strict:
        if fmt.is_python:
            raise bad_field(
                "tools",
                "strict tools need calls that are JSON, and this model's are Python: leave strict out, or "
                "set tool_choice to required",
            )
        grammar = ("tools", strict_grammar(fmt, schemas, strict, special_id))
    return ToolUse(tuple(tools), fmt, frozenset(schemas), only_one, grammar, bool(forced))


def _is_strict(at: str, function: Mapping[str, Any]) -> bool:
    """Whether a call must be of the function's schema: OpenAI's word for it."""
    strict = function.get("strict")
    if strict not in (None, False, True):
        raise bad_field(at, f"{at} must be true or false, got {strict!r:.100}")
    return bool(strict)


def _function(at: str, tool: Any) -> tuple[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise bad_field(at, f"{at} must be an object of type 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_field(f"{at}.function", f"{at}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_field(
            f"{at}.function.name",
            f"{at}.function.name must be 1 to 128 letters, digits or _.:-, got {name!r:.100}",
        )
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise bad_field(f"{at}.function.parameters", f"{at}.function.parameters must be an object")
    return name, schema


def _named(choice: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise bad_field("tool_choice", "tool_choice must name a function")
    if name not in schemas:
        raise bad_field("tool_choice", f"tool_choice names {name[:100]!r}, which is not in tools")
    return name


def with_calls_as_objects(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Clients send a call's arguments as the text of an object; templates want the object."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    at = f"messages[{index}].tool_calls"
    if not isinstance(calls, list):
        raise bad_field(at, f"{at} must be a list")
    out = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_field(f"{at}[{i}].function", f"{at}[{i}].function must have a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise bad_field(
                    f"{at}[{i}].function.arguments",
                    f"{at}[{i}].function.arguments is not valid JSON: {error}",
                ) from None
        out.append({**call, "function": {**function, "arguments": arguments or {}}})
    return {**message, "tool_calls": out}


def told_in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: signatures in the system message, calls and results as text."""
    out: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            message = {
                "role": "user",
                "content": f"<tool_response>\n{content}\n</tool_response>",
            }
        elif message.get("tool_calls"):
            calls = [
                "<tool_call>\n"
                + json.dumps(
                    {
                        "name": call["function"]["name"],
                        "arguments": call["function"]["arguments"],
                    },
                    ensure_ascii=False,
                )
                + "\n</tool_call>"
                for call in message["tool_calls"]
            ]
            text = "\n".join([content, *calls] if content else calls)
            message = {"role": message["role"], "content": text}
        out.append(message)
    if not tools:
        return out
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _IN_WORDS.format(tools=lines)
    if out and out[0]["role"] == "system":
        first = out[0].get("content") or ""
        out[0] = {**out[0], "content": f"{first}\n\n{words}" if first else words}
    else:
        out.insert(0, {"role": "system", "content": words})
    return out


def refuse_with_format(use: ToolUse | None, has_format: bool) -> None:
    """A forced call and a response format are two grammars: only one can hold."""
    if use is not None and use.is_forced and has_format:
        raise ApiError(
            400,
            "tool_choice that forces a call cannot be combined with a response format",
            param="tool_choice",
            code="invalid_value",
        )
