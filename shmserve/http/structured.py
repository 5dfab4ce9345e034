"""Structured output: which grammar a request asks for, and whether it can be honoured, before anything is submitted.

Owns: the fields of OpenAI (`response_format`), vLLM (`structured_outputs`, `guided_*`) and SGLang (`json_schema`, `regex`, `ebnf`,
`structural_tag`), of which a request may use one, and the cache of checked grammars. Never: masks a token (the worker does).
Grammars are checked in a thread. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shmserve import grammar as grammars
from shmserve.grammar import GrammarError
from shmserve.http.errors import ApiError, bad_field

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from shmserve.models import PreparedModel

MOST_KEPT: Final = 256
"""Checked grammars that are remembered, least recently used first to go."""

INLINE_CHARS: Final = 2_000
"""A grammar this short is translated on the event loop, in some milliseconds."""
_EBNF: Final = ("ebnf", "guided_grammar", "grammar")

_BY_FIELD: Final[dict[str, Callable[[Any], str]]] = {
    "regex": grammars.from_regex,
    "ebnf": grammars.from_ebnf,
    "json_schema": grammars.from_json_schema,
    "structural_tag": grammars.from_structural_tag,
    "guided_json": grammars.from_json_schema,
    "guided_regex": grammars.from_regex,
    "guided_choice": grammars.from_choice,
    "guided_grammar": grammars.from_ebnf,
    "grammar": grammars.from_ebnf,  # llama.cpp's
}
_BY_OUTPUT: Final[dict[str, Callable[[Any], str]]] = {
    "json": grammars.from_json_schema,
    "regex": grammars.from_regex,
    "choice": grammars.from_choice,
    "grammar": grammars.from_ebnf,
    "json_object": lambda _: grammars.from_json_object(),
    "structural_tag": grammars.from_structural_tag,
}


class Grammars:
    """Of one front end. The vocabulary is read when the first grammar comes."""

    def __init__(self, model: PreparedModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, str] = OrderedDict()  # grammar -> what is wrong with it, or ""
        # One thread: a burst of hard grammars takes one core, and its queue is bounded by the requests in it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def wanted_by(self, request: msgspec.Struct) -> str:
        """The grammar of a request, "" for none. Raises ApiError 400 that names the field if it cannot be honoured."""
        if _is_long(request):  # read as a grammar it takes a second
            loop = asyncio.get_running_loop()
            asked = await loop.run_in_executor(self._thread, asked_for, request)
        else:
            asked = asked_for(request)
        return await self.checked(asked) if asked is not None else ""

    async def checked(self, asked: tuple[str, str]) -> str:
        """The grammar of (field name, text). Raises ApiError 400 that names the field if it cannot be honoured."""
        name, text = asked
        if text in self._kept:
            self._kept.move_to_end(text)
        else:
            loop = asyncio.get_running_loop()
            self._kept[text] = await loop.run_in_executor(self._thread, self._fault, text)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        if fault := self._kept[text]:
            raise bad_field(name, f"{name}: {fault}")
        return text

    def of_lark(self, text: str) -> str:
        """A Lark grammar of our own making as the text that travels."""
        return grammars.from_lark(text)

    def _fault(self, text: str) -> str:
        if self._tokenizer is None:
            self._tokenizer = grammars.tokenizer_of(self._model)
        try:
            grammars.check(text, self._tokenizer)
        except GrammarError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_long(request: msgspec.Struct) -> bool:
    """Whether its grammar is too long to be translated on the event loop."""
    outputs = getattr(request, "structured_outputs", None)
    texts = [getattr(request, name, None) for name in _EBNF]
    texts.append(outputs.get("grammar") if isinstance(outputs, Mapping) else None)
    return any(isinstance(text, str) and len(text) > INLINE_CHARS for text in texts)


def asked_for(request: msgspec.Struct) -> tuple[str, str] | None:
    """(field, grammar) of the one structured output that a request wants. 400 for more than one, or one that is malformed."""
    found: list[tuple[str, Callable[[], str]]] = []
    for name, translate in _BY_FIELD.items():
        value = getattr(request, name, None)
        if value is not None:
            found.append((name, _later(translate, value)))
    outputs = getattr(request, "structured_outputs", None)
    if outputs is not None:
        found.append(("structured_outputs", lambda: _of_outputs(outputs)))
    response_format = getattr(request, "response_format", None)
    if response_format is not None and response_format.get("type") != "text":
        found.append(("response_format", lambda: _of_response_format(response_format)))
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise bad_field(found[1][0], f"only one of these may be given: {names}")
    name, translate_it = found[0]
    try:
        return name, translate_it()
    except GrammarError as error:
        raise bad_field(name, f"{name}: {error}") from None


def _later(translate: Callable[[Any], str], value: Any) -> Callable[[], str]:
    return lambda: translate(value)


def _of_outputs(outputs: Any) -> str:
    if not isinstance(outputs, Mapping):
        raise GrammarError("must be an object")
    wanted = {name: value for name, value in outputs.items() if value not in (None, False)}
    unknown = sorted(wanted.keys() - _BY_OUTPUT.keys())
    if len(wanted) != 1 or unknown:
        names = ", ".join(_BY_OUTPUT)
        raise GrammarError(f"exactly one of {names} must be given, got {sorted(wanted) or 'none'}")
    ((name, value),) = wanted.items()
    return _BY_OUTPUT[name](value)


def _of_response_format(response_format: Mapping[str, Any]) -> str:
    kind = response_format.get("type")
    if kind == "json_object":
        schema = response_format.get("schema")  # llama.cpp's, Together's
        return grammars.from_json_object() if schema is None else grammars.from_json_schema(schema)
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        if not isinstance(inner, Mapping):
            raise ApiError(
                400,
                "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
                param="response_format",
                code="invalid_value",
            )
        schema = inner.get("schema", inner.get("json_schema"))
        if schema is None:
            raise GrammarError("json_schema.schema must be given")
        return grammars.from_json_schema(schema)
    if kind == "structural_tag":
        return grammars.from_structural_tag(response_format)
    raise GrammarError(
        f"type must be text, json_object, json_schema or structural_tag, got {kind!r}"
    )
