"""--cpu-precision: what each value computes with, how near that is to transformers in float32, and what cannot be had."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import prepared

from shmserve.config import PRECISIONS_OF, Config, ConfigError, WorkerConfig
from shmserve.request import SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker.batch import Batch
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.models.config import UnknownArchitectureError
from shmserve.worker.runner_choice import build_runner
from shmserve.worker.sampling_state import SamplingState

transformers = pytest.importorskip("transformers")

VOCAB, BLOCK = 96, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[5, 17, 80, 3, 44], [9] * 7, [*range(30, 50)]]
MOST_ERROR = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.08}
"""Root mean square of the log-probabilities' differences, relative to their spread. Measured: 6e-7, 0.007, 0.03."""


def saved(folder: Path, name: str = "Llama") -> Path:
    """A checkpoint in bfloat16, as most are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        config = getattr(transformers, f"{name}Config")(**SIZES)
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(0.2 * torch.randn_like(parameter))
        model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def exact(llama):
    """Log-probabilities of the token behind each prompt, by transformers in float32."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return torch.stack(logits).log_softmax(-1).numpy()


def built(folder: Path, precision: str, runner: str = "auto"):
    TokenBytes.from_list([b"x"] * VOCAB).save(folder / "token_bytes.bin")
    model = prepared(folder, bos_token_id=1, eos_token_ids=(2,))
    worker = WorkerConfig(
        runner=runner,
        cpu_precision=precision,
        kv_cache_bytes=4 << 20,
        num_threads=1,
        max_num_seqs=4,
    )
    config = replace(Config(), worker=worker)
    config.validate()
    joined = SimpleNamespace(config=config)
    return build_runner(joined, model, lambda *_: None)[0]


def logprobs_of(runner) -> np.ndarray:
    """f4[prompts, VOCAB], of the token behind each of PROMPTS, computed together."""
    counts = [len(prompt) for prompt in PROMPTS]
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
    table = np.arange(1, 7, dtype=np.int32).reshape(3, 2)
    owners = np.repeat(np.arange(3), counts)
    rows = np.arange(3, dtype=np.int32)
    state = SamplingState(3, VOCAB)
    for row in rows.tolist():
        state.set(row, SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB), (), 0)
    output = runner.run(
        Batch(
            step=1,
            rows=rows,
            token_ids=np.concatenate(PROMPTS).astype(np.int32),
            positions=positions,
            kv_slots=(table[owners, positions // BLOCK] * BLOCK + positions % BLOCK).astype(
                np.int32
            ),
            cu_seqlens=np.cumsum([0, *counts]).astype(np.int32),
            block_table=table,
            kv_lens=np.array(counts, np.int32),
            sample_seqs=rows,
            is_decode=False,
        ),
        state,
    )
    assert output.top is not None
    found = np.full((3, VOCAB), np.nan, np.float32)
    for row in rows.tolist():
        ids, values = output.top[row]
        found[row, ids[0]] = values[0]
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_answer_is_transformers_own_as_far_as_the_precision_goes(llama, exact, precision):
    runner = built(llama, precision)
    found = logprobs_of(runner)
    error = np.sqrt(np.mean((found - exact) ** 2)) / exact.std()
    assert error < MOST_ERROR[precision]
    # And each rounds more than the one before it: none of them is another under a false name.
    finer = {"bf16": "fp32", "int8": "bf16"}.get(precision)
    assert finer is None or error > MOST_ERROR[finer]
    assert runner.info.name.startswith(
        {"fp32": "torch-cpu", "bf16": "torch-cpu-bf16", "int8": "cpu-"}[precision]
    )
    assert runner.info.name.endswith("bf16") == (precision == "bf16")
    runner.close()


def test_bf16_matrices_take_half_the_memory(llama):
    sizes = {}
    for precision in ("fp32", "bf16"):
        runner = built(llama, precision)
        weights = runner._decoder._weights
        layer = weights.layers[0]
        sizes[precision] = [t.nbytes for t in (weights.embedding, layer.qkv, layer.gate_up)]
        assert layer.attention_norm.dtype == torch.float32
        runner.close()
    assert [2 * size for size in sizes["bf16"]] == sizes["fp32"]


def test_what_the_kernels_do_not_compute_is_refused_in_int8_and_not_run_in_another(tmp_path):
    folder = saved(tmp_path, "Gemma")
    with pytest.raises(KernelsError, match="the C kernels do not compute gemma"):
        built(folder, "int8")
    runner = built(folder, "auto")
    assert runner.info.name == "torch-cpu"
    runner.close()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_family_of_transformers_only_is_refused_in_what_its_class_is_not_run_in(
    tmp_path, precision
):
    with pytest.raises(UnknownArchitectureError, match="gpt_neox"):
        built(saved(tmp_path, "GPTNeoX"), precision)


@pytest.mark.parametrize(
    ("runner", "precision"),
    [
        (runner, precision)
        for runner, possible in PRECISIONS_OF.items()
        for precision in ("fp32", "bf16", "int8")
        if precision not in possible
    ],
)
def test_a_runner_that_cannot_is_refused_with_both_flags_and_what_is_possible(runner, precision):
    config = replace(Config(), worker=WorkerConfig(runner=runner, cpu_precision=precision))
    words = rf"^--cpu-precision {precision} cannot be had with --runner {runner} \(possible: auto"
    with pytest.raises(ConfigError, match=words):
        config.validate()
