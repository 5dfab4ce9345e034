"""Chat templates that come with a request.

Owns: whether they are taken, their bound, and those that were compiled lately. A template is a program: jinja2's sandbox keeps it from
the process, but nothing keeps it from running long, so the operator must say that clients are trusted with it
(`--trust-request-chat-template`, as in vLLM); it is compiled and rendered in a thread. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from shmserve.http.errors import ApiError, bad_field
from shmserve.http.template import ChatTemplate, TemplateError

if TYPE_CHECKING:
    from shmserve.http.openai.schemas import ChatRequest

MOST_TEMPLATE_BYTES: Final = 64 * 1024
MOST_KEPT: Final = 32
"""Compiled templates that are kept, least recently used first to go; compiling one takes 5 to 50 ms."""


class RequestTemplates:
    """Of one front end."""

    def __init__(self, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._kept: OrderedDict[str, ChatTemplate] = OrderedDict()

    async def of(self, parsed: ChatRequest, *, is_trusted: bool) -> ChatTemplate:
        """The template that a request brings. Raises ApiError 400 with the template's own message if it cannot be compiled."""
        if "chat_template" in (parsed.chat_template_kwargs or {}):
            raise bad_field(
                "chat_template_kwargs",
                "chat_template_kwargs must not hold chat_template, which is a field of its own",
            )
        source = parsed.chat_template
        assert source is not None
        if not is_trusted:
            raise bad_field(
                "chat_template",
                "This server takes no chat templates from requests; it would if it were started with "
                "--trust-request-chat-template.",
            )
        size = len(source.encode())
        if size > MOST_TEMPLATE_BYTES:
            raise bad_field(
                "chat_template",
                f"chat_template may have at most {MOST_TEMPLATE_BYTES} bytes, got {size}",
            )
        if source in self._kept:
            self._kept.move_to_end(source)
            return self._kept[source]
        try:
            template = await asyncio.to_thread(
                ChatTemplate, source, self._special_tokens, is_foreign=True
            )
        except TemplateError as error:
            raise ApiError(400, str(error), param="chat_template", code="template_error") from None
        self._kept[source] = template
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return template
