"""Reading request bodies: JSON to schema, with errors that name the field; and the fields that all endpoints share.

Owns: the way from bytes to a validated schema, and the ranges of sampling fields. Never: fills in a value that a client did not
send and then complains about it. Pure functions; front end only.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from shmserve.http.errors import ApiError, bad_field
from shmserve.request import MOST_LOGPROBS, MOST_SPECULATIVE_TOKENS, SamplingParams
from shmserve.stop_regex import MOST_PATTERNS, StopRegexError, compile_stop

T = TypeVar("T", bound=msgspec.Struct)

MOST_STOPS: Final = 32
MOST_STOP_BYTES: Final = 1_024
MOST_SALT_CHARACTERS: Final = 128  # vLLM's bound
GREEDY_BELOW: Final = 1e-5
LEAST_REPETITION: Final = 1e-6  # "above 0" for a float32 that divides logits
_MASK: Final = (1 << 64) - 1

_AT = re.compile(r" - at `\$\.?([^`]*)`$")


def decode(
    body: bytes, schema: type[T], unsupported: Mapping[str, tuple[Any, ...]]
) -> tuple[T, list[str]]:
    """The body as `schema`, and the names of the fields that it does not know. Raises ApiError 400.

    Duplicate keys: the last one wins, for validation and use alike. `unsupported` is as for `refuse_unsupported`.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    try:
        parsed = msgspec.convert(raw, schema)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT.search(text)
        path = at.group(1) if at else None
        message = text[: at.start()] if at else text
        if path is None and (missing := re.search(r"field `([^`]*)`", text)):
            path = missing.group(1)
        raise ApiError(
            400, f"{path or 'body'}: {message}", param=path or None, code="invalid_type"
        ) from None
    except RecursionError:
        raise ApiError(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    refuse_unsupported(parsed, raw, unsupported)
    known = _fields_of(schema)
    return parsed, sorted([name for name in raw if name not in known])


@functools.cache
def _fields_of(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_fields__)


def in_range(
    name: str,
    value: float | int | None,
    low: float,
    high: float,
    default: Any,
) -> Any:
    """`value`, or `default` where it is null; 400 outside [low, high]."""
    if value is None:
        return default
    if not low <= value <= high:
        most = " or more" if high >= 2**63 - 1 else f" to {_bound(high)}"
        raise bad_field(name, f"{name} must be {_bound(low)}{most}, got {value}")
    return value


def _bound(value: float | int) -> str:
    """A bound for people: whole numbers with all their digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def stop_strings(name: str, value: str | Sequence[str] | None) -> tuple[bytes, ...]:
    """One string and a list of one mean the same; an empty one would match everywhere and is refused."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else list(value)
    if len(stops) > MOST_STOPS:
        raise bad_field(name, f"{name} may hold at most {MOST_STOPS} strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise bad_field(name, f"{name} must not hold an empty string")
        if len(stop.encode()) > MOST_STOP_BYTES:
            raise bad_field(name, f"a string in {name} may have at most {MOST_STOP_BYTES} bytes")
    return tuple(stop.encode() for stop in dict.fromkeys(stops))


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """400, naming the id, for one outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise bad_field(name, f"token id {token_id} in {name} is not in 0 to {vocab_size - 1}")


def logit_bias(value: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """OpenAI's range: -100 to 100; keys are token ids as strings."""
    pairs = []
    for key, bias in (value or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", key) or int(key) >= vocab_size:
            raise bad_field(
                "logit_bias", f"logit_bias key {key[:40]!r} is no token id in 0 to {vocab_size - 1}"
            )
        pairs.append((int(key), float(in_range(f"logit_bias[{key}]", bias, -100, 100, 0.0))))
    if len({token_id for token_id, _ in pairs}) != len(pairs):
        raise bad_field("logit_bias", "logit_bias names a token id twice")
    return tuple(pairs)


def num_logprobs(name: str, value: int | bool | None) -> int:
    """How many of the most likely tokens are wanted beside the chosen one; -1 for no logprobs at all."""
    if value is None or value is False:
        return -1
    return int(in_range(name, int(value), 0, MOST_LOGPROBS, -1))


def num_speculative_tokens(value: int | None, default: int) -> int:
    """How many tokens may be guessed in a step; `default` is the server's. It changes no token: a runner that cannot, does not."""
    name = "num_speculative_tokens"
    return int(in_range(name, value, 0, MOST_SPECULATIVE_TOKENS, default))


def cache_salt(value: str | None) -> bytes:
    """What keeps a request's cached prefixes apart from those of other salts; the empty one is everybody's."""
    if value is not None and len(value) > MOST_SALT_CHARACTERS:
        raise bad_field(
            "cache_salt", f"cache_salt may have at most {MOST_SALT_CHARACTERS} characters"
        )
    return (value or "").encode()


def seeds(seed: int | None, n: int) -> list[int]:
    """A stream for each of `n` choices: the first is the seed itself; without a seed they are random."""
    first = secrets.randbits(64) if seed is None else seed & _MASK
    return [first if i == 0 else _mixed(first, i) for i in range(n)]


def _mixed(seed: int, index: int) -> int:
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def stop_regexes(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Checked and compiled: the worker meets none that it could not match."""
    patterns = (value,) if isinstance(value, str) and value else tuple(value or ())
    if len(patterns) > MOST_PATTERNS:
        raise bad_field(name, f"{name} may hold at most {MOST_PATTERNS}, got {len(patterns)}")
    for pattern in patterns:
        try:
            compile_stop(pattern)
        except StopRegexError as error:
            raise bad_field(name, f"{name} {pattern[:64]!r} {error}") from None
    return patterns


def sampling_params(
    *,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    min_tokens: int | None,
    ignore_eos: bool | None,
    stop: tuple[bytes, ...],
    stop_regex: tuple[str, ...] = (),
    stop_token_ids: Sequence[int] | None,
    include_stop: bool | None,
    skip_special_tokens: bool | None,
    bias: tuple[tuple[int, float], ...],
    seed: int,
    num_logprobs: int = -1,
    prompt_logprobs: int = -1,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    priority: int = 0,
    allowed_token_ids: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    num_speculative_tokens: int = 0,
    vocab_size: int,
    min_tokens_name: str = "min_tokens",
) -> SamplingParams:
    """The fields that every endpoint has, checked. `max_tokens` is resolved already: the message is the endpoint's."""
    heat = in_range("temperature", temperature, 0, 1e6, 1.0)
    k = in_range("top_k", top_k, -1, 2**31 - 1, 0)
    stop_ids = tuple(stop_token_ids or ())
    token_ids("stop_token_ids", stop_ids, vocab_size)
    if len(stop_ids) > 128:
        raise bad_field(
            "stop_token_ids", f"stop_token_ids may hold at most 128 ids, got {len(stop_ids)}"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if heat < GREEDY_BELOW else heat,
        top_p=in_range("top_p", top_p, 0, 1, 1.0),
        top_k=max(0, k),
        frequency_penalty=in_range("frequency_penalty", frequency_penalty, -2, 2, 0.0),
        presence_penalty=in_range("presence_penalty", presence_penalty, -2, 2, 0.0),
        repetition_penalty=in_range(
            "repetition_penalty", repetition_penalty, LEAST_REPETITION, 1 / LEAST_REPETITION, 1.0
        ),
        min_p=in_range("min_p", min_p, 0, 1, 0.0),
        min_tokens=min(max_tokens, in_range(min_tokens_name, min_tokens, 0, 2**31 - 1, 0)),
        ignore_eos=bool(ignore_eos),
        stop=stop,
        stop_regex=stop_regex,
        stop_token_ids=stop_ids,
        include_stop=bool(include_stop),
        skip_special_tokens=skip_special_tokens is None or skip_special_tokens,
        logit_bias=bias,
        seed=seed,
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=priority,
        allowed_token_ids=allowed_token_ids,
        bad_words=bad_words,
        grammar=grammar,
        num_speculative_tokens=num_speculative_tokens,
    )


def refuse_unsupported(
    request: msgspec.Struct, sent: Iterable[str], unsupported: Mapping[str, tuple[Any, ...]]
) -> None:
    """400 for a named field that we cannot honour, when its value is not one that asks for nothing.

    `sent` holds the names that the client used; `unsupported` the harmless values of each such field.
    """
    for name in sent:
        harmless = unsupported.get(name)
        if harmless is None:
            continue
        value = getattr(request, name)
        # By type too: logprobs 0 asks for something, logprobs false does not.
        if not any(type(value) is type(nothing) and value == nothing for nothing in harmless):
            raise ApiError(
                400,
                f"{name} is not supported by this server (only {harmless[-1]!r} is accepted)",
                param=name,
                code="unsupported_parameter",
            )
