"""OpenAI's old form of tools: `functions`, `function_call`, and messages with them, mapped to the new form and back.

Owns: both ways of the mapping. A request that says `functions` is answered in the same form: one call at most, as
`message.function_call`, and a finish reason of its own. Pure; front end only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmserve.http.errors import bad_field
from shmserve.http.openai.choice import Delta, Splitter
from shmserve.http.openai.schemas import ChatRequest
from shmserve.http.ways import Passing


def take_functions(parsed: ChatRequest) -> bool:
    """Say the request in the new form, in place; true if it was in the old one. Raises ApiError 400 that names the field."""
    parsed.messages = with_tool_calls(parsed.messages)
    call, parsed.function_call = parsed.function_call, None
    functions, parsed.functions = parsed.functions, None
    if not functions:
        if call not in (None, "none", "auto"):
            raise bad_field("function_call", "When using `function_call`, `functions` must be set.")
        return False
    if parsed.tools or parsed.tool_choice is not None:
        raise bad_field("functions", "functions and tools cannot both be given")
    for index, function in enumerate(functions):
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise bad_field(f"functions[{index}]", f"functions[{index}] must have a name")
    if isinstance(call, Mapping):
        names = [function["name"] for function in functions]
        if call.get("name") not in names:
            name = call.get("name")
            raise bad_field(
                "function_call", f"function_call names {name!r:.100}, which is not in functions"
            )
        parsed.tool_choice = {"type": "function", "function": {"name": call["name"]}}
    elif call in (None, "none", "auto"):
        parsed.tool_choice = call
    else:
        raise bad_field(
            "function_call", f"function_call must be none, auto or a name, got {call!r:.100}"
        )
    parsed.tools = [{"type": "function", "function": function} for function in functions]
    parsed.parallel_tool_calls = False
    return True


def with_tool_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls and results stand as tool calls and their results."""
    out: list[dict[str, Any]] = []
    call_id = ""
    for index, message in enumerate(messages):
        call = message.get("function_call")
        if call is not None:
            if message.get("tool_calls"):
                at = f"messages[{index}].function_call"
                raise bad_field(at, f"{at} and tool_calls cannot both be given")
            # Nine letters and digits: some templates insist on that form.
            call_id = f"call{index % 100_000:05d}"
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
        elif message.get("role") == "function":
            message = {**message, "role": "tool", "tool_call_id": call_id}
        out.append(message)
    return out


def functions_told(new_splitter: Callable[[], Splitter]) -> Callable[[], Splitter]:
    """The same splitters, but their calls are told in the old form."""
    return lambda: FunctionSplitter(new_splitter())


class FunctionSplitter:
    """Tells the calls of another splitter in the old form."""

    def __init__(self, inner: Splitter) -> None:
        self._inner = inner

    @property
    def has_tool_calls(self) -> bool:
        return self._inner.has_tool_calls

    @property
    def is_reasoning(self) -> bool:
        return self._inner.is_reasoning

    @property
    def passing(self) -> Passing | None:
        return self._inner.passing

    def feed(self, text: str) -> list[Delta]:
        return [_as_function(delta) for delta in self._inner.feed(text)]

    def finish(self) -> list[Delta]:
        return [_as_function(delta) for delta in self._inner.finish()]


def _as_function(delta: Delta) -> Delta:
    if "tool_calls" not in delta:
        return delta
    (call,) = delta["tool_calls"]  # a splitter tells one at a time
    rest = {key: value for key, value in delta.items() if key != "tool_calls"}
    return rest | {"function_call": call["function"]}
