"""Running sequences as columns, indexed by row slot: what a step reads and writes without a Python object per sequence.

Owns: the arrays and the free row slots. Who writes what: `enter` all that a sequence brings along; `BlockTables` when it gets its
blocks and at block boundaries `num_blocks`, `block_table` and `num_indexed`, and what it found computed as `num_computed`; the commit
`token_ids`, `num_tokens`, `num_computed`. Worker's main thread only.

    [0, num_computed)            tokens whose keys and values are in the KV cache
    [num_computed, num_tokens)   tokens known and not yet computed (one, while decoding)
    [0, num_prompt)              the prompt; what follows was generated
    [0, num_indexed)             tokens in blocks that the prefix cache knows (block_tables.py)
"""

from __future__ import annotations

import numpy as np

from shmserve.worker.sequence import Sequence

STOP_COLUMNS = 4
"""Stop ids kept as columns; a sequence with more is checked by its own set."""


class Columns:
    """Arrays for `num_rows` sequences of at most `max_model_len` tokens."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.req_id = np.zeros(num_rows, np.uint64)
        self.channel = np.zeros(num_rows, np.int32)
        self.token_ids = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.max_total = np.zeros(num_rows, np.int32)  # prompt + max_tokens, within the context
        self.min_total = np.zeros(
            num_rows, np.int32
        )  # prompt + min_tokens: stops count from here on
        self.stop_ids = np.full((num_rows, STOP_COLUMNS), -1, np.int32)
        self.is_slow = np.zeros(num_rows, bool)  # stop strings, or more stop ids than columns
        self.is_aborted = np.zeros(num_rows, bool)
        self.wants_logprobs = np.zeros(num_rows, bool)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.num_indexed = np.zeros(num_rows, np.int32)
        self.block_table = np.zeros((num_rows, max_blocks), np.int32)
        self.last_time_ns = np.zeros(num_rows, np.int64)  # of the newest token; 0 before the first
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def enter(self, sequence: Sequence, capacity_tokens: int) -> int:
        """Give a sequence a free row, and write what is known of it there; the row. It will have `capacity_tokens` at most."""
        row = sequence.row = self._free_rows.pop()
        params, stop_ids = sequence.params, sequence.stop_ids
        num_tokens, num_prompt = len(sequence.token_ids), sequence.num_prompt_tokens
        self.req_id[row] = sequence.req_id
        self.channel[row] = sequence.channel
        self.token_ids[row, :num_tokens] = sequence.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt[row] = num_prompt
        self.max_total[row] = min(num_prompt + params.max_tokens, capacity_tokens)
        # Beyond max_total it means "never", and more than that may be more than a column holds.
        self.min_total[row] = min(num_prompt + params.min_tokens, self.max_total[row] + 1)
        self.stop_ids[row] = -1
        if len(stop_ids) <= STOP_COLUMNS:
            self.stop_ids[row, : len(stop_ids)] = sorted(stop_ids)
        has_rules = bool(params.stop or params.stop_regex or params.grammar)
        self.is_slow[row] = has_rules or len(stop_ids) > STOP_COLUMNS
        self.wants_logprobs[row] = params.num_logprobs >= 0
        self.last_time_ns[row] = sequence.last_time_ns
        return row

    def give_row(self, row: int) -> None:
        assert row not in self._free_rows, row
        self.is_aborted[row] = False
        self._free_rows.append(row)
