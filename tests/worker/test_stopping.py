"""Where completions end: the order of the conditions, over bytes, with a real tokenizer where its tokens matter."""

import numpy as np
import pytest

from shmserve.request import FinishReason, SamplingParams
from shmserve.stop import StopMatcher
from shmserve.token_bytes import TokenBytes
from shmserve.wire.finish import KEEP_ALL
from shmserve.worker.columns import Columns
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import Ending, StopConditions

BYTES = TokenBytes.from_list([b"<unk>", b"<eos>", b"ab", b"c", b"STOP", b"\xe2\x82", b"\xac"])
EOS = 1
CONDITIONS = StopConditions(BYTES, special_ids=(0, 1))


def sequence_of(eos_ids=(EOS,), **params) -> Sequence:
    params.setdefault("max_tokens", 100)
    p = SamplingParams(**params)
    return Sequence(
        1, 0, p, np.zeros(1, np.int32), 1, 1,
        stop_ids=frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else frozenset(eos_ids)),
        matcher=StopMatcher(p.stop) if p.stop else None,
    )  # fmt: skip


def judge(sequence: Sequence, token_ids, conditions=CONDITIONS) -> tuple[int, Ending | None]:
    """How many of `token_ids` were kept, and the ending."""
    for count, token_id in enumerate(token_ids, 1):
        left = sequence.params.max_tokens - count
        ending = conditions.judge_one(sequence, token_id, count, left)
        if ending is not None:
            return count, ending
    return len(token_ids), None


def text_of(token_ids, ending: Ending, table=BYTES) -> bytes:
    text = b"".join(table[i] for i in token_ids)
    return text if ending.keep_bytes == KEEP_ALL else text[: ending.keep_bytes]


def test_a_stop_string_inside_a_token_cuts_there():
    count, ending = judge(sequence_of(stop=(b"b",)), [3, 2, 3])
    assert (count, ending) == (2, Ending(FinishReason.STOP_STRING, matched_stop=0, keep_bytes=2))


def test_a_stop_string_may_be_kept():
    _, ending = judge(sequence_of(stop=(b"bc",), include_stop=True), [2, 3])
    assert ending == Ending(FinishReason.STOP_STRING, matched_stop=0, keep_bytes=3)


def test_a_stop_string_over_tokens_that_split_a_character():
    count, ending = judge(sequence_of(stop=("c\u20ac".encode(),)), [2, 3, 5, 6, 2])
    assert (count, ending) == (4, Ending(FinishReason.STOP_STRING, matched_stop=0, keep_bytes=2))


def test_stop_string_comes_before_length_and_length_before_what_is_behind_it():
    assert judge(sequence_of(stop=(b"c",), max_tokens=2), [2, 3])[1].reason is (
        FinishReason.STOP_STRING
    )
    assert judge(sequence_of(stop=(b"c",), max_tokens=1), [2, 3]) == (
        1,
        Ending(FinishReason.LENGTH),
    )


def test_stop_token_comes_before_length():
    assert judge(sequence_of(max_tokens=1), [EOS]) == (
        1,
        Ending(FinishReason.STOP_TOKEN, matched_token=EOS),
    )


def test_the_stop_token_has_no_text_to_match():
    """A stop id whose own bytes are the stop string: it ends the request by itself, and its text is not the completion's."""
    sequence = sequence_of(stop=(b"STOP",), stop_token_ids=(4,))
    assert judge(sequence, [2, 4]) == (2, Ending(FinishReason.STOP_TOKEN, matched_token=4))


def test_eos_is_ignored_when_asked_and_its_bytes_are_no_text():
    sequence = sequence_of(ignore_eos=True, stop=(b"<eos>", b"abc"))
    count, ending = judge(sequence, [2, EOS, 3, 2])
    assert (count, ending) == (3, Ending(FinishReason.STOP_STRING, matched_stop=1, keep_bytes=0))


def test_special_tokens_are_text_where_they_are_not_skipped():
    sequence = sequence_of(ignore_eos=True, stop=(b"<eos>",), skip_special_tokens=False)
    assert judge(sequence, [2, EOS])[1].keep_bytes == 2
    assert judge(sequence_of(stop=(b"<unk>",)), [0, 2]) == (2, None)


def test_own_stop_ids_count_with_ignore_eos():
    sequence = sequence_of(ignore_eos=True, stop_token_ids=(3,))
    assert judge(sequence, [EOS, 2, 3]) == (3, Ending(FinishReason.STOP_TOKEN, matched_token=3))


@pytest.mark.parametrize("token_id", [EOS, 3])
def test_min_tokens_suspends_stop_tokens_and_strings(token_id):
    sequence = sequence_of(min_tokens=3, stop=(b"c",))
    count, ending = judge(sequence, [token_id, token_id, 2, token_id])
    assert count == 4
    assert ending.reason is (
        FinishReason.STOP_TOKEN if token_id == EOS else FinishReason.STOP_STRING
    )
    if token_id == 3:
        assert ending.keep_bytes == 4  # what was passed under min_tokens is text for good


def test_min_tokens_does_not_suspend_length():
    assert judge(sequence_of(min_tokens=9, max_tokens=2), [2, 2])[1].reason is FinishReason.LENGTH


def test_columns_and_single_tokens_are_judged_alike():
    """The fast path over all rows says what `judge_one` says of each of them."""
    rng = np.random.default_rng(7)
    columns = Columns(200, 64, 16)
    rows, tokens, wanted = np.arange(200), rng.integers(0, 6, 200).astype(np.int32), []
    for row in rows.tolist():
        max_tokens, num_output = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        num_output = min(num_output, max_tokens)
        sequence = sequence_of(
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, 5)),
            stop_token_ids=tuple(rng.integers(0, 6, int(rng.integers(0, 3))).tolist()),
        )
        columns.num_tokens[row] = 10 + num_output
        columns.max_total[row] = 10 + max_tokens
        columns.min_total[row] = 10 + sequence.params.min_tokens
        columns.stop_ids[row, : len(sequence.stop_ids)] = sorted(sequence.stop_ids)
        ending = CONDITIONS.judge_one(
            sequence, int(tokens[row]), num_output, max_tokens - num_output
        )
        wanted.append(ending.reason if ending else FinishReason.NONE)
    by_stop, by_length = CONDITIONS.judge_columns(columns, rows, tokens)
    got = np.where(
        by_stop,
        FinishReason.STOP_TOKEN,
        np.where(by_length, FinishReason.LENGTH, FinishReason.NONE),
    )
    assert got.tolist() == wanted
    assert set(wanted) == {FinishReason.NONE, FinishReason.STOP_TOKEN, FinishReason.LENGTH}


# -- with the default model's tokenizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real(default_model):
    table = default_model.token_bytes()
    return StopConditions(table, default_model.special_token_ids), table


def test_stop_that_ends_inside_a_real_token(real):
    """Case B3: token 2767 is " do"."""
    conditions, table = real
    count, ending = judge(sequence_of(stop=(b"o",)), [2767] * 8, conditions)
    assert count == 1
    assert text_of([2767], ending, table) == b" d"


@pytest.mark.parametrize("stops", [(b"four", b"three", b"two"), (b"two", b"four", b"three")])
def test_the_earliest_of_several_stops_wins(real, stops):
    """Case B4: one two three four."""
    conditions, table = real
    ids = [537, 827, 1296, 1876]
    count, ending = judge(sequence_of(stop=stops), ids, conditions)
    assert stops[ending.matched_stop] == b"two"
    assert text_of(ids[:count], ending, table) == b"one "


@pytest.mark.parametrize(
    ("ids", "count", "reason", "text"),
    [
        ([33, 34, 48124, 35, 36, 37], 3, FinishReason.STOP_STRING, b"12"),
        ([33, 34, 35, 36, 37, 48124], 5, FinishReason.LENGTH, b"12345"),
    ],
)
def test_stop_and_limit_near_each_other(real, ids, count, reason, text):
    """Case B5: a stop inside the budget wins, one behind it does not count."""
    conditions, table = real
    kept, ending = judge(sequence_of(stop=(b"STOP",), max_tokens=5), ids, conditions)
    assert (kept, ending.reason) == (count, reason)
    assert text_of(ids[:kept], ending, table) == text
