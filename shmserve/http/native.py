"""POST /generate: SGLang's native interface.

Owns: its schema and its way to completions (native_answer.py: what they look like). Streams carry the cumulative text and ids in every frame (SGLang's contract: a
stream of n tokens costs n^2 / 2 of them in bytes), or only what is new with `incremental: true`. Event loop's thread only.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web
from msgspec.structs import replace

from shmserve.http import fields
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
from shmserve.http.native_answer import NativeAnswer
from shmserve.http.openai.endpoints import MOST_CHOICES, prompts_of, response_headers
from shmserve.http.openai.formats import DoneStream
from shmserve.http.openai.schemas import Drawn
from shmserve.http.slow_client import rules_of
from shmserve.http.stream import SseStream
from shmserve.request import SamplingParams

MAX_NEW_TOKENS: Final = 128  # SGLang's default


class NativeSampling(Drawn):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    stream_interval: int | None = None
    # Named, and not honoured.
    beam_width: int | None = None
    spaces_between_special_tokens: bool | None = None
    custom_params: Any = None


class GenerateRequest(msgspec.Struct):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | list[Any] | None = None
    stream: bool | None = None
    incremental: bool | None = None
    rid: str | list[str] | None = None
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    # Declared once more in openai/schemas.py: a struct has one base, and there it is the one of the sampling fields.
    priority: int | None = None
    timeout_ms: int | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    on_slow_client: str | None = None
    slow_client_bytes: int | None = None
    slow_client_seconds: float | None = None
    # Named, and not yet honoured.
    input_embeds: Any = None
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: str | None = None
    extra_key: str | None = None


_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "input_embeds": (None,),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (None, False),
    "image_data": (None,),
    "video_data": (None,),
    "audio_data": (None,),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "extra_key": (None, ""),
}
_UNSUPPORTED_SAMPLING: Final[dict[str, tuple[Any, ...]]] = {
    "beam_width": (None, 0, 1),
    "spaces_between_special_tokens": (None, False, True),
    "custom_params": (None,),
}


async def generate(front: FrontEnd, request: web.Request, body: bytes) -> web.StreamResponse:
    parsed, ignored = fields.decode(body, GenerateRequest, _UNSUPPORTED)
    front.check_model(parsed.model)
    if (parsed.text is None) == (parsed.input_ids is None):
        raise ApiError(
            400,
            "exactly one of text and input_ids must be given",
            param="text",
            code="invalid_value",
        )
    name = "text" if parsed.text is not None else "input_ids"
    value = parsed.text if parsed.text is not None else parsed.input_ids
    prompts = prompts_of(name, value, front.tokenizer.vocab_size)
    is_batch = isinstance(parsed.text, list) or (
        parsed.input_ids is not None and isinstance(parsed.input_ids[0], list)
    )
    samplings = _samplings(parsed.sampling_params, len(prompts))
    rids = _rids(parsed.rid, len(prompts))
    num_logprobs = -1
    if parsed.return_logprob:
        num_logprobs = max(0, fields.num_logprobs("top_logprobs_num", parsed.top_logprobs_num))
    start = fields.in_range("logprob_start_len", parsed.logprob_start_len, -1, 2**31 - 1, -1)
    scores_prompt = num_logprobs >= 0 and start >= 0
    # SGLang's sign: higher runs earlier.
    priority = -fields.in_range("priority", parsed.priority, -(2**31) + 1, 2**31 - 1, 0)
    salt = fields.cache_salt(parsed.cache_salt)
    rules = rules_of(front.config.http, parsed)
    front.admit(
        request,
        sum(sampling.n or 1 for sampling in samplings),
        priority=priority,
        timeout_ms=parsed.timeout_ms,
        rank=parsed.data_parallel_rank,
        least_tokens=front.tokenizer.least_tokens(prompts),
    )
    wanted: list[Wanted] = []
    for prompt, sampling, rid in zip(prompts, samplings, rids, strict=True):
        if isinstance(prompt, str):
            prompt = await front.tokenizer.encode(prompt, add_bos=True)
        room = front.room_for(len(prompt), name)
        n = fields.in_range("sampling_params.n", sampling.n, 1, MOST_CHOICES, 1)
        is_batch = is_batch or n > 1
        seed = sampling.sampling_seed if sampling.sampling_seed is not None else sampling.seed
        params = replace(
            _params(front, sampling, room),
            num_logprobs=num_logprobs,
            prompt_logprobs=num_logprobs if scores_prompt else -1,
            priority=priority,
            grammar=await front.grammars.wanted_by(sampling),
        )
        seeds = fields.seeds(seed, n)
        wanted += choices_of(prompt, params, seeds, salt, is_timed=True, external_id=rid)
        await let_others_go(len(wanted), n)
    interval = max(
        fields.in_range("stream_interval", s.stream_interval, 1, 2**31 - 1, 1) for s in samplings
    )
    named = parsed.rid if isinstance(parsed.rid, str) else None
    headers = response_headers(request, named, ignored)
    async with Generation(front, request, wanted, external_id_of(request, named)) as generation:
        answers = [
            NativeAnswer(
                entry,
                want.params,
                index if is_batch else None,
                want.external_id,
                bool(parsed.incremental),
                TokenTexts(front.tokenizer.pieces_with_special, front.tokenizer.pieces_with_special)
                if parsed.return_text_in_logprobs
                else None,
                want.prompt_ids.tolist() if scores_prompt else [],
                start,
            )
            for index, (entry, want) in enumerate(zip(generation.entries, wanted, strict=True))
        ]
        if parsed.stream:
            choices = [
                Choice(
                    entry,
                    generation.text_stream(i),
                    front.tokenizer.pieces_for(want.params.skip_special_tokens),
                    spaced(answer, interval, front.config.http.stream_interval),
                )
                for i, (entry, want, answer) in enumerate(
                    zip(generation.entries, wanted, answers, strict=True)
                )
            ]
            stream = SseStream(
                request,
                front,
                rules,
                generation.signal,
                choices,
                DoneStream(),
                headers,
            )
            return await stream.run()
        await generation.finish()
        objects = []
        for i, (entry, answer) in enumerate(zip(generation.entries, answers, strict=True)):
            objects.append(answer.whole(generation.text_of(i), entry.token_ids))
    return web.Response(
        body=msgspec.json.encode(objects if is_batch else objects[0]),
        content_type="application/json",
        headers=headers,
    )


def _rids(value: str | list[str] | None, num_prompts: int) -> list[str]:
    """Its client's name of each prompt's answers: one for all, or one each."""
    if not isinstance(value, list):
        return [value or ""] * num_prompts
    if len(value) != num_prompts:
        raise bad_field("rid", f"rid holds {len(value)} ids for {num_prompts} prompts")
    return value


def _samplings(value: NativeSampling | list[Any] | None, num_prompts: int) -> list[NativeSampling]:
    if not isinstance(value, list):
        samplings = [value or NativeSampling()] * num_prompts
    else:
        if len(value) != num_prompts:
            raise bad_field(
                "sampling_params",
                f"{len(value)} sampling_params were given for {num_prompts} prompts",
            )
        try:
            samplings = msgspec.convert(value, list[NativeSampling])
        except msgspec.ValidationError as error:
            raise bad_field("sampling_params", f"sampling_params: {error}") from None
    for sampling in samplings:
        fields.refuse_unsupported(sampling, NativeSampling.__struct_fields__, _UNSUPPORTED_SAMPLING)
    return samplings


def _params(front: FrontEnd, sampling: NativeSampling, room: int) -> SamplingParams:
    asked = fields.in_range("max_new_tokens", sampling.max_new_tokens, 1, 2**63 - 1, MAX_NEW_TOKENS)
    vocab_size = front.tokenizer.vocab_size
    least = sampling.min_new_tokens if sampling.min_new_tokens is not None else sampling.min_tokens
    return fields.sampling_params(
        max_tokens=min(asked, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=least,
        ignore_eos=sampling.ignore_eos,
        stop=fields.stop_strings("stop", sampling.stop),
        stop_regex=fields.stop_regexes("stop_regex", sampling.stop_regex),
        stop_token_ids=sampling.stop_token_ids,
        include_stop=sampling.no_stop_trim,
        skip_special_tokens=sampling.skip_special_tokens,
        bias=fields.logit_bias(sampling.logit_bias, vocab_size),
        num_speculative_tokens=fields.num_speculative_tokens(
            sampling.num_speculative_tokens, front.config.worker.num_speculative_tokens
        ),
        seed=0,
        vocab_size=vocab_size,
        min_tokens_name="min_new_tokens",
    )
