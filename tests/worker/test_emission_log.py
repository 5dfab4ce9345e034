"""One JSON line per step, that says which token of which request was made when."""

import json
from pathlib import Path

import numpy as np
import pytest

from shmserve.wire.logprobs import pack_top_logprobs
from shmserve.wire.tokens import TOKENS_DTYPE, TokenKind
from shmserve.worker import emission_log
from shmserve.worker.commit import Committed
from shmserve.worker.emission_log import EmissionLog


def tokens(*entries: tuple[int, int, int]) -> np.ndarray:
    """TOKENS records of (req_id, index, count)."""
    records = np.zeros(len(entries), TOKENS_DTYPE)
    records["kind"] = TokenKind.TOKENS
    for record, (req_id, index, count) in zip(records, entries, strict=True):
        record["req_id"], record["index"], record["count"] = req_id, index, count
    return records


def committed(records=(), units=()) -> Committed:
    return Committed(tokens(*records), np.zeros(0, np.int32), list(units), [], 0, [])


class ReadableLog(EmissionLog):
    """A log that reads its own lines back."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def lines(self) -> list[dict]:
        self.flush()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def log(tmp_path):
    made = ReadableLog(tmp_path / "log.jsonl")
    yield made
    made.close()


def test_a_step_is_a_line(log):
    log.write(7, 123, committed([(0xAB, 0, 1), (2**64 - 1, 41, 1)]))
    assert log.lines() == [
        {
            "step": 7,
            "time_ns": 123,
            "req_ids": ["00000000000000ab", "ffffffffffffffff"],
            "indices": [0, 41],
        }
    ]


def test_a_step_without_tokens_is_a_line_too(log):
    log.write(1, 5, committed())
    assert log.lines() == [{"step": 1, "time_ns": 5, "req_ids": [], "indices": []}]


def test_units_are_logged_by_their_token_slots_with_counts(log):
    top = pack_top_logprobs(3, 5, np.zeros(13, np.int32), np.zeros(13, np.float32), 1)
    unit = top + tokens((3, 5, 8), (3, 13, 2)).tobytes()
    log.write(1, 5, committed([(1, 9, 1)], [(0, 3, unit)]))
    assert log.lines() == [
        {
            "step": 1,
            "time_ns": 5,
            "req_ids": [f"{n:016x}" for n in (1, 3, 3)],
            "indices": [9, 5, 13],
            "counts": [1, 8, 2],
        }
    ]


def test_names_remembered_are_bounded(log, monkeypatch):
    monkeypatch.setattr(emission_log, "MOST_NAMES", 3)
    for req_id in range(20):
        log.write(req_id, 0, committed([(req_id, 0, 1), (1, req_id, 1)]))
        assert len(log._names) <= 3
    assert [line["req_ids"] for line in log.lines()] == [
        [f"{req_id:016x}", f"{1:016x}"] for req_id in range(20)
    ]


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        EmissionLog(str(tmp_path / "none" / "log"))
