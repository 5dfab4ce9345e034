"""One completion of /generate in SGLang's shape: its `meta_info`, its frames, its object.

Owns: what a frame of /generate holds. Streams carry the cumulative text and ids in every frame, or only what is new (native.py says
which), and the pump may have their frames made token by token; the emission times in `meta_info.timing.token_us` are those of the frame's own new tokens in both. Event loop's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from shmserve.http.detokenizer import escape
from shmserve.http.in_flight import InFlight
from shmserve.http.logprobs import TokenLogprob, TokenTexts, native_logprobs
from shmserve.http.openai.event_forms import HOLE, NUMBER, TEXT, form_of
from shmserve.http.openai.formats import event
from shmserve.http.ways import Made
from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.finish import FinishRecord


class NativeAnswer:
    """One completion in SGLang's shape, and its ChoiceFormat when it is streamed."""

    def __init__(
        self,
        entry: InFlight,
        params: SamplingParams,
        index: int | None,
        rid: str,
        incremental: bool,
        texts: TokenTexts | None,
        scored_ids: list[int],
        scored_from: int,
    ) -> None:
        assert entry.timing is not None
        self._entry = entry
        self._timing = entry.timing
        self._params = params
        self._index = index
        self._id = rid or f"{entry.req_id:016x}"
        self._is_incremental = incremental
        # As JSON has them, of the frame: what is cumulative is escaped once.
        self._text = bytearray()
        self._ids = bytearray()
        self._num_tokens = 0
        self._form = b""
        self._form_of: FinishRecord | None = None  # the record that the form was made for
        self._texts = texts
        self._scored_ids = scored_ids
        self._scored_from = scored_from
        self._logprobs: list[TokenLogprob] = []

    def opening(self) -> bytes:
        return b""

    def delta(self, text: str, token_ids: Sequence[int]) -> bytes:
        return self._frame(text, token_ids, is_last=False)

    def closing(self, text: str, token_ids: Sequence[int], entry: InFlight) -> bytes:
        return self._frame(text, token_ids, is_last=True)

    @property
    def way(self) -> Made | None:
        return Made(self._piece) if self._entry.logprobs is None else None

    def _piece(self, piece: bytes, token_id: int) -> bytes:
        """`delta` of one token that is whole text."""
        if not self._form or self._form_of is not self._entry.started:
            self._form, self._form_of = self._form_of_token(), self._entry.started
        self._add(piece, (token_id,))
        (token_us,) = self._timing.take(1)
        return self._form % (self._text, self._ids, self._num_tokens, token_us)

    def _form_of_token(self) -> bytes:
        """A frame with holes for its text, its ids, their number, and the newest one's time; the client's `rid` is in its middle."""
        frame = self._object(HOLE, [HOLE], [HOLE], is_last=False)
        frame["meta_info"]["completion_tokens"] = HOLE
        return form_of(event(frame), (TEXT, b"%b"), (NUMBER, NUMBER))

    def _add(self, escaped: bytes, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        if self._is_incremental:
            self._text.clear()
            self._ids.clear()
        self._text += escaped
        for token_id in token_ids:
            self._ids += b",%d" % token_id if self._ids else b"%d" % token_id

    def _frame(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> bytes:
        self._add(escape(text), token_ids)
        if self._entry.logprobs is not None:
            taken = self._entry.logprobs.take(len(token_ids))
            self._logprobs = taken if self._is_incremental else self._logprobs + taken
        token_us = self._timing.take(len(token_ids))
        told = msgspec.Raw(b'"%b"' % bytes(self._text))
        ids = msgspec.Raw(b"[%b]" % bytes(self._ids))
        return event(self._object(told, ids, token_us, is_last=is_last))

    def whole(self, text: str, token_ids: list[int]) -> dict[str, Any]:
        self._num_tokens = len(token_ids)
        if self._entry.logprobs is not None:
            self._logprobs = self._entry.logprobs.take(len(token_ids))
        self._timing.framed(time.monotonic_ns())
        return self._object(text, token_ids, self._timing.take_all(), is_last=True)

    def _object(
        self, text: Any, token_ids: Any, token_us: list[Any], *, is_last: bool
    ) -> dict[str, Any]:
        meta = self._meta_info(is_last)
        meta["timing"] = {"token_us": token_us}
        if is_last:
            meta["timing"] |= self._timing.summary(self._entry)
        answer = {"text": text, "output_ids": token_ids, "meta_info": meta}
        return answer if self._index is None else answer | {"index": self._index}

    def _meta_info(self, is_last: bool) -> dict[str, Any]:
        """SGLang's keys. Times of day are Unix seconds, those of waiting seconds; `queue_time` counts from the arrival to the first step."""
        entry = self._entry
        record = entry.finish if is_last else entry.started
        cached = record.cached_tokens if record is not None else 0
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": self._finish_reason() if is_last else None,
            "prompt_tokens": record.prompt_tokens if record is not None else 0,
            "weight_version": "default",
            "dp_rank": entry.link.worker,
            "num_retractions": record.num_retractions if record is not None else 0,
            "completion_tokens": self._num_tokens,
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0},
            "reasoning_tokens": 0,
        }
        if entry.logprobs is not None:
            chosen, top = native_logprobs(self._logprobs, self._texts)
            scored = entry.logprobs.of_prompt(self._scored_ids)[max(0, self._scored_from) :]
            of_prompt, top_of_prompt = native_logprobs(scored, self._texts)
            meta["input_token_logprobs"] = of_prompt
            meta["output_token_logprobs"] = chosen
            if self._params.num_logprobs > 0:
                meta["input_top_logprobs"] = top_of_prompt
                meta["output_top_logprobs"] = top
        if is_last and entry.finish is not None:
            meta |= self._times(entry.finish)
        return meta

    def _times(self, finish: FinishRecord) -> dict[str, float]:
        """SGLang's keys of a request that has ended."""
        entry = self._entry
        now, now_ns = time.time(), time.monotonic_ns()

        def time_of_day(at_ns: int) -> float:
            return now - (now_ns - at_ns) / 1e9

        times = {
            "e2e_latency": (now_ns - entry.arrival_ns) / 1e9,
            "request_received_ts": time_of_day(entry.arrival_ns),
            "api_server_dispatch_finish_ts": time_of_day(entry.submitted_ns),
            "request_finished_ts": time_of_day(finish.time_ns),
            "response_sent_to_client_ts": now,
        }
        if finish.scheduled_ns:
            times["queue_time"] = (finish.scheduled_ns - entry.arrival_ns) / 1e9
            times["forward_entry_time"] = time_of_day(finish.scheduled_ns)
        if finish.num_verified:
            times |= self._speculation(finish)
        if finish.prefill_end_ns:
            times["prefill_finished_time"] = time_of_day(finish.prefill_end_ns)
        if finish.first_token_ns:
            times["first_token_latency"] = (finish.first_token_ns - entry.arrival_ns) / 1e9
            took_s = (finish.time_ns - finish.first_token_ns) / 1e9
            if took_s > 0:
                times["decode_throughput"] = (finish.completion_tokens - 1) / took_s
        return times

    def _speculation(self, finish: FinishRecord) -> dict[str, float]:
        """SGLang's keys of a request that has speculated; the last two are those names' older forms."""
        return {
            "spec_verify_ct": finish.num_verified,
            "spec_accept_rate": finish.num_accepted / finish.num_drafts,
            "spec_accept_length": 1 + finish.num_accepted / finish.num_verified,
            "spec_num_proposed_drafts": finish.num_drafts,
            "spec_num_correct_drafts": finish.num_accepted,
            "spec_proposed_drafts": finish.num_drafts,
            "spec_accepted_drafts": finish.num_accepted,
        }

    def _finish_reason(self) -> dict[str, Any]:
        finish = self._entry.finish
        assert finish is not None
        reason = FinishReason(finish.finish)
        if reason is FinishReason.STOP_STRING:
            return {"type": "stop", "matched": self._entry.matched_stop(self._params.stop)}
        if reason.is_stop:
            return {"type": "stop", "matched": finish.matched_token}
        if reason is FinishReason.LENGTH:
            return {"type": "length", "length": finish.completion_tokens}
        if reason is FinishReason.TIMEOUT:
            length = finish.completion_tokens
            return {"type": "length", "length": length, "stop_reason": "timeout"}
        return {
            "type": "abort",
            "message": "The request was aborted.",
            "status_code": 503,
            "err_type": None,
        }
