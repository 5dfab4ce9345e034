"""Heads and control records of the submit ring, byte by byte, and what those who look on may see of a request."""

import numpy as np
import pytest
from wire_records import REQ_ID, patched, request

from shmserve.request import SamplingParams
from shmserve.wire.errors import WireError
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import (
    SUBMIT_SLOT_BYTES,
    Section,
    SubmitHead,
    SubmitKind,
    control_digest,
    pack_control,
    peek_submit,
    submit_head,
    without_contents,
)


@pytest.mark.parametrize(
    ("kind", "byte"),
    [
        (SubmitKind.ABORT, "03"),
        (SubmitKind.ABORT_BY_ID, "04"),
        (SubmitKind.PAUSE, "05"),
        (SubmitKind.RESUME, "06"),
        (SubmitKind.FLUSH_CACHE, "07"),
        (SubmitKind.EVICT, "08"),
    ],
)
def test_golden_control(kind, byte):
    digest = bytes(range(0x50, 0x60))
    slot = pack_control(kind, REQ_ID, time_ns=0x31, digest=digest)
    assert len(slot) == SUBMIT_SLOT_BYTES
    assert slot[:40].hex() == f"0807060504030201{byte}00010000000000" + "3100000000000000" + (
        "505152535455565758595a5b5c5d5e5f"
    )
    assert submit_head(slot) == (REQ_ID, kind, 1)
    assert control_digest(slot) == digest


def test_numbers_of_kinds_and_sections_do_not_change():
    assert [kind.name for kind in SubmitKind] == [
        "SUBMIT", "CONTINUATION", "ABORT", "ABORT_BY_ID", "PAUSE", "RESUME", "FLUSH_CACHE",
        "EVICT",
    ]  # fmt: skip
    assert [section.name for section in Section] == [
        "PROMPT_IDS", "STOP_STRING", "STOP_IDS", "STOP_REGEX", "LOGIT_BIAS", "ALLOWED_IDS", "BAD_IDS",
        "GRAMMAR", "CACHE_SALT", "DIGEST", "SHOWN_IDS",
    ]  # fmt: skip
    assert list(SubmitKind) == list(range(1, 9))
    assert list(Section) == list(range(1, 12))


@pytest.mark.parametrize("kind", [0, max(SubmitKind) + 1, 255])
def test_an_unknown_kind_is_a_wire_error(kind):
    with pytest.raises(WireError, match=f"unknown kind {kind}"):
        submit_head(patched(pack_submit(request())[0], 8, bytes([kind])))


def test_head_of_a_slot_says_what_kind_it_is_and_how_long_its_prompt():
    params = SamplingParams(max_tokens=77)
    record, num_slots = pack_submit(
        Submit(9, np.arange(1900, dtype=np.int32), params, submitted_ns=5)
    )
    slots = [record[i : i + 4096] for i in range(0, len(record), 4096)]
    assert peek_submit(slots[0]) == SubmitHead(9, 1, num_slots, 5, 1900, 77)
    assert peek_submit(slots[1]) == SubmitHead(9, 2, 1, 0)
    pause = pack_control(SubmitKind.PAUSE, 9, time_ns=6)
    assert peek_submit(pause) == SubmitHead(9, SubmitKind.PAUSE, 1, 6)
    assert peek_submit(bytes(8) + b"\xff" + bytes(4087)).kind == 255


def test_slots_without_contents_keep_their_heads_and_nothing_else():
    params = SamplingParams(max_tokens=77, stop=(b"a stop string",), grammar="a grammar")
    record, num_slots = pack_submit(
        Submit(9, np.arange(1, 1901, dtype=np.int32), params, cache_salt=b"a salt")
    )
    bare = without_contents(record)
    assert len(bare) == len(record) and num_slots == 2
    for at in range(0, len(record), 4096):
        assert peek_submit(bare[at : at + 4096]) == peek_submit(record[at : at + 4096])
    assert not any(bare[264:4096]) and not any(bare[4096 + 16 :])
