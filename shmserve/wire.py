"""What the bytes in a slot mean: the one file that knows.

Owns: the record layouts of both rings, packing, unpacking, and merging of token records. Never: touches a ring. Little
endian, explicit offsets, checked by golden bytes in the tests. All times are CLOCK_MONOTONIC ns.

Token slot, 128 bytes (worker -> front end)

     0  req_id u8    8  time_ns u8 (first token's)   16  index u4 (of the first token in its completion)
    20  kind u1     21  count u1 (tokens or pairs)   22  finish u1      23  flags u1      24  step u8
    32  TOKENS:         token_ids i4[8], dt_us u4[8], logprobs f4[8]; dt_us[0] is the publish delay, dt_us[1:] are the later
                        tokens' times after the first
        PROMPT_LOGPROBS: as TOP_LOGPROBS, before the first TOKENS. With FLAG_RUN: one pair for each of the prompt's tokens from
                        `index` on. Without: token `index` of the prompt, then the most likely in its place, over as many
                        slots of this index as it takes
        TOP_LOGPROBS:   token_ids i4[12], logprobs f4[12]: the most likely tokens of position `index`; stands before the TOKENS
                        slot that closes its group
        STARTED/FINISH: prompt_tokens u4, cached_tokens u4, num_retractions u4, keep_bytes u4, matched_token i4,
                        matched_stop i4, received_ns u8, admitted_ns u8, scheduled_ns u8, prefill_end_ns u8, first_token_ns u8,
                        num_verified u4, num_drafts u4, num_accepted u4 (steps that verified guesses; those; of them right);
                        index = tokens generated so far
        MESSAGE:        count bytes of UTF-8 text (at most 96); stand before the FINISH that they explain

Submit slot, 4,096 bytes (front end -> worker)

     0  req_id u8    8  kind u1    9  flags u1   10  num_slots u2   12  length u4 (bytes of sections, over all slots)   16  time_ns u8
    24  SUBMIT: SUBMIT_DTYPE's fields; sections begin at 256: tag u2, zero u2, length u4, then the bytes, padded to 4
        CONTINUATION: bytes 8.. kind; 10 its number u2; sections go on at 16
        ABORT, PAUSE, RESUME: the request of req_id.  ABORT_BY_ID: 16-byte digest at 24 (zeros: all);
        answered by a FINISH under req_id, whose matched_token counts them.  FLUSH_CACHE: answered under req_id
        EVICT: the request of req_id, whosever it is, unless it was begun; ABORT_BY_ID with 8 zero bytes and a req_id: that one

req_id = generation << 24 | front end index << 16 | table slot: a stale record can never reach a new request.
Every SUBMIT is answered by exactly one FINISH, or by the channel's end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from shmserve.request import SamplingParams

TOKEN_SLOT_BYTES: Final = 128
SUBMIT_SLOT_BYTES: Final = 4096
TOKENS_PER_SLOT: Final = 8
PAIRS_PER_SLOT: Final = 12
MESSAGE_BYTES: Final = 96
KEEP_ALL: Final = 0xFFFF_FFFF

_SECTIONS_OFFSET: Final = 256
_CONTINUATION_OFFSET: Final = 16


class WireError(ValueError):
    """A record from the other side that cannot be: counted, and the request or the channel ends."""


class TokenKind(IntEnum):
    TOKENS = 1
    TOP_LOGPROBS = 2
    PROMPT_LOGPROBS = 3
    STARTED = 4
    FINISH = 5
    MESSAGE = 6
    READY = 7
    LOADING = 8


class SubmitKind(IntEnum):
    SUBMIT = 1
    CONTINUATION = 2
    ABORT = 3
    ABORT_BY_ID = 4
    PAUSE = 5
    RESUME = 6
    FLUSH_CACHE = 7
    EVICT = 8


class Section(IntEnum):
    PROMPT_IDS = 1
    STOP_STRING = 2
    STOP_IDS = 3
    STOP_REGEX = 4
    LOGIT_BIAS = 5
    ALLOWED_IDS = 6
    BAD_IDS = 7
    GRAMMAR = 8
    CACHE_SALT = 9
    DIGEST = 10
    SHOWN_IDS = 11


_ID_SECTIONS: Final = frozenset(
    (
        Section.PROMPT_IDS,
        Section.STOP_IDS,
        Section.ALLOWED_IDS,
        Section.BAD_IDS,
        Section.SHOWN_IDS,
    )
)

FLAG_LAST_IS_STOP: Final = 1
"""TOKENS: the last token ended the request (EOS or a stop id): it counts, and has no text."""

FLAG_RUN: Final = 1
"""PROMPT_LOGPROBS: each pair belongs to a token of its own, in the order of the prompt."""

SUBMIT_IGNORE_EOS: Final = 1
SUBMIT_INCLUDE_STOP: Final = 2
SUBMIT_SKIP_SPECIAL: Final = 4


def _token_dtype(
    names: Sequence[str], formats: Sequence[str], offsets: Sequence[int]
) -> np.dtype[np.void]:
    common = (
        ("req_id", "<u8", 0),
        ("time_ns", "<u8", 8),
        ("index", "<u4", 16),
        ("kind", "u1", 20),
        ("count", "u1", 21),
        ("finish", "u1", 22),
        ("flags", "u1", 23),
        ("step", "<u8", 24),
    )
    return np.dtype(
        {
            "names": [name for name, _, _ in common] + list(names),
            "formats": [fmt for _, fmt, _ in common] + list(formats),
            "offsets": [offset for _, _, offset in common] + list(offsets),
            "itemsize": TOKEN_SLOT_BYTES,
        }
    )


TOKENS_DTYPE: Final = _token_dtype(
    ("token_ids", "dt_us", "logprobs"), ("(8,)<i4", "(8,)<u4", "(8,)<f4"), (32, 64, 96)
)
TOP_DTYPE: Final = _token_dtype(("token_ids", "logprobs"), ("(12,)<i4", "(12,)<f4"), (32, 80))
FINISH_DTYPE: Final = _token_dtype(
    (
        "prompt_tokens", "cached_tokens", "num_retractions", "keep_bytes", "matched_token", "matched_stop",
        "received_ns", "admitted_ns", "scheduled_ns", "prefill_end_ns", "first_token_ns",
        "num_verified", "num_drafts", "num_accepted",
    ),
    ("<u4", "<u4", "<u4", "<u4", "<i4", "<i4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4"),
    (32, 36, 40, 44, 48, 52, 56, 64, 72, 80, 88, 96, 100, 104),
)  # fmt: skip

_TOKEN_HEAD = struct.Struct("<QQIBBBBQ")  # the common 32 bytes
_TIME_INDEX = struct.Struct("<QI")  # time_ns and index, at 8
_FINISH = struct.Struct("<QQIBBBBQIIIIiiQQQQQIII")


def pack_finish(
    kind: TokenKind,
    req_id: int,
    *,
    time_ns: int,
    step: int,
    finish: int = 0,
    completion_tokens: int = 0,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    num_retractions: int = 0,
    keep_bytes: int = KEEP_ALL,
    matched_token: int = -1,
    matched_stop: int = -1,
    stamps: Sequence[int] = (0, 0, 0, 0, 0),
    guesses: Sequence[int] = (0, 0, 0),
) -> bytes:
    """A FINISH or STARTED slot. `stamps`: received, admitted, first scheduled, prefill end, first token (ns; 0 if not yet).

    `guesses`: steps that verified some, how many those were, and how many of them were right.
    """
    head = _FINISH.pack(
        req_id, time_ns, completion_tokens, kind, 0, finish, 0, step, prompt_tokens, cached_tokens,
        num_retractions, keep_bytes, matched_token, matched_stop, *stamps, *guesses,
    )  # fmt: skip
    return head.ljust(TOKEN_SLOT_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class FinishRecord:
    """A FINISH or STARTED slot, unpacked. `completion_tokens` counts generated tokens, EOS included."""

    req_id: int
    time_ns: int
    finish: int
    step: int
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int
    keep_bytes: int
    matched_token: int
    matched_stop: int
    received_ns: int
    admitted_ns: int
    scheduled_ns: int
    prefill_end_ns: int
    first_token_ns: int
    num_verified: int
    num_drafts: int
    num_accepted: int


def unpack_finish(slot: bytes | memoryview) -> FinishRecord:
    f = _FINISH.unpack_from(slot)
    return FinishRecord(
        req_id=f[0], time_ns=f[1], finish=f[5], step=f[7], completion_tokens=f[2], prompt_tokens=f[8],
        cached_tokens=f[9], num_retractions=f[10], keep_bytes=f[11], matched_token=f[12], matched_stop=f[13],
        received_ns=f[14], admitted_ns=f[15], scheduled_ns=f[16], prefill_end_ns=f[17], first_token_ns=f[18],
        num_verified=f[19], num_drafts=f[20], num_accepted=f[21],
    )  # fmt: skip


def pack_message(req_id: int, text: str, *, time_ns: int, most_slots: int = 4) -> bytes:
    """MESSAGE slots that carry `text`, cut to `most_slots`; a character is never split between slots."""
    slots: list[bytes] = []
    rest = text
    while rest and len(slots) < most_slots:
        piece = rest.encode()[:MESSAGE_BYTES].decode(errors="ignore")
        rest = rest[len(piece) :]
        data = piece.encode()
        head = _TOKEN_HEAD.pack(req_id, time_ns, len(slots), TokenKind.MESSAGE, len(data), 0, 0, 0)
        slots.append((head + data).ljust(TOKEN_SLOT_BYTES, b"\0"))
    return b"".join(slots)


def unpack_message(slot: bytes | memoryview) -> str:
    count = slot[21]
    return bytes(slot[32 : 32 + min(count, MESSAGE_BYTES)]).decode(errors="replace")


def pack_top_logprobs(
    req_id: int,
    index: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    step: int,
) -> bytes:
    """TOP_LOGPROBS slots for one position: the most likely tokens, 12 pairs a slot."""
    num_slots = -(-len(ids) // PAIRS_PER_SLOT)
    out = np.zeros(num_slots, TOP_DTYPE)
    out["req_id"], out["index"], out["kind"], out["step"] = (
        req_id,
        index,
        TokenKind.TOP_LOGPROBS,
        step,
    )
    for i in range(num_slots):
        part = slice(i * PAIRS_PER_SLOT, (i + 1) * PAIRS_PER_SLOT)
        n = len(ids[part])
        out["count"][i] = n
        out["token_ids"][i, :n] = ids[part]
        out["logprobs"][i, :n] = logprobs[part]
    return out.tobytes()


def pack_prompt_logprobs(
    req_id: int,
    first_index: int,
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    step: int,
) -> bytes:
    """PROMPT_LOGPROBS slots of n tokens of a prompt from `first_index` on: [n, 1 + N], the token itself before the N most likely."""
    num_tokens, width = ids.shape
    is_run = width == 1
    if is_run:
        num_slots, counts = -(-num_tokens // PAIRS_PER_SLOT), np.array([num_tokens])
    else:
        each = -(-width // PAIRS_PER_SLOT)
        num_slots, counts = num_tokens * each, np.full(num_tokens, width)
    out = np.zeros(num_slots, TOP_DTYPE)
    out["req_id"], out["kind"], out["step"] = req_id, TokenKind.PROMPT_LOGPROBS, step
    out["flags"] = FLAG_RUN if is_run else 0
    slots = np.arange(num_slots)
    rows = len(counts)
    if not num_slots:
        return b""
    each = num_slots // rows
    at = slots % each * PAIRS_PER_SLOT
    out["index"] = first_index + (at if is_run else slots // each)
    out["count"] = np.minimum(PAIRS_PER_SLOT, counts[slots // each] - at)
    for name, values in (("token_ids", ids), ("logprobs", logprobs)):
        padded = np.zeros((rows, each * PAIRS_PER_SLOT), values.dtype)
        padded[:, : counts[0]] = values.reshape(rows, counts[0])
        out[name] = padded.reshape(num_slots, PAIRS_PER_SLOT)
    return out.tobytes()


def token_key(slot: memoryview | bytearray | bytes) -> int:
    """The req_id of any token slot."""
    return int.from_bytes(slot[:8], "little")


def weigh_tokens(slot: memoryview | bytearray) -> int:
    """Tokens in a token slot (0 for other kinds): the unit of --coalesce-tokens."""
    return slot[21] if slot[20] == TokenKind.TOKENS else 0


def stamp_publish(slots: bytearray, now_ns: int) -> None:
    """Store the publish delay in each TOKENS slot of `slots`, which are about to be written."""
    for at in range(0, len(slots), TOKEN_SLOT_BYTES):
        if slots[at + 20] == TokenKind.TOKENS:
            sampled = int.from_bytes(slots[at + 8 : at + 16], "little")
            delay = min(0xFFFF_FFFF, max(0, now_ns - sampled) // 1000)
            slots[at + 64 : at + 68] = delay.to_bytes(4, "little")


def fold_tokens(pending: bytearray, arriving: memoryview) -> bool:
    """Merge the TOKENS slot `arriving` into `pending`, which stands before it: ids, times (to 1 us) and logprobs are kept.

    False, and nothing is changed, if they are not two runs of one completion that follow each other and fit one slot.
    """
    kind = TokenKind.TOKENS
    if pending[20] != kind or arriving[20] != kind or pending[:8] != arriving[:8]:
        return False
    have, more = pending[21], arriving[21]
    if have + more > TOKENS_PER_SLOT or pending[22] or pending[23]:
        return False
    begin_ns, index = _TIME_INDEX.unpack_from(pending, 8)
    then_ns, then_index = _TIME_INDEX.unpack_from(arriving, 8)
    if index + have != then_index:
        return False
    after_us = (then_ns - begin_ns) // 1000
    # Bytes, not numpy: 3 us instead of 25, and a full ring folds a whole batch every step.
    times = [after_us]
    if more > 1:
        times += [after_us + dt for dt in struct.unpack_from(f"<{more - 1}I", arriving, 68)]
    if after_us < 0 or max(times) > 0xFFFF_FFFF:
        return False
    for column in (32, 96):
        pending[column + 4 * have : column + 4 * (have + more)] = arriving[
            column : column + 4 * more
        ]
    struct.pack_into(f"<{more}I", pending, 64 + 4 * have, *times)
    pending[21] = have + more
    pending[22:24] = arriving[22:24]
    return True


SUBMIT_DTYPE: Final = np.dtype(
    {
        "names": [
            "req_id", "kind", "flags", "num_slots", "length", "time_ns", "arrival_ns", "deadline_ns", "seed",
            "priority", "max_tokens", "min_tokens", "temperature", "top_p", "min_p", "top_k",
            "frequency_penalty", "presence_penalty", "repetition_penalty", "num_logprobs", "prompt_logprobs",
            "num_speculative_tokens",
        ],
        "formats": [
            "<u8", "u1", "u1", "<u2", "<u4", "<u8", "<u8", "<u8", "<u8",
            "<i4", "<u4", "<u4", "<f4", "<f4", "<f4", "<i4",
            "<f4", "<f4", "<f4", "<i4", "<i4", "<u4",
        ],
        "offsets": [0, 8, 9, 10, 12, 16, 24, 32, 40, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96],
        "itemsize": _SECTIONS_OFFSET,
    }
)  # fmt: skip
_SUBMIT = struct.Struct("<QBBHIQQQQiIIfffifffiiI")
_SUBMIT_HEAD = struct.Struct("<QBBHIQ")


@dataclass(frozen=True, slots=True)
class Submit:
    """A request as it crosses the ring. Times in ns; `deadline_ns` 0 is none; `digest` is of the client's own request id."""

    req_id: int
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    arrival_ns: int = 0
    submitted_ns: int = 0
    deadline_ns: int = 0
    cache_salt: bytes = b""
    digest: bytes = b""


def pack_submit(request: Submit) -> tuple[bytes, int]:
    """The slots of a SUBMIT and their number; they go into one publish."""
    p = request.params
    parts = [
        _section(Section.PROMPT_IDS, np.ascontiguousarray(request.prompt_ids, "<i4").tobytes())
    ]
    parts += [_section(Section.STOP_STRING, stop) for stop in p.stop]
    parts += [_section(Section.STOP_REGEX, pattern.encode()) for pattern in p.stop_regex]
    if p.stop_token_ids:
        parts.append(_section(Section.STOP_IDS, np.array(p.stop_token_ids, "<i4").tobytes()))
    if p.logit_bias:
        pairs = np.array(list(p.logit_bias), [("id", "<i4"), ("bias", "<f4")])
        parts.append(_section(Section.LOGIT_BIAS, pairs.tobytes()))
    if p.allowed_token_ids:
        parts.append(_section(Section.ALLOWED_IDS, np.array(p.allowed_token_ids, "<i4").tobytes()))
    parts += [_section(Section.BAD_IDS, np.array(word, "<i4").tobytes()) for word in p.bad_words]
    if p.shown_ids:
        parts.append(_section(Section.SHOWN_IDS, np.array(p.shown_ids, "<i4").tobytes()))
    if p.grammar:
        parts.append(_section(Section.GRAMMAR, p.grammar.encode()))
    if request.cache_salt:
        parts.append(_section(Section.CACHE_SALT, request.cache_salt))
    if request.digest:
        parts.append(_section(Section.DIGEST, request.digest))
    body = b"".join(parts)
    room = SUBMIT_SLOT_BYTES - _SECTIONS_OFFSET
    more = SUBMIT_SLOT_BYTES - _CONTINUATION_OFFSET
    num_slots = 1 + max(0, -(-(len(body) - room) // more))
    flags = (
        SUBMIT_IGNORE_EOS * p.ignore_eos
        | SUBMIT_INCLUDE_STOP * p.include_stop
        | SUBMIT_SKIP_SPECIAL * p.skip_special_tokens
    )
    if num_slots > 0xFFFF:
        raise WireError(f"a request of {num_slots} slots (at most 65535)")
    head = _SUBMIT.pack(
        request.req_id, SubmitKind.SUBMIT, flags, num_slots, len(body), request.submitted_ns,
        request.arrival_ns, request.deadline_ns, p.seed, p.priority, p.max_tokens, p.min_tokens,
        p.temperature, p.top_p, p.min_p, p.top_k, p.frequency_penalty, p.presence_penalty,
        p.repetition_penalty, p.num_logprobs, p.prompt_logprobs, p.num_speculative_tokens,
    )  # fmt: skip
    out = [head.ljust(_SECTIONS_OFFSET, b"\0") + body[:room]]
    for n in range(1, num_slots):
        start = room + (n - 1) * more
        front = _SUBMIT_HEAD.pack(request.req_id, SubmitKind.CONTINUATION, 0, n, 0, 0)[
            :_CONTINUATION_OFFSET
        ]
        out.append(front + body[start : start + more])
    out[-1] = out[-1].ljust(SUBMIT_SLOT_BYTES, b"\0")
    return b"".join(out), num_slots


def pack_control(kind: SubmitKind, req_id: int, *, time_ns: int, digest: bytes = b"") -> bytes:
    """One slot of ABORT, ABORT_BY_ID, PAUSE, RESUME, FLUSH_CACHE or EVICT."""
    head = _SUBMIT_HEAD.pack(req_id, kind, 0, 1, 0, time_ns)
    return (head + digest).ljust(SUBMIT_SLOT_BYTES, b"\0")


def digest_of_req_id(req_id: int) -> bytes:
    """A digest that stands for one sequence, of whichever front end: what ABORT_BY_ID carries for the id of an answer."""
    return bytes(8) + req_id.to_bytes(8, "big")


def req_id_of_digest(digest: bytes) -> int:
    """The sequence that a digest stands for; 0 if it stands for an id that a client gave."""
    return int.from_bytes(digest[8:], "big") if digest[:8] == bytes(8) else 0


def submit_head(slot: memoryview | bytes) -> tuple[int, int, int]:
    """(req_id, kind, num_slots) of a submit slot. Raises WireError for a kind that is none."""
    req_id, kind, _, num_slots, _, _ = _SUBMIT_HEAD.unpack_from(slot)
    if not SubmitKind.SUBMIT <= kind <= SubmitKind.EVICT:
        raise WireError(f"submit record of unknown kind {kind}")
    return req_id, kind, num_slots if kind == SubmitKind.SUBMIT else 1


@dataclass(frozen=True, slots=True)
class SubmitHead:
    """What a submit slot says of itself, without what the client sent. The last two are of a SUBMIT; -1 elsewhere."""

    req_id: int
    kind: int
    num_slots: int  # of a CONTINUATION: its number
    time_ns: int
    prompt_tokens: int = -1
    max_tokens: int = -1


def peek_submit(slot: memoryview | bytes) -> SubmitHead:
    """The head of any submit slot, also of one whose kind is none: for those who look on."""
    req_id, kind, _, num_slots, _, time_ns = _SUBMIT_HEAD.unpack_from(slot)
    if kind == SubmitKind.CONTINUATION:
        return SubmitHead(req_id, kind, num_slots, 0)
    if kind != SubmitKind.SUBMIT:
        return SubmitHead(req_id, kind, 1, time_ns)
    tag, _, size = struct.unpack_from("<HHI", slot, _SECTIONS_OFFSET)
    prompt_tokens = size // 4 if tag == Section.PROMPT_IDS else -1
    return SubmitHead(
        req_id, kind, num_slots, time_ns, prompt_tokens, _SUBMIT.unpack_from(slot)[10]
    )


def without_contents(slots: bytes) -> bytes:
    """Submit slots less what the client sent: nothing is left behind their heads, which `peek_submit` reads, but zeros."""
    rows = np.frombuffer(slots, np.uint8).reshape(-1, SUBMIT_SLOT_BYTES).copy()
    is_continuation = rows[:, 8] == SubmitKind.CONTINUATION
    rows[is_continuation, _CONTINUATION_OFFSET:] = 0
    rows[:, _SECTIONS_OFFSET + 8 :] = 0
    return rows.tobytes()


def control_digest(slot: memoryview | bytes) -> bytes:
    """The digest of an ABORT_BY_ID slot."""
    return bytes(slot[24:40])


def unpack_submit(slots: Sequence[memoryview | bytes]) -> Submit:
    """The request in the slots of one SUBMIT. Raises WireError if lengths do not add up or a section is misshapen."""
    f = _SUBMIT.unpack_from(slots[0])
    req_id, _, flags, num_slots, length = f[:5]
    if num_slots != len(slots):
        raise WireError(f"SUBMIT of {num_slots} slots came with {len(slots)}")
    body = bytes(slots[0][_SECTIONS_OFFSET:])
    if num_slots > 1:
        for n, slot in enumerate(slots[1:], 1):
            owner, kind, _, number, _, _ = _SUBMIT_HEAD.unpack_from(slot)
            if (owner, kind, number) != (req_id, SubmitKind.CONTINUATION, n):
                raise WireError(f"continuation {n} of SUBMIT {req_id:016x} is another's")
        body += b"".join(bytes(slot[_CONTINUATION_OFFSET:]) for slot in slots[1:])
    if length > len(body):
        raise WireError(f"SUBMIT says {length} bytes of sections, {len(body)} came")
    prompt = np.zeros(0, np.int32)
    stops: list[bytes] = []
    regexes: list[str] = []
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    shown_ids: tuple[int, ...] = ()
    bad_words: list[tuple[int, ...]] = []
    salt = digest = b""
    grammar = ""
    at = 0
    while at < length:
        if at + 8 > length:
            raise WireError("a section's head is cut short")
        tag, _, size = struct.unpack_from("<HHI", body, at)
        at += 8
        if at + size > length:
            raise WireError(f"section {tag} of {size} bytes passes the end")
        data = body[at : at + size]
        at += size + (-size % 4)
        if tag in _ID_SECTIONS and size % 4:
            raise WireError(f"section {tag} of {size} bytes holds no whole ids")
        if tag in (Section.ALLOWED_IDS, Section.BAD_IDS) and not size:
            raise WireError(f"section {tag} holds no ids, which would forbid everything")
        if tag == Section.PROMPT_IDS:
            prompt = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
        elif tag == Section.STOP_STRING:
            if not data:
                raise WireError("an empty stop string would match everywhere")
            stops.append(data)
        elif tag == Section.STOP_REGEX:
            try:
                regexes.append(data.decode())
            except UnicodeDecodeError:
                raise WireError("a stop regex is not UTF-8") from None
        elif tag == Section.STOP_IDS:
            stop_ids = tuple(np.frombuffer(data, "<i4").tolist())
        elif tag == Section.LOGIT_BIAS:
            if size % 8:
                raise WireError(f"logit_bias of {size} bytes holds no whole pairs")
            pairs = np.frombuffer(data, [("id", "<i4"), ("bias", "<f4")])
            bias = tuple(zip(pairs["id"].tolist(), pairs["bias"].tolist(), strict=True))
        elif tag == Section.SHOWN_IDS:
            shown_ids = tuple(np.frombuffer(data, "<i4").tolist())
        elif tag == Section.ALLOWED_IDS:
            allowed_ids = tuple(np.frombuffer(data, "<i4").tolist())
        elif tag == Section.BAD_IDS:
            bad_words.append(tuple(np.frombuffer(data, "<i4").tolist()))
        elif tag == Section.GRAMMAR:
            try:
                grammar = data.decode()
            except UnicodeDecodeError:
                raise WireError("the grammar is not UTF-8") from None
        elif tag == Section.CACHE_SALT:
            salt = data
        elif tag == Section.DIGEST:
            digest = data
        else:
            raise WireError(f"unknown section {tag}")
    params = SamplingParams(
        max_tokens=f[10], min_tokens=f[11], temperature=f[12], top_p=f[13], min_p=f[14], top_k=f[15],
        frequency_penalty=f[16], presence_penalty=f[17], repetition_penalty=f[18], num_logprobs=f[19],
        prompt_logprobs=f[20], num_speculative_tokens=f[21],
        seed=f[8], priority=f[9], stop=tuple(stops), stop_regex=tuple(regexes), stop_token_ids=stop_ids, logit_bias=bias,
        ignore_eos=bool(flags & SUBMIT_IGNORE_EOS), include_stop=bool(flags & SUBMIT_INCLUDE_STOP),
        skip_special_tokens=bool(flags & SUBMIT_SKIP_SPECIAL), allowed_token_ids=allowed_ids, shown_ids=shown_ids,
        bad_words=tuple(bad_words), grammar=grammar,
    )  # fmt: skip
    return Submit(
        req_id=req_id, prompt_ids=prompt, params=params, arrival_ns=f[6], submitted_ns=f[5],
        deadline_ns=f[7], cache_salt=salt, digest=digest,
    )  # fmt: skip


def _section(tag: Section, data: bytes) -> bytes:
    return struct.pack("<HHI", tag, 0, len(data)) + data + b"\0" * (-len(data) % 4)
