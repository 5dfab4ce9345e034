"""A request in the slots of one SUBMIT: fields in the first slot's head, all that has a length in sections behind it.

The front end packs, the worker unpacks and believes nothing: whatever does not add up is a WireError. Pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from shmserve.request import SamplingParams
from shmserve.wire.errors import WireError
from shmserve.wire.submit_slots import (
    CONTINUATION_OFFSET,
    SECTIONS_OFFSET,
    SUBMIT_FIELDS,
    SUBMIT_HEAD,
    SUBMIT_SLOT_BYTES,
    Section,
    SubmitKind,
)

SUBMIT_IGNORE_EOS: Final = 1
SUBMIT_INCLUDE_STOP: Final = 2
SUBMIT_SKIP_SPECIAL: Final = 4
_ID_SECTIONS: Final = frozenset(
    (
        Section.PROMPT_IDS,
        Section.STOP_IDS,
        Section.ALLOWED_IDS,
        Section.BAD_IDS,
        Section.SHOWN_IDS,
    )
)


class Submit(msgspec.Struct, frozen=True):
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
    room = SUBMIT_SLOT_BYTES - SECTIONS_OFFSET
    more = SUBMIT_SLOT_BYTES - CONTINUATION_OFFSET
    num_slots = 1 + max(0, -(-(len(body) - room) // more))
    flags = (
        SUBMIT_IGNORE_EOS * p.ignore_eos
        | SUBMIT_INCLUDE_STOP * p.include_stop
        | SUBMIT_SKIP_SPECIAL * p.skip_special_tokens
    )
    if num_slots > 0xFFFF:
        raise WireError(f"a request of {num_slots} slots (at most 65535)")
    head = SUBMIT_FIELDS.pack(
        request.req_id, SubmitKind.SUBMIT, flags, num_slots, len(body), request.submitted_ns,
        request.arrival_ns, request.deadline_ns, p.seed, p.priority, p.max_tokens, p.min_tokens,
        p.temperature, p.top_p, p.min_p, p.top_k, p.frequency_penalty, p.presence_penalty,
        p.repetition_penalty, p.num_logprobs, p.prompt_logprobs, p.num_speculative_tokens,
    )  # fmt: skip
    out = [head.ljust(SECTIONS_OFFSET, b"\0") + body[:room]]
    for n in range(1, num_slots):
        start = room + (n - 1) * more
        front = SUBMIT_HEAD.pack(request.req_id, SubmitKind.CONTINUATION, 0, n, 0, 0)[
            :CONTINUATION_OFFSET
        ]
        out.append(front + body[start : start + more])
    out[-1] = out[-1].ljust(SUBMIT_SLOT_BYTES, b"\0")
    return b"".join(out), num_slots


def unpack_submit(slots: Sequence[memoryview | bytes]) -> Submit:
    """The request in the slots of one SUBMIT. Raises WireError if lengths do not add up or a section is misshapen."""
    f = SUBMIT_FIELDS.unpack_from(slots[0])
    req_id, _, flags, num_slots, length = f[:5]
    if num_slots != len(slots):
        raise WireError(f"SUBMIT of {num_slots} slots came with {len(slots)}")
    body = bytes(slots[0][SECTIONS_OFFSET:])
    if num_slots > 1:
        for n, slot in enumerate(slots[1:], 1):
            owner, kind, _, number, _, _ = SUBMIT_HEAD.unpack_from(slot)
            if (owner, kind, number) != (req_id, SubmitKind.CONTINUATION, n):
                raise WireError(f"continuation {n} of SUBMIT {req_id:016x} is another's")
        body += b"".join(bytes(slot[CONTINUATION_OFFSET:]) for slot in slots[1:])
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
