"""The CUDA runner over two ranks, on the CPU in plain torch: recorded steps and steps launched ahead, with sums and gathers in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from overlapped import scheduled
from together import LIMITS, Together, batch_of, generated, state_of

from shmserve.request import SamplingParams
from shmserve.worker.batch import PromptPart
from shmserve.worker.cuda.ops import REFERENCE
from shmserve.worker.cuda.runner import CudaRunner
from shmserve.worker.parallel.team import Team
from shmserve.worker.torch_runner import TorchRunner

PROMPTS = [[5, 9, 200], [17], list(range(40, 61))]


class Recording:
    """Records calls, and counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


def cuda_runner(model, team: Team | None = None, **options) -> CudaRunner:
    options = {"device": "cpu", "dtype": torch.float32, "ops": REFERENCE} | options
    return CudaRunner(model, **{**LIMITS, **options}, team=team)


@pytest.fixture(scope="module")
def model(toy):
    """Heads 1 and 2, biases, an odd vocabulary."""
    return toy(attention_bias=True)


@pytest.fixture
def ranks(model, together) -> Together:
    def make(team: Team) -> CudaRunner:
        recording = Recording()
        runner = cuda_runner(model, team, capture=recording)
        runner.recording = recording
        return runner

    return together(2, make)


def test_recorded_steps_give_one_ranks_tokens_at_every_rank(model, ranks):
    expected = generated(TorchRunner(model, **LIMITS), PROMPTS, state_of(), 12)
    assert generated(ranks.first, PROMPTS, state_of(), 12) == expected
    for runner in (ranks.first, ranks.others[1]):
        assert runner.recording.num_recorded == 4  # buckets 1, 2, 4, 8
        assert runner.recording.num_replayed == 11
    assert ranks.first.info.name == "cpu, float32, 2 ranks"


@pytest.mark.slow
def test_logits_of_a_step_are_one_ranks(model, ranks):
    alone = cuda_runner(model)
    batch = batch_of(*((row, prompt, 0) for row, prompt in enumerate(PROMPTS)))
    part = PromptPart(2, 4, 1, np.array(PROMPTS[2][1:], np.int32), 3)
    batch = replace(batch, prompt_parts=(part,))
    one, many = (runner.run(batch, state_of()) for runner in (alone, ranks.first))
    logits = [runner._model.logits[:3] for runner in (alone, ranks.first)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(one.token_ids, many.token_ids)
    (ours,), (theirs,) = one.prompt_scores, many.prompt_scores
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_a_carried_token_is_known_to_every_rank(model, ranks):
    """Two steps in flight; no host says which token is computed in the second."""
    state = state_of(temperature=1.3, seed=9)
    plain = generated(cuda_runner(model), PROMPTS, state, 3)
    state.position[:] = 0
    first, lengths = ranks.first, [len(prompt) for prompt in PROMPTS]
    first.launch(batch_of(*((row, prompt, 0) for row, prompt in enumerate(PROMPTS))), state)
    found = []
    for step in range(2):
        ahead = batch_of(*((row, [0], lengths[row] + step) for row in range(3)))
        first.launch(ahead, state, np.arange(3, dtype=np.int32))
        found.append(first.collect().token_ids[:, 0].tolist())
        state.position += 1
    found.append(first.collect().token_ids[:, 0].tolist())
    assert np.array(found).T.tolist() == plain


def test_rows_that_are_sampled_on_the_host_are_sampled_from_all_ranks_logits(model, ranks):
    alone = cuda_runner(model)
    state = state_of(temperature=0.8, seed=3)
    edited = SamplingParams(max_tokens=9, temperature=0.8, seed=3, logit_bias=((3, 5.0),))
    state.set(1, edited, (), 0)
    assert not ranks.first.can_carry(np.array([1], np.int32), state)
    batch = batch_of(*((row, prompt, 0) for row, prompt in enumerate(PROMPTS)))
    one, many = (runner.run(batch, state) for runner in (alone, ranks.first))
    np.testing.assert_array_equal(one.token_ids, many.token_ids)


def test_steps_launched_ahead_by_the_scheduler_give_one_ranks_tokens(model, ranks):
    requests = [
        (prompt, SamplingParams(max_tokens=4 + 9 * turn, temperature=0.9 * turn, seed=7))
        for turn in range(2)
        for prompt in (*PROMPTS, PROMPTS[2])
    ]
    requests.append((PROMPTS[0], SamplingParams(max_tokens=5, temperature=0.9, top_k=3, seed=1)))
    edited = {"temperature": 0.9, "logit_bias": ((3, 5.0),)}
    requests.append((PROMPTS[0], SamplingParams(max_tokens=5, seed=1, **edited)))
    alone = cuda_runner(model)
    (one, _), (many, num_ahead) = (scheduled(r, requests) for r in (alone, ranks.first))
    assert one == many and num_ahead > 10 and all(one.values())


def test_the_memory_of_the_cache_is_that_of_all_ranks_together(model, ranks):
    alone = cuda_runner(model)
    assert ranks.first.info.num_blocks == alone.info.num_blocks
    kept = [runner._model.keys.shape[3] for runner in (ranks.first, ranks.others[1])]
    assert kept == [1, 2]
    alone.close()
