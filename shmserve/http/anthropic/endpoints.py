"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same completions as chat.

Event loop's thread only.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from shmserve.http import fields
from shmserve.http.anthropic.formats import MessageChoice, MessageStream
from shmserve.http.anthropic.schemas import CountRequest, MessagesRequest, chat_request
from shmserve.http.chat import chat_prompt, plan_chat
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation import external_id_of
from shmserve.http.in_flight import InFlight
from shmserve.http.openai.endpoints import response_headers
from shmserve.http.openai.sampling import single_wanted
from shmserve.http.single import answer_single
from shmserve.http.slow_client import rules_of


async def messages(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, MessagesRequest, {})
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
    most = ("max_tokens", parsed.max_tokens)
    want = await single_wanted(
        front, chat, plan, most=most, prompt_name="messages", stop_name="stop_sequences"
    )
    rules = rules_of(front.config.http, parsed)
    headers = response_headers(request, parsed.request_id, ignored)

    def formats_of(entry: InFlight) -> tuple[MessageChoice, MessageStream]:
        splitter = plan.new_splitter() if plan.new_splitter is not None else None
        name = f"msg_{entry.req_id:016x}"
        return MessageChoice(name, front.served_name, want.params, entry, splitter), MessageStream()

    is_streamed = bool(parsed.stream)
    name = external_id_of(request, parsed.request_id)
    return await answer_single(front, request, want, name, headers, is_streamed, rules, formats_of)


async def count_tokens(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """The prompt tokens that /v1/messages would count for the same body."""
    parsed, _ = fields.decode(body, CountRequest, {})
    front.check_model(parsed.model)
    prompt = await chat_prompt(front, chat_request(parsed))
    ids = await front.tokenizer.encode(prompt, add_bos=False)
    return web.Response(
        body=msgspec.json.encode({"input_tokens": len(ids)}), content_type="application/json"
    )
