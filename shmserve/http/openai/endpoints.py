"""POST /v1/chat/completions and /v1/completions.

Owns: the way from a parsed body to completions and their answer. Everything is validated before anything is submitted, so a
refusal is a real status, for streams too. Event loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web
from msgspec.structs import replace

from shmserve.http import fields
from shmserve.http.chat import plan_chat
from shmserve.http.choice import Choice
from shmserve.http.errors import ApiError, bad_field
from shmserve.http.front_end import FrontEnd
from shmserve.http.generation import (
    Generation,
    Wanted,
    choices_of,
    external_id_of,
    let_others_go,
)
from shmserve.http.interval import spaced
from shmserve.http.logprobs import TokenTexts
from shmserve.http.openai.choice import Extras, OpenAIChoice, Splitter, reasoning_tokens
from shmserve.http.openai.formats import Envelope, Kind, OpenAIStream, usage
from shmserve.http.openai.functions import functions_told, take_functions
from shmserve.http.openai.limits import limits_of
from shmserve.http.openai.sampling import most_tokens, sampling_of
from shmserve.http.openai.schemas import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    ChatRequest,
    CompletionRequest,
    Sampling,
)
from shmserve.http.slow_client import rules_of
from shmserve.http.stream import SseStream

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MOST_CHOICES = 128
MOST_PROMPTS = 1_024
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")


async def chat_completions(
    front: FrontEnd, request: web.Request, body: bytes
) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, ChatRequest, UNSUPPORTED_CHAT)
    front.check_model(parsed.model)
    n = fields.in_range("n", parsed.n, 1, MOST_CHOICES, 1)
    front.admit(
        request,
        n,
        priority=parsed.priority,
        timeout_ms=parsed.timeout_ms,
        rank=parsed.data_parallel_rank,
    )
    is_old_form = take_functions(parsed)
    chat = await plan_chat(front, parsed)
    ids = await front.tokenizer.encode(chat.prompt, add_bos=bool(parsed.add_special_tokens))
    room = front.room_for(len(ids), "messages")
    name = "max_completion_tokens" if parsed.max_completion_tokens is not None else "max_tokens"
    asked = getattr(parsed, name)
    limit = most_tokens(name, asked, room, room)
    limits = await limits_of(front.tokenizer, parsed)
    params = sampling_of(front, parsed, limit, _num_chat_logprobs(parsed), chat.grammar, limits)
    params = replace(params, shown_ids=chat.shows)
    salt = fields.cache_salt(parsed.cache_salt)
    wanted = choices_of(ids, params, fields.seeds(parsed.seed, n), salt, parsed.wants_timing)
    new_splitter, call_word = chat.new_splitter, "tool_calls"
    if is_old_form and new_splitter is not None:
        new_splitter, call_word = functions_told(new_splitter), "function_call"
    extras = [
        _extras(front, parsed, want, new_splitter=new_splitter, call_word=call_word)
        for want in wanted
    ]
    return await _answer(front, request, parsed, "chat", wanted, extras, n, ignored)


async def completions(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, CompletionRequest, UNSUPPORTED_COMPLETION)
    front.check_model(parsed.model)
    n = fields.in_range("n", parsed.n, 1, MOST_CHOICES, 1)
    prompts = prompts_of("prompt", parsed.prompt, front.tokenizer.vocab_size)
    front.admit(
        request,
        n * len(prompts),
        priority=parsed.priority,
        timeout_ms=parsed.timeout_ms,
        rank=parsed.data_parallel_rank,
        least_tokens=n * front.tokenizer.least_tokens(prompts),
    )
    add_bos = parsed.add_special_tokens is None or parsed.add_special_tokens
    num_logprobs = fields.num_logprobs("logprobs", parsed.logprobs)
    grammar = await front.grammars.wanted_by(parsed)
    limits = await limits_of(front.tokenizer, parsed)
    salt = fields.cache_salt(parsed.cache_salt)
    wanted: list[Wanted] = []
    extras: list[Extras] = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(prompt, str):
            prompt = await front.tokenizer.encode(prompt, add_bos=add_bos)
        room = front.room_for(len(prompt), "prompt")
        limit = most_tokens("max_tokens", parsed.max_tokens, room, COMPLETION_MAX_TOKENS)
        params = sampling_of(front, parsed, limit, num_logprobs, grammar, limits)
        # The same streams for every prompt: a prompt alone gives what it gives in a list.
        seeds = fields.seeds(parsed.seed, n)
        choices = choices_of(prompt, params, seeds, salt, parsed.wants_timing)
        echo = (text or front.tokenizer.decode(prompt)) if parsed.echo else ""
        extras += [_extras(front, parsed, want, echo) for want in choices]
        wanted += choices
        await let_others_go(len(wanted), n)
    return await _answer(front, request, parsed, "completion", wanted, extras, n, ignored)


def prompts_of(
    name: str, value: str | list[Any] | None, vocab_size: int
) -> list[str | npt.NDArray[np.int32]]:
    """A string, ids, or a list of either, as a list of prompts. 400 for anything empty or mixed."""
    if value is None or value == "" or value == []:
        raise ApiError(400, f"{name} must not be empty", param=name, code="empty_prompt")
    if isinstance(value, str):
        return [value]
    if set(map(type, value)) == {int}:
        return [_ids(name, value, vocab_size)]
    if len(value) > MOST_PROMPTS:
        raise bad_field(name, f"{name} may hold at most {MOST_PROMPTS} prompts, got {len(value)}")
    prompts: list[str | npt.NDArray[np.int32]] = []
    for i, item in enumerate(value):
        if isinstance(item, str) and item:
            prompts.append(item)
        elif isinstance(item, list) and set(map(type, item)) == {int}:
            prompts.append(_ids(f"{name}[{i}]", item, vocab_size))
        else:
            raise bad_field(
                name, f"{name}[{i}] must be a string or a list of token ids, and not empty"
            )
    return prompts


def _ids(name: str, ids: list[int], vocab_size: int) -> npt.NDArray[np.int32]:
    try:
        found = np.array(ids, np.int32)
        are_known = found.min() >= 0 and found.max() < vocab_size
    except OverflowError:
        are_known = False
    if not are_known:
        fields.token_ids(name, ids, vocab_size)  # names the first one that is not
    return found


def _num_chat_logprobs(parsed: ChatRequest) -> int:
    """-1 for none, else how many of the most likely tokens are wanted beside the chosen one."""
    top = fields.num_logprobs("top_logprobs", parsed.top_logprobs)
    if parsed.logprobs:
        return max(0, top)
    if top > 0:
        raise bad_field(
            "top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true."
        )
    return -1


def _extras(
    front: FrontEnd,
    parsed: Sampling,
    want: Wanted,
    echo: str = "",
    new_splitter: Callable[[], Splitter] | None = None,
    call_word: str = "tool_calls",
) -> Extras:
    """What this request wants of a choice beside its text."""
    tokenizer = front.tokenizer
    pieces = tokenizer.pieces_for(want.params.skip_special_tokens)
    has_logprobs = want.params.num_logprobs >= 0
    has_scores = parsed.prompt_logprobs is not None
    options = parsed.stream_options
    ids: tuple[int, ...] = ()
    if want.params.prompt_logprobs >= 0 or parsed.return_token_ids:
        ids = tuple(want.prompt_ids.tolist())
    return Extras(
        names=TokenTexts(tokenizer.pieces_with_special, tokenizer.pieces_with_special)
        if has_scores
        else None,
        texts=TokenTexts(pieces, tokenizer.pieces_with_special) if has_logprobs else None,
        num_top=max(0, want.params.num_logprobs),
        with_token_ids=bool(parsed.return_token_ids),
        with_usage=bool(options and options.continuous_usage_stats),
        with_timing=want.is_timed,
        prompt_ids=ids if parsed.return_token_ids else (),
        echo_ids=ids if echo and has_logprobs else (),
        scored_ids=ids if has_scores else (),
        num_prompt_tokens=len(want.prompt_ids),
        echo=echo,
        new_splitter=new_splitter,
        call_word=call_word,
    )


async def _answer(
    front: FrontEnd,
    request: web.Request,
    parsed: Sampling,
    kind: Kind,
    wanted: list[Wanted],
    extras: list[Extras],
    n: int,
    ignored: list[str],
) -> web.StreamResponse:
    if parsed.stream_options is not None and not parsed.stream:
        raise ApiError(
            400,
            "Stream options can only be defined when `stream=True`.",
            param="stream_options",
            code="invalid_value",
        )
    interval = fields.in_range("stream_interval", parsed.stream_interval, 1, 2**31 - 1, 1)
    rules = rules_of(front.config.http, parsed)
    named = parsed.request_id or parsed.rid
    headers = response_headers(request, named, ignored)
    eos_ids = front.model.eos_token_ids
    async with Generation(front, request, wanted, external_id_of(request, named)) as generation:
        envelope = Envelope.of(kind, front.served_name, generation.entries[0])
        formats = [
            OpenAIChoice(envelope, i, want.params, eos_ids, more).attach(entry)
            for i, (entry, want, more) in enumerate(
                zip(generation.entries, wanted, extras, strict=True)
            )
        ]
        if parsed.stream:
            choices = [
                Choice(
                    entry,
                    generation.text_stream(i),
                    generation.pieces(i),
                    spaced(fmt, interval, front.config.http.stream_interval),
                )
                for i, (entry, fmt) in enumerate(zip(generation.entries, formats, strict=True))
            ]
            include_usage = bool(parsed.stream_options and parsed.stream_options.include_usage)
            stream = SseStream(
                request,
                front,
                rules,
                generation.signal,
                choices,
                OpenAIStream(envelope, n, include_usage, lambda: reasoning_tokens(formats)),
                headers,
            )
            return await stream.run()
        await generation.finish()
        objects = [
            fmt.whole(generation.parts_of(i), entry)
            for i, (entry, fmt) in enumerate(zip(generation.entries, formats, strict=True))
        ]
        whole = envelope.whole(objects, usage(generation.entries, n, reasoning_tokens(formats)))
        if kind == "chat":  # of the one prompt: vLLM has them beside the choices, too
            whole |= {name: objects[0][name] for name in OF_PROMPT if name in objects[0]}
    return web.Response(
        body=msgspec.json.encode(whole), content_type="application/json", headers=headers
    )


def response_headers(
    request: web.Request, request_id: str | None, ignored: list[str]
) -> dict[str, str]:
    """X-Request-Id, taken from the body or the header and given back if a header can hold it; the names of fields that were ignored."""
    headers = {}
    name = external_id_of(request, request_id)
    if name and name.isprintable() and name.isascii() and len(name) <= 256:
        headers["X-Request-Id"] = name
    if ignored:
        names = ", ".join(field for field in ignored if field.isascii() and field.isprintable())
        headers["X-Shmserve-Ignored"] = names[:1_000]
    return headers
