"""Rank 0 and real other ranks: processes that load their parts, compute with it, and whose death it hears of at once."""

from __future__ import annotations

import json
import os
import queue
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from together import LIMITS, generated, state_of

from shmserve.config import Config, ConfigError, WorkerConfig
from shmserve.models import FORMAT_VERSION, PreparedModel
from shmserve.token_bytes import TokenBytes
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.parallel.lead import Plan, check, lead, shared_runner
from shmserve.worker.torch_runner import TorchRunner

PATIENCE_S = 30.0
PROMPTS = [[5, 9, 200], [17], list(range(40, 61))]


@pytest.fixture(scope="module")
def model(toy) -> PreparedModel:
    """A toy as a process finds a model that was prepared."""
    folder = toy(attention_bias=True).weights
    return prepared(folder)


def prepared(folder: Path) -> PreparedModel:
    model = PreparedModel(
        folder=folder,
        name="toy",
        spec="toy",
        weights=folder,
        format="safetensors",
        architecture="llama",
        vocab_size=251,
        context_length=128,
        bos_token_id=None,
        eos_token_ids=(0,),
        pad_token_id=None,
        unk_token_id=None,
        add_bos_token=False,
        special_token_ids=(),
        chat_template=None,
        token_bytes_exact=True,
        strips_leading_space=False,
    )
    TokenBytes.from_list([b"x"] * 251).save(folder / "token_bytes.bin")
    values = {key: value for key, value in asdict(model).items() if key not in ("folder", "chat_template")}
    values |= {"weights": str(folder), "format_version": FORMAT_VERSION}
    (folder / "model.json").write_text(json.dumps(values))
    return model


def test_real_ranks_give_one_ranks_tokens_and_a_death_among_them_is_told(model):
    options = {key: value for key, value in LIMITS.items() if key != "progress"}
    plan = Plan(
        num_ranks=3,
        kind="torch",
        folder=str(model.folder),
        options=options,
        log=("worker[0]", "warning", "text"),
    )
    alone = TorchRunner(model, **LIMITS)
    expected = generated(alone, PROMPTS, state_of(), 12)
    alone.close()
    lost: queue.Queue[str] = queue.Queue()
    runner, ranks = lead(model, plan, lost.put, lambda what, share: None)
    try:
        assert len(ranks.pids) == 2
        assert generated(runner, PROMPTS, state_of(), 12) == expected
        assert lost.empty()
        os.kill(ranks.pids[1], signal.SIGKILL)
        told = lost.get(timeout=PATIENCE_S)
        assert told == f"rank 2 of 3 (pid {ranks.pids[1]}) was killed by SIGKILL"
    finally:
        runner.close()
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def joined(**worker) -> SimpleNamespace:
    config = Config(worker=WorkerConfig(tensor_parallel=4, **worker))
    return SimpleNamespace(config=config, index=0, link=None)


def test_a_model_that_cannot_be_shared_is_refused_before_anybody_is_started(model):
    with pytest.raises(ModelLoadError, match="6 heads over 3 kv heads cannot be shared among 4"):
        shared_runner(joined(), model, LIMITS, is_cuda=False)


def test_a_class_of_transformers_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    other = SimpleNamespace(weights=tmp_path, format="safetensors")
    with pytest.raises(ModelLoadError, match="gpt_neox.* one rank only, not with --tensor-parallel 2"):
        check(other, 2, is_cuda=False)


def test_ranks_on_gpus_that_torch_does_not_see_are_refused(model, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="--tensor-parallel 2 needs 2 GPUs, and torch sees 1"):
        check(model, 2, is_cuda=True)


def test_a_way_to_attend_on_a_gpu_is_refused_on_the_cpu(toy):
    even = prepared(toy(num_attention_heads=8, num_key_value_heads=4).weights)
    with pytest.raises(ModelLoadError, match="--attention-backend flashinfer: there is no CUDA"):
        shared_runner(joined(attention_backend="flashinfer"), even, LIMITS, is_cuda=False)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"tensor_parallel": 0}, "--tensor-parallel must be 1 to 64, got 0"),
        (
            {"tensor_parallel": 2, "runner": "simulated"},
            r"--tensor-parallel 2 cannot be had with --runner simulated \(possible: auto, torch, cuda\)",
        ),
        ({"tensor_parallel": 2, "runner": "cpu"}, "2 cannot be had with --runner cpu"),
        ({"tensor_parallel": 2, "runner": "hf"}, "2 cannot be had with --runner hf"),
        (
            {"tensor_parallel": 2, "cpu_precision": "int8"},
            "--tensor-parallel 2 cannot be had with --cpu-precision int8",
        ),
    ],
)
def test_what_ranks_cannot_have_is_refused_by_name(worker, reason):
    with pytest.raises(ConfigError, match=reason):
        Config(worker=WorkerConfig(**worker)).validate()


@pytest.mark.parametrize("runner", ["auto", "torch", "cuda"])
def test_what_ranks_can_compute_by_is_taken(runner):
    Config(worker=WorkerConfig(tensor_parallel=2, runner=runner)).validate()
    Config(worker=WorkerConfig(runner="simulated")).validate()
