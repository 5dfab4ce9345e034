"""Chat templates: messages to prompt text, in jinja2's sandbox, as transformers renders them.

Owns: the compiled template. Never: invents one for a model that has none. Errors of a template are the client's to read.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from shmserve.http.errors import ApiError

_TEMPLATE_FAULTS: Final = (
    TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What a template's own expressions can raise, given messages that it does not expect."""


class TemplateError(ValueError):
    """The template itself cannot be compiled: the operator's fault, at start."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # jinja2's own tojson escapes for HTML, which no prompt wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(fmt: str) -> str:
    return datetime.datetime.now().strftime(fmt)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant said, for training. It stands for what is in it, in a scope as in transformers."""

    tags = {"generation"}  # noqa: RUF012  # so jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class ChatTemplate:
    """A compiled chat template. Raises TemplateError if it cannot be compiled. Any thread may render.

    One that `is_foreign` came with a request: nobody knows how long it takes, so the event loop must not render it.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], *, is_foreign: bool = False
    ) -> None:
        self.is_foreign = is_foreign
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None
        # jinja2 copies its globals for each render, and has them as a ChainMap, which takes ten times as long to copy.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = special_tokens
        self.source = source

    @property
    def knows_tools(self) -> bool:
        """Whether the template shows the tools it is given."""
        return "tools" in self.source

    @property
    def knows_calls(self) -> bool:
        """Whether it shows the calls of earlier turns, as some do that show no tools."""
        return "tool_calls" in self.source

    @property
    def knows_developers(self) -> bool:
        """Whether it has a place for messages of OpenAI's role `developer`."""
        return "developer" in self.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises ApiError 400 with the template's own message."""
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    "tools": None,  # defined, as in transformers: templates ask whether they are none
                    "documents": None,
                    **(kwargs or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise ApiError(
                400,
                f"The chat template refused the messages: {error}",
                param="messages",
                code="template_error",
            ) from None
        # The JSON of a call's arguments can say half of a surrogate pair, which is in no text that can be tokenised.
        return text if text.isascii() else text.encode("utf-8", "replace").decode()


def continued_prompt(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]
) -> str:
    """The prompt that ends inside the last message, so that the answer goes on with it.

    The last message is rendered with a marker behind its text; the prompt is what stands before the marker.
    """
    text = messages[-1].get("content") or ""
    marker = "\x00shmserve-continues-here\x00"
    last = {**messages[-1], "content": text + marker}
    rendered = template.render([*messages[:-1], last], add_generation_prompt=False, kwargs=kwargs)
    before, found, _ = rendered.rpartition(marker)
    if not found:
        raise ApiError(
            400,
            "The chat template does not show the last message's text, so it cannot be continued.",
            param="continue_final_message",
            code="template_error",
        )
    # As it is: blanks at the text's end are there, since for the template they stood before the marker.
    return before
