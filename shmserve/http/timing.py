"""The times of one completion, for a client that asked: each token's, and every hop's (`timing`; /generate: in `meta_info`).

Owns: the stamps that only such a request keeps, and the object that tells them. Never: costs a request that did not ask, or a token that
the pump writes itself (a timed stream goes the slow way). One clock for the host, CLOCK_MONOTONIC; told in us since the arrival.

    arrival <= parsed <= tokenised <= submitted                    front end: headers read; body read and checked; ids made; SUBMIT
            <= admitted <= first_scheduled <= prefill_end          worker: SUBMIT read; its first step begins; its prompt is computed
            <= sampled <= published                                worker, each token: known on the host; in the ring
            <= popped <= framed <= written                         front end, each token: read; text ready; handed to its socket

A token that waits for a slow client is framed and not yet written; one that waits in the worker for room in the ring is sampled and not
yet published; one that waits for the event loop is published and not yet popped. Each wait is in its own hop.
The stamps of a request take 40 bytes a token, and `max_tokens` bounds them. Event loop's thread only.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shmserve.wire.finish import FinishRecord

if TYPE_CHECKING:
    from shmserve.http.in_flight import InFlight

_TIME: Final = struct.Struct("<Q")  # time_ns, at 8
FEW: Final = 48
"""So many numbers are sorted in Python sooner than numpy is called: a plain answer's client waits for this behind its last stamp."""
_TIMES: Final = struct.Struct("<8I")  # dt_us of a TOKENS slot, at 64


@dataclass(frozen=True, slots=True)
class Entrance:
    """What the front end had done by when, before there was a SUBMIT (ns)."""

    arrival_ns: int
    parsed_ns: int
    tokenised_ns: int


class TokenTimes:
    """When each token of one completion was sampled, published, popped, framed and written (ns)."""

    __slots__ = (
        "_framed",
        "_num_coalesced",
        "_num_told",
        "_popped",
        "_published",
        "_sampled",
        "_written",
        "entrance",
    )

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance
        self._sampled = array("q")
        self._published = array("q")
        self._popped = array("q")
        self._framed = array("q")  # of the first so many tokens, as is the next
        self._written = array("q")
        self._num_told = 0
        self._num_coalesced = 0

    def came(self, slot: bytes, count: int, popped_ns: int) -> None:
        """The pump has read a TOKENS slot. A worker's time may be anything: none is later than what followed it."""
        sampled_ns, delay_us = _TIME.unpack_from(slot, 8)[0], _TIMES.unpack_from(slot, 64)
        first_ns = min(sampled_ns, popped_ns)
        published_ns = min(first_ns + delay_us[0] * 1000, popped_ns)
        self._sampled.append(first_ns)
        self._published.append(published_ns)
        self._popped.append(popped_ns)
        for after_us in delay_us[1:count]:
            self._sampled.append(min(first_ns + after_us * 1000, published_ns))
            self._published.append(published_ns)
            self._popped.append(popped_ns)

    def came_alone(self, sampled_ns: int, delay_us: int, popped_ns: int) -> None:
        """The same for a slot of one token, whose numbers were read with those of others."""
        sampled_ns = min(sampled_ns, popped_ns)
        self._sampled.append(sampled_ns)
        self._published.append(min(sampled_ns + delay_us * 1000, popped_ns))
        self._popped.append(popped_ns)

    def framed(self, at_ns: int) -> None:
        """The text of all that came is ready."""
        self._framed.extend([at_ns] * (len(self._popped) - len(self._framed)))

    def written(self, at_ns: int) -> None:
        """All that was framed was handed to the socket."""
        self._written.extend([at_ns] * (len(self._framed) - len(self._written)))

    def take(self, count: int) -> list[int]:
        """The emission times of the next `count` tokens, which go into one frame: when each was sampled, us since the arrival."""
        begin = self._num_told
        self._num_told += count
        self._num_coalesced += max(0, count - 1)
        arrival_ns = self.entrance.arrival_ns
        return [(at - arrival_ns) // 1000 for at in self._sampled[begin : self._num_told]]

    def take_all(self) -> list[int]:
        """Those of every token: for an answer that has no frames."""
        arrival_ns = self.entrance.arrival_ns
        self._num_told = len(self._sampled)
        return [(at - arrival_ns) // 1000 for at in self._sampled]

    def summary(self, entry: InFlight) -> dict[str, Any]:
        """The object at a completion's end. What has not been, at the moment that it is made, is null: so the writing of the last frame."""
        record = entry.finish
        assert record is not None
        stamps = self._first_stamps(entry.submitted_ns, record)
        sampled, written = self._sampled, self._written
        span_ns = sampled[-1] - sampled[0] if sampled else 0
        first_seen = stamps["written"] if stamps["written"] is not None else stamps["framed"]
        return {
            "stamps_us": stamps,
            "last_token_us": self._token_stamps(len(self._sampled) - 1),
            "hops_us": self._hops(),
            "queue_us": stamps["first_scheduled"],
            "ttft_us": first_seen,
            "itl_engine_us": spread(_between(sampled, sampled[1:])),
            "itl_wire_us": spread(_between(written, written[1:])),
            "num_tokens": record.completion_tokens,
            "num_coalesced_tokens": self._num_coalesced,
            "cached_tokens": record.cached_tokens,
            "num_retractions": record.num_retractions,
            "tokens_per_s": round((len(sampled) - 1) * 1e9 / span_ns, 2) if span_ns > 0 else None,
        }

    def _first_stamps(self, submitted_ns: int, record: FinishRecord) -> dict[str, int | None]:
        """Of the request up to its first token, and of that."""
        before = {
            "arrival": self.entrance.arrival_ns,
            "parsed": self.entrance.parsed_ns,
            "tokenised": self.entrance.tokenised_ns,
            "submitted": submitted_ns,
            "admitted": record.received_ns,
            "first_scheduled": record.scheduled_ns,
            "prefill_end": record.prefill_end_ns,
        }
        return {name: self._since(at) for name, at in before.items()} | self._token_stamps(0)

    def _token_stamps(self, index: int) -> dict[str, int | None]:
        columns = {
            "sampled": self._sampled,
            "published": self._published,
            "popped": self._popped,
            "framed": self._framed,
            "written": self._written,
        }
        return {
            name: self._since(column[index]) if 0 <= index < len(column) else None
            for name, column in columns.items()
        }

    def _since(self, at_ns: int) -> int | None:
        return (at_ns - self.entrance.arrival_ns) // 1000 if at_ns else None

    def _hops(self) -> dict[str, dict[str, float] | None]:
        """Over all tokens, how long each hop took; the names are those of the front end's histograms."""
        columns = (self._sampled, self._published, self._popped, self._framed, self._written)
        names = ("publish", "pop", "frame", "write")
        return {
            name: spread(_between(begin, end))
            for name, begin, end in zip(names, columns, columns[1:], strict=False)
        }


Times = Sequence[int] | npt.NDArray[np.int64]


def _between(begin: array[int], end: array[int]) -> Times:
    """From each of `begin` to its like in `end`, as far as that goes."""
    if len(end) <= FEW:
        return [b - a for a, b in zip(begin, end, strict=False)]
    return np.array(end, np.int64) - np.array(begin[: len(end)], np.int64)


def spread(times_ns: Times) -> dict[str, float] | None:
    """Mean, p50, p99 (each a time that was: the first that so many do not exceed) and the most, in us; None of nothing."""
    count = len(times_ns)
    if not count:
        return None
    # numpy's percentile takes 20 times as long as its sort.
    ordered = sorted(times_ns) if count <= FEW else np.sort(times_ns)
    p50, p99 = ordered[(count - 1) // 2], ordered[-(-99 * count // 100) - 1]
    values = {
        "mean": sum(ordered) / count if count <= FEW else np.mean(ordered),
        "p50": p50,
        "p99": p99,
        "max": ordered[-1],
    }
    return {name: round(float(value) / 1000, 1) for name, value in values.items()}
