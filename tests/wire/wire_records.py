"""Records as both sides make them, and the bytes that they must be: for the tests of this folder."""

import numpy as np
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.wire.submit import Submit
from shmserve.wire.submit_slots import SUBMIT_SLOT_BYTES
from shmserve.wire.tokens import TOKENS_DTYPE, TokenKind

REQ_ID = 0x0102030405060708


TIME_NS = 0x1112131415161718


STEP = 0x2122232425262728


i4 = st.integers(-(2**31), 2**31 - 1)


u4 = st.integers(0, 2**32 - 1)


u8 = st.integers(0, 2**64 - 1)


def tokens_record(
    ids, *, req_id=REQ_ID, index=0, time_ns=TIME_NS, dt_us=None, logprobs=None, flags=0, finish=0
) -> bytearray:
    """A TOKENS slot as the worker makes it."""
    record = np.zeros(1, TOKENS_DTYPE)
    record["req_id"], record["time_ns"], record["index"], record["step"] = (
        req_id,
        time_ns,
        index,
        STEP,
    )
    record["kind"], record["count"] = TokenKind.TOKENS, len(ids)
    record["flags"], record["finish"] = flags, finish
    record["token_ids"][0, : len(ids)] = ids
    record["dt_us"][0, : len(ids)] = dt_us or [0] * len(ids)
    record["logprobs"][0, : len(ids)] = logprobs or [0.0] * len(ids)
    return bytearray(record.tobytes())


def golden(*lines: str) -> bytes:
    """128 bytes from commented hex; the rest is zero."""
    return bytes.fromhex("".join(line.split("#")[0] for line in lines)).ljust(128, b"\0")


def slots_of(data: bytes) -> list[bytes]:
    assert len(data) % SUBMIT_SLOT_BYTES == 0
    return [data[at : at + SUBMIT_SLOT_BYTES] for at in range(0, len(data), SUBMIT_SLOT_BYTES)]


def request(num_ids: int = 3, **changes) -> Submit:
    params = SamplingParams(max_tokens=changes.pop("max_tokens", 16), **changes)
    return Submit(REQ_ID, np.arange(num_ids, dtype=np.int32), params)


def patched(slot: bytes, at: int, data: bytes) -> bytes:
    return slot[:at] + data + slot[at + len(data) :]
