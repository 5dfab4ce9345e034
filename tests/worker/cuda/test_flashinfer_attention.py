"""flashinfer in place of our attention kernels: what it is told, when it is refused, and the same tokens from a toy model.

The library is fake_flashinfer.py: the real one's arguments and checks, and the reference's arithmetic.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import write_toy

from shmserve.config import Config, ConfigError, WorkerConfig
from shmserve.worker import runner_choice
from shmserve.worker.cuda import flashinfer_attention
from shmserve.worker.cuda.flashinfer_attention import (
    LEAST_WORKSPACE_BYTES,
    pages_of,
    refusal,
    workspace_bytes,
)
from shmserve.worker.cuda.link import Passed
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.torch_runner import open_model


def neighbour(name: str):
    """The module of that name beside this one; tests are no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


fake = neighbour("fake_flashinfer")
toy = neighbour("test_runner")

HIDDEN, FFN, VOCAB, DIM, WINDOW, LAYERS = 128, 128, 256, 64, 20, 4
SIXTEEN = {"dtype": torch.bfloat16, "max_num_seqs": 4}
SINGLE = {**SIXTEEN, "max_num_seqs": 1}  # for what is interpreted: a bucket takes seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Gemma 2: every other layer has a window, attention has a soft cap, and queries a scale of their own."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(
        folder,
        seed=6,
        model_type="gemma2",
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=DIM,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    return SimpleNamespace(weights=folder, format="safetensors")


@pytest.fixture
def installed(monkeypatch):
    """The library, importable, and a device that it computes on."""
    fake.reset()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(flashinfer_attention, "capability_of", lambda device: (9, 0))
    yield fake
    fake.reset()


@pytest.fixture(scope="module")
def expected(model):
    """The tokens that our own operations give; the prompts are longer than the window, shorter, and of one token."""
    runner = toy.cuda_runner(model, attention_backend="triton", **SIXTEEN)
    yield toy.generated(runner, PROMPTS, toy.state_of())
    runner.close()


PROMPTS = [list(range(40, 70)), [17], [5, 9, 200]]
CONFIG = SimpleNamespace(head_dim=128, num_heads=32, num_kv_heads=8)


class RecordingCapture:
    """A recording knows the wrappers that ran in it; a replay of it must find those of its own bucket planned."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, work):
        before = len(fake.runs)
        fake.is_recording = True
        work()
        fake.is_recording = False
        recorded = fake.runs[before:]
        assert len(recorded) == LAYERS

        def replay() -> None:
            at = len(fake.runs)
            work()
            assert fake.runs[at:] == recorded
            self.num_replays += 1

        return replay


def test_tokens_are_those_of_our_own_attention_planned_once_a_step_and_run_once_a_layer(
    model, expected, installed, caplog
):
    """Steps with prompts launched, decode steps replayed with a padding row; layers with two windows have a plan each."""
    caplog.set_level(logging.INFO)
    capture = RecordingCapture()
    runner = toy.cuda_runner(model, attention_backend="flashinfer", capture=capture, **SIXTEEN)
    assert [r.getMessage() for r in caplog.records if "attention" in r.getMessage()] == [
        "attention: flashinfer 0.7.4"
    ]
    installed.plans.clear()
    installed.runs.clear()
    assert toy.generated(runner, PROMPTS, toy.state_of()) == expected
    assert capture.num_replays == 5
    num_windows, num_steps = 2, 6
    assert len(installed.plans) == num_windows * num_steps
    assert len(installed.runs) == LAYERS * num_steps
    kinds = [type(wrapper).__name__.removeprefix("Batch")[:7] for wrapper in installed.plans]
    assert kinds == ["Prefill"] * num_windows + ["DecodeW"] * num_windows * 5
    runner.close()


def test_a_carried_step_is_planned_ahead_of_its_tokens(model, expected, installed):
    """Two steps in flight, and the rows of the second are known by their lengths alone."""
    runner, state = toy.cuda_runner(model, **SIXTEEN), toy.state_of()
    rows = range(len(PROMPTS))
    runner.launch(toy.batch_of(list(enumerate(PROMPTS)), dict.fromkeys(rows, 0)), state)
    follow = toy.batch_of([(row, [0]) for row in rows], {r: len(PROMPTS[r]) for r in rows})
    runner.launch(follow, state, np.arange(3, dtype=np.int32))
    first, second = runner.collect(), runner.collect()
    tokens = np.concatenate([first.token_ids, second.token_ids], axis=1)
    assert tokens.tolist() == [row[:2] for row in expected]
    runner.close()


def test_a_plan_waits_for_the_copies_of_the_plan_before_it(model, installed):
    class Copying(Passed):
        num_waits = 0

        def wait(self):
            type(self).num_waits += 1

    config, _ = open_model(model.weights, model.format)
    link = SimpleNamespace(
        device=torch.device("cpu"),
        host_words=lambda count: torch.zeros(count, dtype=torch.int32),
        copy=lambda target, source: target.copy_(source),
        mark=Copying,
    )
    attention = flashinfer_attention.FlashInferAttention(
        fake, config, torch.bfloat16, link, (1, 2), max_num_seqs=2, max_blocks=4, block_size=16
    )
    attention.plan_padding(2)
    assert Copying.num_waits == 0
    attention.plan_padding(1)
    assert Copying.num_waits == 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 48])
def test_pages_are_the_used_blocks_and_a_padding_row_is_a_token_of_block_0(length):
    table = np.array([[7, 3, 9], [4, 0, 0]], np.int32)
    indptr, ids, last = pages_of(table, np.array([length, 5], np.int32), 16, 2)
    used = -(-length // 16)
    assert indptr.tolist() == [0, used, used + 1, used + 2, used + 3]
    assert ids.tolist() == [*[7, 3, 9][:used], 4, 0, 0]
    assert last.tolist() == [length - 16 * (used - 1), 5, 1, 1]
    assert {indptr.dtype, ids.dtype, last.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "capability", "reason"),
    [
        (128, torch.bfloat16, None, "needs a CUDA device"),
        (128, torch.bfloat16, (7, 5), "needs compute capability 8.0, the device has 7.5"),
        (128, torch.float32, (9, 0), "computes in 16 bits, not in float32"),
        (80, torch.bfloat16, (9, 0), "has heads of 64, 128, 256, the model has heads of 80"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(head_dim, dtype, capability, reason):
    config = SimpleNamespace(head_dim=head_dim)
    assert refusal(config, dtype, capability) == f"flashinfer {reason}"
    assert refusal(CONFIG, torch.bfloat16, (8, 0)) is None


def attention_lines(model, caplog, **options) -> list[str]:
    caplog.set_level(logging.INFO)
    toy.cuda_runner(model, **SIXTEEN, **options).close()
    return [r.getMessage() for r in caplog.records if "attention" in r.getMessage()]


def test_auto_falls_back_to_the_kernels_and_says_why_where_it_is_not_installed(
    model, installed, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # importing it raises ModuleNotFoundError
    assert attention_lines(model, caplog) == ["attention: reference (flashinfer is not installed)"]
    words = r"^--attention-backend flashinfer: flashinfer is not installed$"
    with pytest.raises(ModelLoadError, match=words):
        toy.cuda_runner(model, attention_backend="flashinfer", **SIXTEEN)


def test_auto_takes_it_where_it_computes_and_it_is_not_asked_where_triton_is_wanted(
    model, installed, caplog
):
    assert attention_lines(model, caplog) == ["attention: flashinfer 0.7.4"]
    installed.reset()
    caplog.clear()
    assert attention_lines(model, caplog, attention_backend="triton") == ["attention: reference"]
    assert not installed.plans


def test_a_library_that_computes_something_else_is_refused_at_start(model, installed, caplog):
    installed.window_error = 1
    (line,) = attention_lines(model, caplog)
    assert line.startswith("attention: reference (flashinfer computes something else (window 20, ")


def test_a_library_that_cannot_compile_is_refused_at_start_in_one_line(
    model, installed, monkeypatch, caplog
):
    def plan(self, *args, **kwargs):
        raise RuntimeError("Could not find nvcc\n and default cuda_home='/usr/local/cuda'")

    monkeypatch.setattr(fake.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    (line,) = attention_lines(model, caplog)
    assert "\n" not in line
    assert "flashinfer fails on a trial: Could not find nvcc and default cuda_home=" in line


def test_the_workspace_holds_the_parts_of_every_recorded_row_and_of_a_whole_grid():
    assert workspace_bytes(CONFIG, 256, 132) == LEAST_WORKSPACE_BYTES
    many_heads = SimpleNamespace(head_dim=256, num_heads=256, num_kv_heads=64)
    assert workspace_bytes(many_heads, 256, 132) >= 256 * 64 * 16 * 256 * 4 > LEAST_WORKSPACE_BYTES
    wide = SimpleNamespace(head_dim=256, num_heads=8, num_kv_heads=1)
    assert workspace_bytes(wide, 1, 600) >= 2 * 600 * 128 * 256 * 4 > LEAST_WORKSPACE_BYTES


@pytest.mark.parametrize("runner", ["cpu", "torch", "hf", "simulated"])
def test_a_backend_is_refused_with_a_runner_that_never_uses_a_gpu(runner):
    worker = WorkerConfig(runner=runner, attention_backend="flashinfer")
    words = f"^--attention-backend flashinfer cannot be had with --runner {runner} "
    with pytest.raises(ConfigError, match=words):
        replace(Config(), worker=worker).validate()


def test_a_backend_is_refused_where_auto_finds_no_gpu(model, monkeypatch):
    monkeypatch.setattr(runner_choice, "has_cuda", lambda: False)
    words = r"^--attention-backend triton: there is no CUDA device"
    with pytest.raises(ModelLoadError, match=words):
        runner_choice.own_runner(WorkerConfig(attention_backend="triton"), model, {})


INTERPRETED = """
import os, sys
sys.path[:0] = sys.argv[1], os.path.dirname(sys.argv[1])
from types import SimpleNamespace
from pathlib import Path
import test_flashinfer_attention as t
from shmserve.worker.cuda.ops import triton_ops
sys.modules["flashinfer"] = t.fake
t.flashinfer_attention.capability_of = lambda device: (9, 0)
model = SimpleNamespace(weights=Path(sys.argv[2]), format="safetensors")
runner = t.toy.cuda_runner(
    model, ops=triton_ops(), attention_backend="flashinfer", **t.SINGLE
)
print(t.toy.generated(runner, t.PROMPTS[2:], t.toy.state_of(), 3))
"""


@pytest.mark.slow
@pytest.mark.triton
def test_beside_interpreted_kernels_it_gives_the_tokens_of_the_reference(model, expected):
    """In a process of its own: triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(Path(__file__).parent), str(model.weights)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [expected[2][:3]]
