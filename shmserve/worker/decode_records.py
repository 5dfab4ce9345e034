"""The token records of the sequences that decode together: written once, and in each step only where a step differs from the last.

Owns: the records of one set of rows and what appending a token to each of them needs; where nothing says that anybody can
end in a step, it does not look for it. Never: handles a row that is slow, or that was aborted or failed (the committer does).

Made when the rows of a batch are not those of the batch before; `Committer` drops it as soon as any other way of committing has
touched their columns. Law: what has gone on writes what a new one would. Worker's main thread only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shmserve.worker.batch import I4, StepOutput
from shmserve.worker.columns import Columns
from shmserve.worker.sampling_state import SamplingState

LAID_OUT = 16
"""Steps whose counts are made at once."""


class DecodeRecords:
    """Of `rows`, each of which makes one token a step. `records` are the committer's, of which they are the first."""

    def __init__(
        self, rows: I4, columns: Columns, sampling: SamplingState, records: npt.NDArray[np.void]
    ) -> None:
        self.rows = rows
        self._columns, self._sampling = columns, sampling
        self._all = rows.astype(np.intp)
        self._last_ns = 0  # of all their newest tokens; 0 if they are of different times
        # Who wants the most likely tokens gets units of its own, too.
        is_slow = columns.is_slow[self._all] | (sampling.num_logprobs[self._all] > 0)
        self.slow: list[int] = np.flatnonzero(is_slow).tolist()
        self._fast = np.flatnonzero(~is_slow)
        at = self.at = self._all[self._fast]
        self._all_tokens = columns.token_ids.reshape(-1)
        self._row_starts = at * columns.token_ids.shape[1]
        self._age = 0
        self._token_at = self._row_starts[None]
        self._lay_out()
        self._num_left = int((columns.max_total[at] - self._num_tokens[0]).min(initial=1 << 30))
        self._stop_ids = set(columns.stop_ids[at].ravel().tolist()) - {-1}
        self.channels = columns.channel[at]
        self.records = records[: len(at)]
        self.records["req_id"] = columns.req_id[at]
        self.records["flags"] = 0
        self._time_ns, self._step = self.records["time_ns"], self.records["step"]
        self._index = self.records["index"]
        self._token_ids = self.records["token_ids"][:, 0]
        self._dt_us, self._logprobs = self.records["dt_us"][:, 0], self.records["logprobs"][:, 0]

    def write(self, output: StepOutput, step: int, dt_us: int) -> I4 | None:
        """Append a token to each row that is not slow. Their tokens, if one of them may have ended now; None if none has."""
        columns = self._columns
        token_ids = output.token_ids[self._fast, 0] if self.slow else output.token_ids[:, 0]
        if self._age == LAID_OUT:
            self._lay_out()
        k = self._age = self._age + 1
        self._all_tokens[self._token_at[k - 1]] = token_ids
        self._index[:] = self._num_sampled[k - 1]
        columns.num_tokens[self.at] = self._num_tokens[k]
        self._sampling.position[self.at] = self._num_sampled[k]
        self._time_ns[:] = output.time_ns
        self._step[:] = step
        self._token_ids[:] = token_ids
        self._dt_us[:] = dt_us
        if output.logprobs is not None:
            self._logprobs[:] = output.logprobs[self._fast, 0]
        self._num_left -= 1
        if self._num_left <= 0:
            return token_ids
        is_hit = any(np.count_nonzero(token_ids == stop) for stop in self._stop_ids)
        return token_ids if is_hit else None

    def _lay_out(self) -> None:
        """Counts and places of the coming steps, each 1 more than in the step before it: one addition for all of them."""
        steps = np.arange(LAID_OUT + 1, dtype=np.int32)[:, None]
        self._age = 0
        self._num_tokens: I4 = self._columns.num_tokens[self.at] + steps
        self._num_sampled: I4 = self._sampling.position[self.at] + steps
        self._token_at = self._row_starts + self._num_tokens[:LAID_OUT]

    def pass_time(self, time_ns: int) -> list[tuple[int, int]]:
        """All rows, slow ones included, have a token of this time: the intervals since the last ones, and how many of each."""
        columns = self._columns
        if self._last_ns:
            intervals = [(time_ns - self._last_ns, len(self._all))]
        else:
            intervals = intervals_since(columns.last_time_ns[self._all], time_ns)
        self._last_ns = time_ns
        columns.last_time_ns[self._all] = time_ns
        return intervals


def intervals_since(last_ns: npt.NDArray[np.int64], time_ns: int) -> list[tuple[int, int]]:
    """Times since `last_ns` (0: there was no token before), and how many there are of each."""
    values, counts = np.unique(last_ns[last_ns > 0], return_counts=True)
    return [(time_ns - v, n) for v, n in zip(values.tolist(), counts.tolist(), strict=True)]
