"""A GPU that is not there: every step ends at the next multiple of T, and makes seeded or scripted tokens.

It runs under the real scheduler with real blocks, so it is how an operator sizes a front end before buying the GPU, and how the
tests run. Never: imports torch, computes a logit.

Tokens are drawn by (seed, position) from the ids whose bytes are whole characters and that are not special. A request with a
logit_bias of 100 (OpenAI's greatest) gets that token at every step, as it would from a real model. A script, chosen by the
request's seed, gives its token lists one step after the other, and EOS behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shmserve.token_bytes import TokenBytes
from shmserve.worker.batch import F4, I4, Batch, PromptPart, PromptScores, StepOutput
from shmserve.worker.grammars import allowed
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.simulated_draws import Draws
from shmserve.worker.verification import kept_of, places_of

FORCING_BIAS = 100.0
MOST_GUESSES = 4_096


class ScriptError(ValueError):
    """The script file is not what it must be; one line for the operator."""


def load_script(path: str, vocab_size: int) -> dict[int, list[list[int]]]:
    """The file's `{"SEED": [[ids of step 1], [ids of step 2], ...], ...}`. Raises ScriptError."""
    try:
        script = msgspec.json.decode(Path(path).read_bytes(), type=dict[int, list[list[int]]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScriptError(f"--script {path}: {error}") from None
    for seed, steps in script.items():
        for step in steps:
            if not step or not all(0 <= token < vocab_size for token in step):
                raise ScriptError(
                    f"--script {path}: a step of seed {seed} must hold token ids 0 to {vocab_size - 1}"
                )
    return script


def plain_ids(token_bytes: TokenBytes, special_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Ids that are not special and whose bytes are whole printable characters."""
    special = set(special_ids)
    ids = []
    for token_id, data in enumerate(token_bytes.table()):
        if token_id in special or not data:
            continue
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if text.replace(" ", "x").isprintable() and "\ufffd" not in text:
            ids.append(token_id)
    return np.array(ids, np.int32)


class SimulatedRunner:
    """`step_ms` is T. `wait_until(ns)` sleeps until a CLOCK_MONOTONIC time; tests may pass their own."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        special_ids: Sequence[int],
        eos_id: int,
        *,
        step_ms: float,
        max_model_len: int,
        num_blocks: int,
        block_size: int = 16,
        script: dict[int, list[list[int]]] | None = None,
        wait_until: Callable[[int], None] | None = None,
    ) -> None:
        self._script = script or {}
        widest = max((len(step) for steps in self._script.values() for step in steps), default=1)
        self.info = RunnerInfo(
            name=f"simulated, a step every {step_ms:g} ms",
            vocab_size=len(token_bytes),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_tokens_per_step=widest,
            max_guesses=0 if self._script else MOST_GUESSES,
        )
        self._step_ns = max(1, int(step_ms * 1e6))
        self._plain = plain_ids(token_bytes, special_ids)
        self._draws = Draws(self._plain)
        self._eos_id = eos_id
        self._wait_until = wait_until or _sleep_until

    def run(self, batch: Batch, sampling: SamplingState) -> StepOutput:
        """Sleep until the step's end, then answer. Grid points are absolute, so one late step does not delay the next."""
        places = places_of(batch)
        rows = places.rows
        drawn, token_ids = self._draws.of(rows, places.ahead, sampling)
        if sampling.bias or sampling.has_limits:
            token_ids = token_ids.copy()
        for i, row in enumerate(rows.tolist() if sampling.bias else ()):
            if row in sampling.bias:
                ids, values = sampling.bias[row]
                if values.max() >= FORCING_BIAS:
                    token_ids[i] = ids[values.argmax()]
        for i, row in enumerate(rows.tolist() if sampling.has_limits else ()):
            mask, banned = sampling.mask(row), sampling.bad_ids(row)
            may: npt.NDArray[np.integer]
            if mask is not None:
                may = np.flatnonzero(allowed(mask[None], self.info.vocab_size)[0])
            elif banned is not None and token_ids[i] in banned:
                may = self._plain
            else:
                continue
            may = may if banned is None else np.setdiff1d(may, banned)
            token_ids[i] = may[drawn[i] % len(may)] if len(may) else self._eos_id
        kept = kept_of(batch, places, token_ids)
        token_ids, counts = kept.token_ids, kept.counts
        if places.ahead is not None:
            rows = batch.rows[batch.sample_seqs]
        if self._script:
            token_ids, counts = self._follow_script(rows, token_ids, sampling)
        logprobs, top = None, None
        if np.count_nonzero(sampling.num_logprobs >= 0):  # perhaps in a row of nobody
            logprobs, top = self._logprobs(token_ids, sampling.num_logprobs[rows])
        due = (time.monotonic_ns() // self._step_ns + 1) * self._step_ns
        self._wait_until(due)
        scores = tuple(map(self._score, batch.prompt_parts))
        now = time.monotonic_ns()
        return StepOutput(token_ids, now, counts, logprobs, top, prompt_scores=scores)

    def _score(self, part: PromptPart) -> PromptScores:
        """A part of a prompt, as if each of its tokens had been drawn."""
        num_tokens, num_top = len(part.token_ids), min(part.num_top, self.info.vocab_size)
        values, top = self._logprobs(part.token_ids[None], np.array([num_top], np.int32))
        assert values is not None
        none = np.zeros((num_tokens, 0), np.int32), np.zeros((num_tokens, 0), np.float32)
        return PromptScores(part, values[0], *(top or {}).get(0, none))

    def _logprobs(
        self, token_ids: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.float32] | None, dict[int, tuple[I4, F4]] | None]:
        """For those who ask: halves of what is left, for the token and for the ids behind it. They cost what real ones cost."""
        if not np.count_nonzero(wanted >= 0):
            return None, None
        most = int(wanted.max())
        ranks = np.arange(max(1, most), dtype=np.int32)
        ids = (token_ids[:, :, None] + ranks) % self.info.vocab_size
        values = np.broadcast_to(-np.log(np.float32(2)) * (ranks + 1), ids.shape).astype(np.float32)
        top = {
            int(i): (ids[i, :, : wanted[i]], values[i, :, : wanted[i]])
            for i in np.flatnonzero(wanted > 0)
        }
        return values[:, :, 0], top

    def _follow_script(
        self, rows: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32], sampling: SamplingState
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        wide = np.zeros((len(rows), self.info.max_tokens_per_step), np.int32)
        wide[:, :1] = token_ids
        counts = np.ones(len(rows), np.int32)
        for i, row in enumerate(rows.tolist()):
            steps = self._script.get(int(sampling.seed[row]))
            if steps is None:
                continue
            ids = self._scripted(steps, int(sampling.position[row]))
            wide[i, : len(ids)] = ids
            counts[i] = len(ids)
        return wide, counts

    def _scripted(self, steps: list[list[int]], position: int) -> list[int]:
        """The step that begins at `position` of the script."""
        for step in steps:
            if position < len(step):
                return step[position:]
            position -= len(step)
        return [self._eos_id]

    def close(self) -> None:
        """Nothing is held."""


def _sleep_until(due_ns: int) -> None:
    left = due_ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)
