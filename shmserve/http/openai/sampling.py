"""One mapping to SamplingParams for every API that speaks of chat: chat completions, completions, responses, messages.

Owns: it, and the way from a schema of another API to the chat request that says the same. So a field means the same everywhere,
and the server's defaults hold everywhere. Event loop's thread only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from shmserve.http import fields
from shmserve.http.errors import bad_field
from shmserve.http.generation import Wanted
from shmserve.http.openai.limits import Limits, limits_of
from shmserve.http.openai.schemas import Beyond, ChatRequest, CompletionRequest, Sampling
from shmserve.request import SamplingParams

if TYPE_CHECKING:
    from shmserve.http.chat import ChatPlan
    from shmserve.http.front_end import FrontEnd

_SHARED = ("temperature", "top_p", "top_k", *Beyond.__struct_fields__)


def take_sampling(chat: ChatRequest, parsed: Beyond) -> ChatRequest:
    """`chat`, with the sampling fields of another API's request under the names that both know."""
    for name in _SHARED:
        setattr(chat, name, getattr(parsed, name))
    return chat


def most_tokens(name: str, asked: int | None, room: int, default: int) -> int:
    """What may be generated: what was asked for, cut to what fits the context."""
    value: int = fields.in_range(name, asked, 1, 2**63 - 1, default)
    return min(value, room)


async def single_wanted(
    front: FrontEnd,
    chat: ChatRequest,
    plan: ChatPlan,
    *,
    most: tuple[str, int | None],
    prompt_name: str,
    stop_name: str = "stop",
) -> Wanted:
    """The completion of an API that has one; `most` is (name, value) of its limit of tokens. Raises ApiError 400."""
    ids = await front.tokenizer.encode(plan.prompt, add_bos=False)
    room = front.room_for(len(ids), prompt_name)
    limit = most_tokens(*most, room, room)
    limits = await limits_of(front.tokenizer, chat)
    (seed,) = fields.seeds(chat.seed, 1)
    params = sampling_of(front, chat, limit, -1, plan.grammar, limits, stop_name=stop_name)
    params = replace(params, seed=seed, shown_ids=plan.shows)
    return Wanted(ids, params, fields.cache_salt(chat.cache_salt))


def sampling_of(
    front: FrontEnd,
    parsed: Sampling,
    max_tokens: int,
    num_logprobs: int,
    grammar: str,
    limits: Limits,
    *,
    stop_name: str = "stop",
) -> SamplingParams:
    """All but the seed, which each choice has of its own. Raises ApiError 400 that names the field."""
    vocab_size = front.tokenizer.vocab_size
    return fields.sampling_params(
        max_tokens=max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        min_p=parsed.min_p,
        frequency_penalty=parsed.frequency_penalty,
        presence_penalty=parsed.presence_penalty,
        repetition_penalty=parsed.repetition_penalty,
        min_tokens=parsed.min_tokens,
        ignore_eos=parsed.ignore_eos,
        stop=fields.stop_strings(stop_name, parsed.stop),
        stop_regex=fields.stop_regexes("stop_regex", parsed.stop_regex),
        stop_token_ids=parsed.stop_token_ids,
        include_stop=parsed.include_stop_str_in_output or parsed.no_stop_trim,
        skip_special_tokens=parsed.skip_special_tokens,
        bias=fields.logit_bias(parsed.logit_bias, vocab_size),
        seed=0,
        num_logprobs=num_logprobs,
        prompt_logprobs=_num_prompt_logprobs(parsed, num_logprobs),
        allowed_token_ids=limits.allowed_token_ids,
        bad_words=limits.bad_words,
        grammar=grammar,
        num_speculative_tokens=fields.num_speculative_tokens(
            parsed.num_speculative_tokens, front.config.worker.num_speculative_tokens
        ),
        # vLLM's sign: lower runs earlier.
        priority=fields.in_range("priority", parsed.priority, -(2**31), 2**31 - 1, 0),
        vocab_size=vocab_size,
    )


def _num_prompt_logprobs(parsed: Sampling, num_logprobs: int) -> int:
    """The prompt's, for vLLM's field of that name and for an echo with logprobs."""
    asked = fields.num_logprobs("prompt_logprobs", parsed.prompt_logprobs)
    if asked >= 0 and parsed.stream:
        raise bad_field(
            "prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`."
        )
    is_echoed = isinstance(parsed, CompletionRequest) and bool(parsed.echo)
    return max(asked, num_logprobs if is_echoed else -1)
