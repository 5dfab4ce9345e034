"""The torch runner over several ranks: one rank's logits to float32's rounding, and its greedy tokens.

Ranks add up in another order: a row of o_proj or down_proj is summed within each rank first. So logits differ from one rank's by the
rounding of float32, a few units in its last place for each layer, and by nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from together import LIMITS, Together, batch_of, generated, state_of

from shmserve.request import SamplingParams
from shmserve.worker.batch import PromptPart
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.models.hf_config import config_from_hf
from shmserve.worker.parallel.team import Team
from shmserve.worker.torch_runner import TorchRunner

PROMPTS = [[5, 9, 200], [17], list(range(40, 73))]
SHAPES = {
    "even": ({"num_attention_heads": 4, "num_key_value_heads": 2}, 2),
    "heads 1 and 2, biases, an odd vocabulary": ({"attention_bias": True}, 2),
    "kv heads kept twice": ({"num_attention_heads": 4, "num_key_value_heads": 1}, 2),
    "three ranks, tied": ({"tie_word_embeddings": True}, 3),
}
SLOW_SHAPES = ("even", "three ranks, tied")


def torch_runner(model, team: Team | None = None, **options) -> TorchRunner:
    return TorchRunner(model, **{**LIMITS, **options}, team=team)


def logits_of(runner: TorchRunner, batch) -> torch.Tensor:
    """After every token of the batch."""
    if runner._team is not None:
        runner._team.compute(batch)
    with torch.inference_mode():
        rows = np.arange(batch.num_tokens, dtype=np.int32)
        return runner._logits(runner._hidden(batch), rows).clone()


@pytest.mark.parametrize(
    ("changes", "num_ranks"),
    [
        pytest.param(*shape, id=name, marks=pytest.mark.slow if name in SLOW_SHAPES else ())
        for name, shape in SHAPES.items()
    ],
)
def test_logits_are_those_of_one_rank_and_so_are_greedy_tokens(toy, together, changes, num_ranks):
    model = toy(**changes)
    alone, ranks = torch_runner(model), together(num_ranks, lambda team: torch_runner(model, team))
    batch = batch_of(*((row, prompt, 0) for row, prompt in enumerate(PROMPTS)))
    expected, found = logits_of(alone, batch), logits_of(ranks.first, batch)
    assert found.shape == expected.shape == (37, 251)
    assert float(expected.abs().max()) > 1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tokens = [generated(runner, PROMPTS, state_of(), 20) for runner in (alone, ranks.first)]
    assert tokens[0] == tokens[1]
    assert len({tuple(row) for row in tokens[0]}) == 3
    alone.close()


def test_a_rank_keeps_its_part_only(toy, together):
    model = toy()
    alone, ranks = torch_runner(model), together(2, lambda team: torch_runner(model, team))
    whole = alone._decoder._weights.layers[0]
    first, second = (
        runner._decoder._weights.layers[0] for runner in (ranks.first, ranks.others[1])
    )
    assert first.qkv.shape == ((2 + 1 + 1) * 8, 48) and second.qkv.shape == ((4 + 2 + 2) * 8, 48)
    assert torch.equal(torch.cat([first.output, second.output], 1), whole.output)
    assert torch.equal(torch.cat([first.down, second.down], 1), whole.down)
    assert ranks.first._cache.keys.shape[3] + ranks.others[1]._cache.keys.shape[3] == 3
    assert ranks.first.info == replace(alone.info, name="torch-cpu, 2 ranks")
    alone.close()


def test_draws_guesses_logprobs_and_scores_of_prompts_are_those_of_one_rank(toy, together):
    """All of it happens at rank 0, which asks the others for the logits that each of it needs."""
    model = toy()
    alone, ranks = torch_runner(model), together(2, lambda team: torch_runner(model, team))
    part = PromptPart(2, 4, 1, np.array(PROMPTS[2][1:], np.int32), 3)
    prompts = batch_of(*((row, prompt, 0) for row, prompt in enumerate(PROMPTS)))
    batch = replace(prompts, prompt_parts=(part,), num_drafts=np.array([1, 0, 5], np.int32))
    state = state_of(temperature=0.9, seed=3)
    asked = SamplingParams(max_tokens=9, temperature=0.9, seed=3, top_k=9, num_logprobs=2)
    state.set(0, asked, (), 0)
    one, many = (runner.run(batch, state) for runner in (alone, ranks.first))
    np.testing.assert_array_equal(one.token_ids, many.token_ids)
    assert one.counts is not None and many.counts is not None
    np.testing.assert_array_equal(one.counts, many.counts)
    np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-4)
    (ours,), (theirs,) = one.prompt_scores, many.prompt_scores
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    alone.close()


def test_an_id_beyond_the_tokenizers_is_never_chosen(toy, together):
    model = toy()
    ranks = together(2, lambda team: torch_runner(model, team, num_token_ids=120))
    hot = state_of(temperature=50.0, seed=1)
    tokens = generated(ranks.first, PROMPTS, hot, 8)
    assert ranks.first.info.vocab_size == 120 and max(map(max, tokens)) < 120


@pytest.mark.slow
def test_bfloat16_matrices_are_shared_too(toy, together):
    model = toy()
    alone = torch_runner(model, keeps_bf16=True)
    ranks = together(2, lambda team: torch_runner(model, team, keeps_bf16=True))
    batch = batch_of((0, PROMPTS[2], 0))
    expected, found = logits_of(alone, batch), logits_of(ranks.first, batch)
    torch.testing.assert_close(found, expected, atol=0.02 * float(expected.abs().max()), rtol=0.0)
    alone.close()


def test_a_model_that_cannot_be_shared_is_refused_before_anything_is_read(toy):
    model = toy(num_attention_heads=6, num_key_value_heads=2)
    (model.weights / "model.safetensors").write_bytes(b"")
    config = config_from_hf(model.weights / "config.json")
    with pytest.raises(ModelLoadError, match="6 heads over 2 kv heads cannot be shared among 4"):
        Team(SimpleNamespace(rank=0, size=4)).share_of(config, model.weights)


@pytest.mark.slow
def test_the_real_model_gives_the_same_greedy_tokens_over_two_ranks(default_model, together):
    """A GGUF file, 9 heads over 3 KV heads: rank 0 has one of them and rank 1 two."""
    options = {"kv_cache_bytes": 64 << 20}
    alone = torch_runner(default_model, **options)
    text = "The kettle had been on the stove for twelve minutes when the letter came."
    ids = default_model.tokenizer().encode(text, add_special_tokens=False).ids
    prompts = [ids, ids[:5], ids[3:9]]
    batch = batch_of(*((row, prompt, 0) for row, prompt in enumerate(prompts)))
    expected = logits_of(alone, batch)
    tokens = generated(alone, prompts, state_of(), 30)
    alone.close()
    ranks: Together = together(2, lambda team: torch_runner(default_model, team, **options))
    found = logits_of(ranks.first, batch)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 1e-5
    assert generated(ranks.first, prompts, state_of(), 30) == tokens
