"""Rank 0 and real other ranks: processes that load their parts, compute with it, and whose death it hears of at once."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from together import LIMITS, generated, prepared, state_of

from shmserve.config import Config, ConfigError, WorkerConfig
from shmserve.models import PreparedModel
from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError
from shmserve.worker.parallel.lead import Plan, kind_for, lead, shared_runner
from shmserve.worker.torch_runner import TorchRunner

PATIENCE_S = 30.0
PROMPTS = [[5, 9, 200], [17], list(range(40, 61))]


@pytest.fixture(scope="module")
def model(toy) -> PreparedModel:
    """A toy as a process finds a model that was prepared."""
    folder = toy(attention_bias=True).weights
    return prepared(folder)


@pytest.mark.slow
def test_real_ranks_give_one_ranks_tokens_and_a_death_among_them_is_told(model):
    options = {key: value for key, value in LIMITS.items() if key != "progress"}
    plan = Plan(
        num_ranks=2,
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
        (pid,) = ranks.pids
        assert generated(runner, PROMPTS, state_of(), 12) == expected
        assert lost.empty()
        os.kill(pid, signal.SIGKILL)
        told = lost.get(timeout=PATIENCE_S)
        assert told == f"rank 1 of 2 (pid {pid}) was killed by SIGKILL"
    finally:
        runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


LEAD = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from together import LIMITS, prepared
from shmserve.worker.parallel.lead import Plan, lead
from shmserve.worker.parallel.ranks import end_worker
options = {key: value for key, value in LIMITS.items() if key != "progress"}
log = ("worker[0]", "warning", "text")
plan = Plan(num_ranks=2, kind="torch", folder="/nowhere", options=options, log=log)
lead(prepared(Path(sys.argv[1])), plan, end_worker(lambda said: print(said["error"], flush=True)), print)
"""


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_the_worker_which_waits_for_it(model):
    """Rank 0 is in native code then, and waits for somebody who will never come."""
    ours = map(str, Path(__file__).parents[:2])  # together.py, checkpoints.py
    done = subprocess.run(
        [sys.executable, "-c", LEAD, str(model.folder), *ours, os.getcwd()],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert re.search(
        r"^rank 1 of 2 \(pid \d+\) failed: /nowhere: not a prepared", done.stdout, re.M
    )


def joined(**worker) -> SimpleNamespace:
    config = Config(worker=WorkerConfig(tensor_parallel=4, **worker))
    return SimpleNamespace(config=config, index=0, link=None)


def test_a_model_that_cannot_be_shared_is_refused_before_anybody_is_started(model):
    with pytest.raises(ModelLoadError, match="6 heads over 3 kv heads cannot be shared among 4"):
        shared_runner(joined(), model, LIMITS, is_cuda=False)


def config_of(num_ranks: int, **worker) -> WorkerConfig:
    return WorkerConfig(tensor_parallel=num_ranks, **worker)


def test_what_our_decoder_does_not_compute_is_left_to_transformers_unless_a_runner_was_named(
    tmp_path,
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox"}))
    other = SimpleNamespace(weights=tmp_path, format="safetensors")
    assert kind_for(other, config_of(2), is_cuda=False) == "hf"
    for told in ({"runner": "torch"}, {"cpu_precision": "bf16"}):
        with pytest.raises(UnknownArchitectureError, match="gpt_neox"):
            kind_for(other, config_of(2, **told), is_cuda=False)


def test_our_decoder_computes_what_it_knows(model):
    assert kind_for(model, config_of(2), is_cuda=False) == "torch"
    assert kind_for(model, config_of(2, runner="hf"), is_cuda=False) == "hf"


def test_ranks_on_gpus_that_torch_does_not_see_are_refused(model, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert kind_for(model, config_of(2), is_cuda=True) == "cuda"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="--tensor-parallel 2 needs 2 GPUs, and torch sees 1"):
        kind_for(model, config_of(2), is_cuda=True)


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
            r"--tensor-parallel 2 cannot be had with --runner simulated \(possible: auto, torch, cuda, hf\)",
        ),
        ({"tensor_parallel": 2, "runner": "cpu"}, "2 cannot be had with --runner cpu"),
        (
            {"tensor_parallel": 2, "cpu_precision": "int8"},
            "--tensor-parallel 2 cannot be had with --cpu-precision int8",
        ),
    ],
)
def test_what_ranks_cannot_have_is_refused_by_name(worker, reason):
    with pytest.raises(ConfigError, match=reason):
        Config(worker=WorkerConfig(**worker)).validate()


@pytest.mark.parametrize("runner", ["auto", "torch", "cuda", "hf"])
def test_what_ranks_can_compute_by_is_taken(runner):
    Config(worker=WorkerConfig(tensor_parallel=2, runner=runner)).validate()
    Config(worker=WorkerConfig(runner="simulated")).validate()
