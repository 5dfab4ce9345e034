"""A class of transformers over two ranks: its own plan shares it, our attention attends, and the tokens are one rank's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from together import LIMITS, generated, prepared, state_of

from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.parallel.lead import Plan, lead

transformers = pytest.importorskip("transformers")

PROMPTS = [[5, 9, 200], [17], list(range(40, 61))]
SIZES = {
    "vocab_size": 251,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def hf_runner():
    """The module: it takes seconds, which those who only collect tests need not wait."""
    from shmserve.worker import hf_runner

    return hf_runner


@pytest.fixture(scope="module")
def hf_loading():
    """As above."""
    from shmserve.worker import hf_loading

    return hf_loading


@pytest.fixture
def neox(tmp_path):
    torch.manual_seed(3)
    config = transformers.GPTNeoXConfig(**SIZES)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    return prepared(tmp_path)


@pytest.mark.slow
def test_two_real_ranks_give_one_ranks_tokens(neox, hf_runner):
    pytest.importorskip("accelerate")
    alone = hf_runner.HFRunner(neox, **LIMITS)
    expected = generated(alone, PROMPTS, state_of(), 12)
    options = {key: value for key, value in LIMITS.items() if key != "progress"}
    log = ("worker[0]", "warning", "text")
    plan = Plan(num_ranks=2, kind="hf", folder=str(neox.folder), options=options, log=log)
    lost: list[str] = []
    try:
        runner, _ = lead(neox, plan, lost.append, lambda what, share: None)
        try:
            assert runner.info == replace(alone.info, name="hf-cpu, 2 ranks")
            assert generated(runner, PROMPTS, state_of(), 12) == expected
        finally:
            runner.close()
    finally:
        dist.destroy_process_group()  # torch's default group, which transformers asks for
    assert not lost
    alone.close()


def config_of(**changes):
    text = SimpleNamespace(
        **({"num_attention_heads": 4, "base_model_tp_plan": {"layers.*": "colwise"}} | changes)
    )
    return SimpleNamespace(model_type="neox", get_text_config=lambda decoder: text)


@pytest.mark.parametrize(
    ("changes", "has_accelerate", "reason"),
    [
        ({"base_model_tp_plan": None}, True, "no plan by which neox could be shared"),
        ({"num_attention_heads": 5}, True, "evenly, and the model has 5 over 5 kv heads"),
        ({"num_key_value_heads": 1}, True, "evenly, and the model has 4 over 1 kv heads"),
        ({}, False, r"only where accelerate is installed \(pip install accelerate\)"),
    ],
)
def test_what_transformers_cannot_share_is_refused_by_name(
    hf_loading, changes, has_accelerate, reason, tmp_path, monkeypatch
):
    find = {"accelerate": object() if has_accelerate else None}.get
    monkeypatch.setattr(hf_loading.importlib.util, "find_spec", find)
    with pytest.raises(ModelLoadError, match=rf"^{tmp_path}: --tensor-parallel 2: .*{reason}$"):
        hf_loading.refuse_unshared(tmp_path, config_of(**changes), 2)


def test_a_model_with_a_plan_is_taken(hf_loading, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_loading.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    hf_loading.refuse_unshared(tmp_path, config_of(), 2)
