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
from shmserve.http.front_end import FrontEnd, Wanted
from shmserve.http.in_flight import InFlight
from shmserve.http.openai.endpoints import response_headers
from shmserve.http.single import answer_single


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
    headers = response_headers(request, parsed.request_id, ignored)

    def formats_of(entry: InFlight) -> tuple[MessageChoice, MessageStream]:
        splitter = chat.new_splitter() if chat.new_splitter is not None else None
        name = f"msg_{entry.req_id:016x}"
        return MessageChoice(name, front.served_name, params, entry, splitter), MessageStream()

    want = Wanted(ids, params, salt, chat.shows)
    return await answer_single(front, request, want, headers, bool(parsed.stream), formats_of)


async def count_tokens(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    """The prompt tokens that /v1/messages would count for the same body."""
    parsed, _ = fields.decode(body, CountRequest, {})
    front.check_model(parsed.model)
    prompt = await chat_prompt(front, chat_request(parsed))
    ids = await front.tokenizer.encode(prompt, add_bos=False)
    return web.Response(
        body=msgspec.json.encode({"input_tokens": len(ids)}), content_type="application/json"
    )
