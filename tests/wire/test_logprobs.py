"""TOP_LOGPROBS slots, byte by byte. (What PROMPT_LOGPROBS carry is tested where they are made: the worker's prompt_scores.)"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from wire_records import REQ_ID, STEP, golden, i4

from shmserve.wire.logprobs import TOP_DTYPE, pack_top_logprobs


def test_golden_top_logprobs_fill_a_slot_with_twelve_pairs():
    ids = np.arange(13, dtype=np.int32)
    slots = pack_top_logprobs(REQ_ID, 9, ids, -ids.astype(np.float32), STEP)
    head = "0807060504030201 0000000000000000 09000000 02 {} 00 00 2827262524232221"
    assert slots == golden(
        head.format("0c"),
        "00000000 01000000 02000000 03000000 04000000 05000000 06000000 07000000 08000000 09000000"
        " 0a000000 0b000000  # 32 token_ids",
        "00000080 000080bf 000000c0 000040c0 000080c0 0000a0c0 0000c0c0 0000e0c0 000000c1 000010c1"
        " 000020c1 000030c1  # 80 logprobs",
    ) + golden(head.format("01"), "0c000000", "00" * 44, "000040c1")


@given(
    st.lists(st.tuples(i4, st.floats(width=32, allow_nan=False)), max_size=40),
    st.integers(0, 2**32 - 1),
)
def test_top_logprobs_round_trip_in_order(pairs, index):
    ids = np.array([i for i, _ in pairs], np.int32)
    logprobs = np.array([p for _, p in pairs], np.float32)
    records = np.frombuffer(pack_top_logprobs(REQ_ID, index, ids, logprobs, STEP), TOP_DTYPE)
    got_ids = [i for r in records for i in r["token_ids"][: r["count"]].tolist()]
    got = [p for r in records for p in r["logprobs"][: r["count"]].tolist()]
    assert (got_ids, got) == (ids.tolist(), logprobs.tolist())
    assert len(records) == -(-len(pairs) // 12)
    assert set(records["index"].tolist()) <= {index}
