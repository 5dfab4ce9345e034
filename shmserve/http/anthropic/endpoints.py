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
from shmserve.http.front_end import FrontEnd, Generation, Wanted
from shmserve.http.openai.endpoints import response_headers
from shmserve.http.stream import Choice, SseStream


async def messages(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, MessagesRequest, {})
    front.check_model(parsed.model)
    front.admission.admit(1)
    chat = await plan_chat(front, chat_request(parsed))
    ids = await front.tokenizer.encode(chat.prompt, add_bos=False)
    room = front.room_for(len(ids), "messages")
    limit = fields.in_range("max_tokens", parsed.max_tokens, 1, 2**63 - 1, room)
    vocab_size = front.tokenizer.vocab_size
    (seed,) = fields.seeds(parsed.seed, 1)
    params = fields.sampling_params(
        max_tokens=min(limit, room),
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        min_p=None,
        min_tokens=None,
        ignore_eos=parsed.ignore_eos,
        stop=fields.stop_strings("stop_sequences", parsed.stop_sequences),
        stop_token_ids=None,
        include_stop=False,
        skip_special_tokens=True,
        bias=fields.logit_bias(parsed.logit_bias, vocab_size),
        seed=seed,
        grammar=chat.grammar,
        num_speculative_tokens=front.config.worker.num_speculative_tokens,
        priority=fields.in_range("priority", parsed.priority, -(2**31), 2**31 - 1, 0),
        vocab_size=vocab_size,
    )
    salt = fields.cache_salt(parsed.cache_salt)
    wanted = [Wanted(ids, params, salt, chat.shows)]
    headers = response_headers(request, parsed.request_id, ignored)
    async with Generation(front, request, wanted, headers.get("X-Request-Id", "")) as generation:
        (entry,) = generation.entries
        splitter = chat.new_splitter() if chat.new_splitter is not None else None
        message = MessageChoice(
            f"msg_{entry.req_id:016x}", front.served_name, params, entry, splitter
        )
        if parsed.stream:
            choice = Choice(entry, generation.text_stream(0), generation.pieces(0), message)
            stream = SseStream(
                request,
                front.client,
                front.config.http,
                front.turnstile,
                generation.signal,
                [choice],
                MessageStream(),
                headers,
            )
            return await stream.run()
        await generation.finish()
        whole = message.whole(generation.parts_of(0))
    return web.Response(
        body=msgspec.json.encode(whole), content_type="application/json", headers=headers
    )


async def count_tokens(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """The prompt tokens that /v1/messages would count for the same body."""
    parsed, _ = fields.decode(body, CountRequest, {})
    front.check_model(parsed.model)
    prompt = await chat_prompt(front, chat_request(parsed))
    ids = await front.tokenizer.encode(prompt, add_bos=False)
    return web.Response(
        body=msgspec.json.encode({"input_tokens": len(ids)}), content_type="application/json"
    )
