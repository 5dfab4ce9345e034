"""All ranks of one model as threads of the test's own process, over gloo; and what is shared among them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import torch.distributed as dist

from shmserve.models import FORMAT_VERSION, PreparedModel
from shmserve.request import SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker.batch import Batch
from shmserve.worker.parallel.group import gloo_group
from shmserve.worker.parallel.steps import StepReader, StepWriter, words_needed
from shmserve.worker.parallel.team import Team
from shmserve.worker.sampling_state import SamplingState

BLOCK, BLOCKS_EACH, NUM_ROWS, MAX_TOKENS = 16, 4, 6, 128
LIMITS: dict[str, Any] = {
    "max_num_seqs": NUM_ROWS,
    "max_num_batched_tokens": MAX_TOKENS,
    "max_model_len": BLOCK * BLOCKS_EACH,
    "kv_cache_bytes": 8 << 20,
    "block_size": BLOCK,
    "num_threads": 1,
    "progress": lambda what, share: None,
}
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 251,
    "max_position_embeddings": 128,
}
"""Of a llama that is shared: an odd vocabulary, and three ranks are as good as two."""
PATIENCE_S = 30.0


def prepared(folder: Path) -> PreparedModel:
    """The model in `folder`, as a process finds one that was prepared."""
    model = checkpoints.prepared(folder)
    TokenBytes.from_list([b"x"] * model.vocab_size).save(folder / "token_bytes.bin")
    values = {
        key: value for key, value in asdict(model).items() if key not in ("folder", "chat_template")
    }
    values |= {"weights": str(folder), "format_version": FORMAT_VERSION}
    (folder / "model.json").write_text(json.dumps(values))
    return model


class Together:
    """A runner of several ranks. `first` is rank 0's, of the thread that made it; `others` those of the other threads.

    `make` makes a rank's runner for a team.
    """

    def __init__(self, num_ranks: int, make: Callable[[Team], Any]) -> None:
        self.others: dict[int, Any] = {}
        self.error: BaseException | None = None
        self._is_over = False
        store = dist.HashStore()
        self._steps = StepWriter(num_ranks - 1, words_needed(MAX_TOKENS, NUM_ROWS, BLOCKS_EACH))
        self._threads = [
            threading.Thread(target=self._follow, args=(store, rank, num_ranks, make), daemon=True)
            for rank in range(1, num_ranks)
        ]
        for thread in self._threads:
            thread.start()
        group = gloo_group(store, 0, num_ranks)
        self.first = make(Team(group, self._steps, self._end))
        deadline = time.monotonic() + PATIENCE_S
        while len(self.others) < num_ranks - 1 and self.error is None:
            assert time.monotonic() < deadline, "the other ranks do not load"
            time.sleep(0.001)

    def _follow(
        self, store: dist.Store, rank: int, num_ranks: int, make: Callable[[Team], Any]
    ) -> None:
        try:
            reader = StepReader(*map(os.dup, self._steps.fds_of(rank - 1)))
            runner = self.others[rank] = make(Team(gloo_group(store, rank, num_ranks)))
            while True:
                message = reader.read()
                if self._is_over:
                    reader.close()
                    return
                if message.batch is not None:
                    runner.follow(message.batch, message.carried)
                else:
                    runner.follow_logits(message.rows)
        except BaseException as error:
            self.error = error
            raise

    def _end(self) -> None:
        self._is_over = True
        self._steps.logits(np.zeros(0, np.int32))  # a message, so that they look up
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert self.error is None, self.error

    def close(self) -> None:
        self.first.close()


def batch_of(*parts: tuple[int, list[int], int]) -> Batch:
    """`parts` are (row, tokens, position of the first); every sequence samples. Row r has blocks of its own."""
    rows = np.array([row for row, _, _ in parts], np.int32)
    counts = np.array([len(tokens) for _, tokens, _ in parts])
    starts = np.array([start for _, _, start in parts])
    table = (BLOCKS_EACH * rows[:, None] + 1 + np.arange(BLOCKS_EACH)).astype(np.int32)
    owner = np.repeat(np.arange(len(rows)), counts)
    cu = np.concatenate([[0], np.cumsum(counts)])
    positions = np.arange(cu[-1]) - cu[owner] + starts[owner]
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    return Batch(
        step=1,
        rows=rows,
        token_ids=np.concatenate([tokens for _, tokens, _ in parts]).astype(np.int32),
        positions=positions.astype(np.int32),
        kv_slots=slots.astype(np.int32),
        cu_seqlens=cu.astype(np.int32),
        block_table=table,
        kv_lens=(starts + counts).astype(np.int32),
        sample_seqs=np.arange(len(rows), dtype=np.int32),
        is_decode=bool((counts == 1).all()),
    )


def state_of(**params: Any) -> SamplingState:
    state = SamplingState(NUM_ROWS, 251)
    for row in range(NUM_ROWS):
        state.set(row, SamplingParams(max_tokens=99, **{"temperature": 0.0} | params), (), 0)
    return state


def generated(
    runner: Any, prompts: list[list[int]], state: SamplingState, num_steps: int
) -> list[list[int]]:
    """Prompts of rows 0, 1, ... at once, then a token of each a step."""
    told = [(row, prompt, 0) for row, prompt in enumerate(prompts)]
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_steps):
        output = runner.run(batch_of(*told), state)
        assert output.failed == ()
        tokens = output.token_ids[:, 0].tolist()
        told = [
            (row, [token], start + len(before))
            for (row, before, start), token in zip(told, tokens, strict=True)
        ]
        for row, token in enumerate(tokens):
            out[row].append(token)
            state.position[row] += 1
    return out
