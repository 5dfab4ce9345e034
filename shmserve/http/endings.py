"""What is counted of a completion when it leaves the table: how it ended, how long its parts took, how long its abort took.

Owns: those words and histograms of the front end's board. Once per completion, at its FINISH or at the end of its channel; never for a
token. Event loop's thread only.
"""

from __future__ import annotations

import time
from typing import Final

from shmserve.http.in_flight import InFlight
from shmserve.request import FinishReason
from shmserve.rings.board import Board

_BY_FINISH: Final = {
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.GRAMMAR: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.EVICTED: "abort",  # as is one that its own front end has sent away
    FinishReason.ERROR: "error",
    FinishReason.TIMEOUT: "timeout",
}


def ending_of(entry: InFlight) -> str | None:
    """One of boards.ENDINGS; None of what was never submitted: it was refused."""
    if entry.expiry is not None:
        return "timeout"
    if entry.finish is not None:
        return _BY_FINISH.get(FinishReason(entry.finish.finish), "error")
    if entry.is_aborted:
        return "abort"
    return "error" if entry.is_submitted else None


class Endings:
    """`board` is the front end's."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._histograms = board.histograms

    def note(self, entry: InFlight) -> None:
        """It leaves the table."""
        ending = ending_of(entry)
        if ending is None or entry.party is None:  # without a party it is a control record
            return
        self._board.add(f"num_ended_{ending}")
        histograms, finish = self._histograms, entry.finish
        if entry.aborted_ns:
            took_us = (time.monotonic_ns() - entry.aborted_ns) // 1000
            histograms["abort_us"].observe_one(took_us)
        if finish is None or not finish.scheduled_ns:
            return
        histograms["prompt_length"].observe_one(finish.prompt_tokens)
        histograms["completion_length"].observe_one(finish.completion_tokens)
        if finish.prefill_end_ns:
            took_us = (finish.prefill_end_ns - finish.scheduled_ns) // 1000
            histograms["prefill_us"].observe_one(max(0, took_us))
        if finish.first_token_ns and finish.completion_tokens > 1:
            decode_us = max(0, (finish.time_ns - finish.first_token_ns) // 1000)
            histograms["decode_us"].observe_one(decode_us)
            histograms["tpot_us"].observe_one(decode_us // (finish.completion_tokens - 1))
