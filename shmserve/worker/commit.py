"""What a step's tokens do: appended, judged, and turned into records.

Owns: the way from a `StepOutput` to token records and endings. Never: frees a sequence or touches a ring (the engine does).
Sequences that made one plain token are handled in columns, all at once; those with stop strings, top logprobs or several
tokens one by one. Worker's main thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmserve.request import FinishReason
from shmserve.wire.logprobs import pack_top_logprobs
from shmserve.wire.tokens import FLAG_LAST_IS_STOP, TOKENS_DTYPE, TOKENS_PER_SLOT, TokenKind
from shmserve.worker.batch import Batch, StepOutput
from shmserve.worker.decode_records import DecodeRecords, intervals_since
from shmserve.worker.prompt_scores import pack_scores
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import Ending, StopConditions


@dataclass(slots=True)
class Committed:
    """Records of a step, and who ended in it. `units` are groups of slots: (channel, req_id, bytes)."""

    records: npt.NDArray[np.void]
    channels: npt.NDArray[np.int32]
    units: list[tuple[int, int, bytes]]
    endings: list[tuple[Sequence, Ending]]
    num_tokens: int
    itl_ns: list[tuple[int, int]]  # times between tokens of one sequence, and how many of each


class Committer:
    """Reuses one array of records: what `commit` returns is valid until the next call."""

    def __init__(self, scheduler: Scheduler, conditions: StopConditions) -> None:
        self._scheduler = scheduler
        self._conditions = conditions
        self._records = np.zeros(scheduler.max_num_seqs, TOKENS_DTYPE)
        self._records["kind"] = TokenKind.TOKENS
        self._records["count"] = 1
        self._decode_records: DecodeRecords | None = None

    def commit(self, batch: Batch, output: StepOutput, publish_ns: int) -> Committed:
        """Append the step's tokens to their sequences, except those that were aborted meanwhile or whose logits failed."""
        if self._is_plain(batch, output):
            return self._commit_decode(batch, output, publish_ns)
        self._decode_records = None
        columns = self._scheduler.columns
        rows = batch.rows[batch.sample_seqs]
        live = ~columns.is_aborted[rows]
        endings: list[tuple[Sequence, Ending]] = []
        for index in output.failed:
            if live[index]:
                live[index] = False
                endings.append((self._sequence(rows[index]), Ending(FinishReason.ERROR)))
        itl_ns = intervals_since(columns.last_time_ns[rows[live]], output.time_ns)
        columns.last_time_ns[rows] = output.time_ns
        is_slow = columns.is_slow[rows]
        if output.counts is not None:
            is_slow = is_slow | (output.counts != 1)
        units: list[tuple[int, int, bytes]] = []
        if output.prompt_scores:
            is_slow = is_slow | np.isin(
                batch.sample_seqs, [scores.part.seq for scores in output.prompt_scores]
            )
            live &= self._commit_prompts(batch, output, units, endings)
        if output.top:
            is_slow = is_slow.copy()
            is_slow[list(output.top)] = True
        fast = np.flatnonzero(live & ~is_slow)
        records = self._commit_columns(batch, output, rows[fast], fast, publish_ns, endings)
        num_tokens = len(fast)
        for index in np.flatnonzero(live & is_slow).tolist():
            sequence = self._sequence(rows[index])
            unit, count, ending = self._commit_one(batch, output, sequence, index, publish_ns)
            units.append((sequence.channel, sequence.req_id, unit))
            num_tokens += count
            if ending is not None:
                endings.append((sequence, ending))
        return Committed(records, columns.channel[rows[fast]], units, endings, num_tokens, itl_ns)

    def _is_plain(self, batch: Batch, output: StepOutput) -> bool:
        """Whether every sequence of the batch has made one token, and may keep it."""
        return (
            batch.is_decode
            and output.counts is None
            and not output.failed
            and not np.count_nonzero(self._scheduler.columns.is_aborted)
        )

    def _commit_decode(self, batch: Batch, output: StepOutput, publish_ns: int) -> Committed:
        known = self._decode_records
        if known is None or known.rows is not batch.rows:
            known = self._decode_records = DecodeRecords(
                batch.rows, self._scheduler.columns, self._scheduler.sampling, self._records
            )
        endings: list[tuple[Sequence, Ending]] = []
        token_ids = known.write(output, batch.step, _delay_us(output, publish_ns))
        if token_ids is not None:
            known.records["flags"] = self._end_columns(known.at, token_ids, endings)
            self._decode_records = None
        units: list[tuple[int, int, bytes]] = []
        num_tokens = len(known.records)
        for index in known.slow:
            sequence = self._sequence(batch.rows[index])
            unit, count, ending = self._commit_one(batch, output, sequence, index, publish_ns)
            units.append((sequence.channel, sequence.req_id, unit))
            num_tokens += count
            if ending is not None:
                endings.append((sequence, ending))
        itl_ns = known.pass_time(output.time_ns)
        return Committed(known.records, known.channels, units, endings, num_tokens, itl_ns)

    def _commit_prompts(
        self,
        batch: Batch,
        output: StepOutput,
        units: list[tuple[int, int, bytes]],
        endings: list[tuple[Sequence, Ending]],
    ) -> npt.NDArray[np.bool_]:
        """Append units of prompts' logprobs, which stand before the first tokens; False for who ended since one is not finite."""
        has_ended = np.zeros(batch.num_seqs, np.bool_)
        for scores in output.prompt_scores:
            row = batch.rows[scores.part.seq]
            if self._scheduler.columns.is_aborted[row]:
                continue
            sequence = self._sequence(row)
            if np.isfinite(scores.logprobs).all():
                unit = pack_scores(sequence, scores, batch.step)
                units.append((sequence.channel, sequence.req_id, unit))
                continue
            has_ended[scores.part.seq] = True
            self._scheduler.distrust(sequence)
            if all(ended is not sequence for ended, _ in endings):
                endings.append((sequence, Ending(FinishReason.ERROR)))
        result: npt.NDArray[np.bool_] = ~has_ended[batch.sample_seqs]
        return result

    def _sequence(self, row: int | np.integer) -> Sequence:
        sequence = self._scheduler.by_row[int(row)]
        assert sequence is not None, row
        return sequence

    def _commit_columns(
        self,
        batch: Batch,
        output: StepOutput,
        rows: npt.NDArray[np.int32],
        fast: npt.NDArray[np.intp],
        publish_ns: int,
        endings: list[tuple[Sequence, Ending]],
    ) -> npt.NDArray[np.void]:
        columns = self._scheduler.columns
        token_ids = output.token_ids[fast, 0]
        position = columns.num_tokens[rows]
        columns.token_ids[rows, position] = token_ids
        columns.num_tokens[rows] = position + 1
        self._scheduler.sampling.position[rows] += 1
        records = self._records[: len(rows)]
        records["req_id"] = columns.req_id[rows]
        records["time_ns"] = output.time_ns
        records["index"] = position - columns.num_prompt[rows]
        records["flags"] = self._end_columns(rows, token_ids, endings)
        records["step"] = batch.step
        records["token_ids"][:, 0] = token_ids
        records["dt_us"][:, 0] = _delay_us(output, publish_ns)
        if output.logprobs is not None:
            records["logprobs"][:, 0] = output.logprobs[fast, 0]
        return records

    def _end_columns(
        self,
        rows: npt.NDArray[np.integer],
        token_ids: npt.NDArray[np.int32],
        endings: list[tuple[Sequence, Ending]],
    ) -> npt.NDArray[np.bool_]:
        """Append who ends with its new token; true where that is a stop id (FLAG_LAST_IS_STOP is 1)."""
        by_stop, by_length = self._conditions.judge_columns(
            self._scheduler.columns, rows, token_ids
        )
        for index in np.flatnonzero(by_stop | by_length).tolist():
            ending = Ending(FinishReason.LENGTH)
            if by_stop[index]:
                ending = Ending(FinishReason.STOP_TOKEN, matched_token=int(token_ids[index]))
            endings.append((self._sequence(rows[index]), ending))
        return by_stop

    def _commit_one(
        self, batch: Batch, output: StepOutput, sequence: Sequence, index: int, publish_ns: int
    ) -> tuple[bytes, int, Ending | None]:
        """The slots of one sequence's step, how many tokens it kept, and its ending if it ended."""
        columns, row = self._scheduler.columns, sequence.row
        count = 1 if output.counts is None else int(output.counts[index])
        before = int(columns.num_tokens[row])
        num_prompt, most = sequence.num_prompt_tokens, int(columns.max_total[row])
        token_ids: list[int] = []
        ending: Ending | None = None
        for token_id in output.token_ids[index, :count].tolist():
            token_ids.append(token_id)
            total = before + len(token_ids)
            ending = self._conditions.judge_one(
                sequence, token_id, total - num_prompt, most - total
            )
            if ending is not None:
                break
        total = before + len(token_ids)
        columns.token_ids[row, before:total] = token_ids
        columns.num_tokens[row] = total
        # All but the last token were verified in this step: their keys and values are in the cache.
        columns.num_computed[row] = total - 1
        self._scheduler.sampling.position[row] += len(token_ids)
        unit = self._pack(
            batch, output, sequence, index, token_ids, before - num_prompt, publish_ns
        )
        if ending is not None and ending.reason is FinishReason.STOP_TOKEN:
            unit[-TOKENS_DTYPE.itemsize + 23] = FLAG_LAST_IS_STOP
        return bytes(unit), len(token_ids), ending

    def _pack(
        self,
        batch: Batch,
        output: StepOutput,
        sequence: Sequence,
        index: int,
        token_ids: list[int],
        first_index: int,
        publish_ns: int,
    ) -> bytearray:
        unit = bytearray()
        top = output.top.get(index) if output.top else None
        for start in range(0, len(token_ids), TOKENS_PER_SLOT):
            part = token_ids[start : start + TOKENS_PER_SLOT]
            if top is not None:
                for k in range(start, start + len(part)):
                    unit += pack_top_logprobs(
                        sequence.req_id, first_index + k, top[0][k], top[1][k], batch.step
                    )
            record = np.zeros(1, TOKENS_DTYPE)
            record["req_id"] = sequence.req_id
            record["time_ns"] = output.time_ns
            record["index"] = first_index + start
            record["kind"] = TokenKind.TOKENS
            record["count"] = len(part)
            record["step"] = batch.step
            record["token_ids"][0, : len(part)] = part
            record["dt_us"][0, 0] = _delay_us(output, publish_ns)
            if output.logprobs is not None:
                record["logprobs"][0, : len(part)] = output.logprobs[
                    index, start : start + len(part)
                ]
            unit += record.tobytes()
        return unit


def _delay_us(output: StepOutput, publish_ns: int) -> int:
    return min(0xFFFF_FFFF, (publish_ns - output.time_ns) // 1000)
