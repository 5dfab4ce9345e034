"""Running sequences as columns, indexed by row slot: what a step reads and writes without a Python object per sequence.

Owns: the arrays and the free row slots. Who writes what: `Scheduler` everything at admission; `BlockTables` at block boundaries
`num_blocks`, `block_table` and `num_indexed`; the commit `token_ids`, `num_tokens`, `num_computed`. Worker's main thread only.

    [0, num_computed)            tokens whose keys and values are in the KV cache
    [num_computed, num_tokens)   tokens known and not yet computed (one, while decoding)
    [0, num_prompt)              the prompt; what follows was generated
    [0, num_indexed)             tokens in blocks that the prefix cache knows (block_tables.py)
"""

from __future__ import annotations

import numpy as np

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

    def take_row(self) -> int:
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        assert row not in self._free_rows, row
        self.is_aborted[row] = False
        self._free_rows.append(row)
