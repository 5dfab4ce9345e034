"""Tool calls in a model's text, found as the text comes: the formats that models are trained on, as OpenAI's deltas.

Owns: where a call begins and ends, for each format; what was held for it and turns out to be text is text again. Never: knows a schema.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated (Hermes, Qwen)
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama3    {"name": ..., "parameters": {...}}; {...} from the very beginning, perhaps behind <|python_tag|>
    pythonic  [f(a=1), g(b="x")] from the very beginning (Llama 3.2 and 4)

A call is announced once its name is complete and is one of the request's tools; from then on its arguments go out raw, as they
come. Pure; front end only. One object per choice.
"""

from __future__ import annotations

import ast
import json
import secrets
import string
from dataclasses import dataclass
from typing import Any, Final

from shmserve.http.json_scan import ObjectScanner
from shmserve.http.ways import NO_MARKS, Marks, Passing

Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opener` begins calls anywhere in the text, `prefix` may stand before them at its beginning; `closer` ends each."""

    name: str
    opener: str = ""
    closer: str = ""
    prefix: str = ""
    arguments_key: str = "arguments"
    id_chars: int = 24
    is_python: bool = False


FORMATS: Final = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", id_chars=9),
    "llama3": ToolFormat("llama3", prefix="<|python_tag|>", arguments_key="parameters"),
    "pythonic": ToolFormat("pythonic", prefix="<|python_start|>", is_python=True),
}

_ALPHABET: Final = string.ascii_letters + string.digits
_BETWEEN: Final = "[],; \t\r\n"


def format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches; Hermes' where it teaches none."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|python_start|>" in template or "[func_name1(" in template:
        return FORMATS["pythonic"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return FORMATS["llama3"]
    return FORMATS["hermes"]


def held_length(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


class ToolSplitter:
    """`names` are the request's tools; `only_one` drops what follows the first call (parallel_tool_calls false)."""

    def __init__(self, fmt: ToolFormat, names: frozenset[str], *, only_one: bool = False) -> None:
        self.num_calls = 0
        self._format = fmt
        self._names = names
        self._only_one = only_one
        self._mode = self._in_text if fmt.opener else self._at_start
        self._buffer = ""  # text that is not yet decided
        self._raw = ""  # of a call that is not yet announced: text again, if it is none
        self._scanner: ObjectScanner | None = None
        self._is_announced = False
        self._out: list[Delta] = []
        self._depth = 0  # of the brackets of a list of Python calls
        self._quote = ""  # the one that its string began with, where we are in one
        self._is_escaped = False

        marks = NO_MARKS
        if fmt.opener:
            marks = Marks((fmt.opener.encode(),), holds_blanks=True)
        self._text_passes = Passing("content", marks)

    is_reasoning = False

    @property
    def has_tool_calls(self) -> bool:
        return self.num_calls > 0

    @property
    def passing(self) -> Passing | None:
        """In a call nothing passes: its text is scanned character by character."""
        is_text = self._mode == self._in_text and not self._buffer
        return self._text_passes if is_text else None

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._buffer and self._mode():
            pass
        return self._taken()

    def finish(self) -> list[Delta]:
        rest = self._raw + self._buffer
        self._raw = self._buffer = ""
        if self._mode == self._in_python and self._python_calls(rest):
            return self._taken()
        # Blanks behind a call are none of the answer either.
        is_blank = self.num_calls > 0 and not rest.strip()
        if self._mode not in (self._after_call, self._at_end) and not is_blank:
            self._say(rest)
        return self._taken()

    def _taken(self) -> list[Delta]:
        """What has come, neighbours of one kind joined."""
        out: list[Delta] = []
        for delta in self._out:
            before = out[-1] if out else {}
            if "content" in delta and "content" in before:
                before["content"] += delta["content"]
            elif (
                "tool_calls" in delta
                and "tool_calls" in before
                and "id" not in delta["tool_calls"][0]
            ):
                function = before["tool_calls"][0]["function"]
                function["arguments"] += delta["tool_calls"][0]["function"]["arguments"]
            else:
                out.append(delta)
        self._out = []
        return out

    def _say(self, text: str) -> None:
        if text:
            self._out.append({"content": text})

    # Modes: each looks at the buffer and says whether it went on.

    def _in_text(self) -> bool:
        opener = self._format.opener
        if not opener:
            self._say(self._buffer)
            self._buffer = ""
            return False
        before, found, behind = self._buffer.partition(opener)
        if found:
            text = before.rstrip()
            self._say(text)
            self._raw, self._buffer = before[len(text) :] + opener, behind
            self._mode = self._before_call
            return True
        # Blanks before a call are none of the answer: they are held, too.
        hold = held_length(before, opener)
        text = before[: len(before) - hold].rstrip()
        self._say(text)
        self._buffer = before[len(text) :]
        return False

    def _at_start(self) -> bool:
        text = self._buffer.lstrip()
        prefix = self._format.prefix
        if not text or (prefix.startswith(text) and text != prefix):
            return False
        begins = "[" if self._format.is_python else "{"
        inner = text.removeprefix(prefix).lstrip()
        if not inner:
            return False
        if not inner.startswith(begins):
            self._mode = self._in_text
            return True
        self._raw = self._buffer[: len(self._buffer) - len(inner)]
        self._buffer = inner
        self._mode = self._in_python if self._format.is_python else self._before_call
        return True

    def _before_call(self) -> bool:
        """Behind an opener: an object, or an array of them."""
        text = self._buffer.lstrip(_BETWEEN)
        self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text:
            return False
        if text[0] != "{":
            return self._is_no_call()
        self._scanner = ObjectScanner((self._format.arguments_key, "arguments", "parameters"))
        self._is_announced = False
        self._mode = self._in_call
        return True

    def _is_no_call(self) -> bool:
        """What was held is text after all."""
        self._say(self._raw)
        self._raw, self._scanner = "", None
        self._mode = self._in_text
        if not self._format.opener or not self._buffer.startswith(self._format.opener):
            # Past the character that decided it, so that every turn goes on.
            self._say(self._buffer[:1])
            self._buffer = self._buffer[1:]
        return True

    def _in_call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        for at, char in enumerate(self._buffer):
            scanner.feed(char)
            if not self._is_announced:
                self._raw += char
                if scanner.is_broken or (scanner.is_done and scanner.name is None):
                    self._buffer = self._buffer[at + 1 :]
                    return self._is_no_call()
                if scanner.name is not None and not self._announce(scanner.name):
                    self._buffer = self._buffer[at + 1 :]
                    return self._is_no_call()
            if self._is_announced and (piece := scanner.take()):
                self._argue(piece)
            if scanner.is_done:
                if not scanner.has_arguments:
                    self._argue("{}")
                self._buffer = self._buffer[at + 1 :]
                self._mode = self._at_end if self._only_one else self._after_call
                return True
        self._buffer = ""
        return False

    def _after_call(self) -> bool:
        """Behind a call: its closer, another call, or text."""
        closer = self._format.closer
        text = self._buffer.lstrip(_BETWEEN)
        if not text or (closer and closer.startswith(text) and text != closer):
            self._buffer = text
            return False
        if closer and text.startswith(closer):
            self._buffer, self._mode = text[len(closer) :], self._in_text
            return True
        self._buffer = text
        if text[0] == "{":
            self._raw, self._mode = "", self._before_call
            return True
        self._mode = self._in_text
        return True

    def _at_end(self) -> bool:
        self._buffer = ""
        return False

    def _in_python(self) -> bool:
        """A list of calls is looked at when its bracket closes; arguments cannot be told from text before.

        Once: each character is read once, however many brackets a list that is no list of calls has.
        """
        for at, char in enumerate(self._buffer):
            if self._closes(char):
                text, self._buffer = self._raw + self._buffer[: at + 1], self._buffer[at + 1 :]
                self._raw = ""
                if self._python_calls(text):
                    self._mode = self._at_end
                else:
                    self._say(text)
                    self._mode = self._in_text
                return True
        self._raw += self._buffer
        self._buffer = ""
        return False

    def _closes(self, char: str) -> bool:
        """Read one character of a list; True for the bracket that ends it. What is in a string is no bracket."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char == "[":
            self._depth += 1
        elif char == "]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _python_calls(self, text: str) -> bool:
        text = text.strip().removeprefix(self._format.prefix).strip()
        try:
            tree = ast.parse(text, mode="eval").body
            if not isinstance(tree, ast.List) or not tree.elts:
                return False
            calls = [_python_call(node) for node in tree.elts]
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return False
        if any(name not in self._names for name, _ in calls):
            return False
        for name, arguments in calls[:1] if self._only_one else calls:
            self._announce(name)
            self._argue(arguments)
        return True

    def _announce(self, name: str) -> bool:
        if name not in self._names:
            return False
        chars = "".join(secrets.choice(_ALPHABET) for _ in range(self._format.id_chars))
        call_id = chars if self._format.id_chars == 9 else f"call_{chars}"
        call = {
            "index": self.num_calls,
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self._out.append({"tool_calls": [call]})
        self.num_calls += 1
        self._is_announced = True
        self._raw = ""
        return True

    def _argue(self, text: str) -> None:
        if text:
            call = {"index": self.num_calls - 1, "function": {"arguments": text}}
            self._out.append({"tool_calls": [call]})


def _python_call(node: ast.expr) -> tuple[str, str]:
    """Name of `f(a=1)`, and its arguments as JSON. ValueError or TypeError for anything else, and for what JSON has not (bytes, sets, ...)."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a ** argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        told.encode()
    except UnicodeEncodeError:  # "\\ud83d\\ude00": in JSON a pair, in Python two halves
        told = json.dumps(arguments, allow_nan=False)
    return ast.unparse(node.func), told
