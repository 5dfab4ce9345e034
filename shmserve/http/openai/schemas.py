"""Request bodies of /v1/chat/completions and /v1/completions, as vLLM, SGLang and OpenAI clients send them.

Owns: names and types; ranges are `fields.py`'s, meaning is `chat.py`'s and `completions.py`'s. A field that stands here and is
not yet honoured is refused by name unless its value asks for nothing (`UNSUPPORTED_*`); a field that does not stand here is
ignored, and named in the response header X-Shmserve-Ignored.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timing: bool | None = None


class Drawn(msgspec.Struct, kw_only=True):
    """How tokens are drawn and when they end: fields that mean the same on every path, /generate included."""

    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    num_speculative_tokens: int | None = None


class Shared(Drawn, kw_only=True):
    """Fields that mean the same on every path of /v1."""

    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    timeout_ms: int | None = None
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    on_slow_client: str | None = None
    slow_client_bytes: int | None = None
    slow_client_seconds: float | None = None


class Beyond(Shared, kw_only=True):
    """Fields of chat completions that Responses and Messages lack in their inventors' hands, and have in ours, with the same meaning."""

    chat_template_kwargs: dict[str, Any] | None = None


class Sampling(Shared):
    """Fields that both endpoints have."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_timing: bool | None = None
    stop: str | list[str] | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    user: str | None = None
    rid: str | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Any = None
    structural_tag: Any = None
    return_hidden_states: bool | None = None

    @property
    def wants_timing(self) -> bool:
        """Asked for in the body, streamed or not, or in `stream_options`."""
        return bool(
            self.include_timing or (self.stream_options and self.stream_options.include_timing)
        )


class ChatRequest(Sampling):
    """`messages` are kept as JSON objects: the template reads them."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    # OpenAI's old form of tools.
    functions: list[Any] | None = None
    function_call: Any = None
    # Named, and not honoured.
    audio: Any = None
    modalities: list[str] | None = None
    echo: bool | None = None


class CompletionRequest(Sampling):
    """`prompt` is a string, token ids, or a list of either."""

    prompt: str | list[Any] | None = None  # checked by completions.py: msgspec has no such union
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | bool | None = None


_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "return_hidden_states": (None, False),
    "spaces_between_special_tokens": (None, False, True),
}

UNSUPPORTED_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    **_UNSUPPORTED,
    "audio": (None,),
    "modalities": (None, ["text"]),
    "echo": (None, False),
}

UNSUPPORTED_COMPLETION: Final[dict[str, tuple[Any, ...]]] = {
    **_UNSUPPORTED,
    "suffix": (None, ""),
}
