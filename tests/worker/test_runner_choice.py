"""Which runner `--runner auto` takes for a model: our own decoder where it knows the model, else transformers' class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import prepared
from safetensors.torch import load_file, save_file

from shmserve.config import Config, ModelConfig, WorkerConfig
from shmserve.token_bytes import TokenBytes
from shmserve.worker import runner_choice
from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError
from shmserve.worker.runner_choice import build_runner, has_cuda, kv_cache_bytes

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saved(folder: Path, name: str) -> Path:
    config = getattr(transformers, f"{name}Config")(**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def chosen(folder: Path, runner: str, weights: Path | None = None, max_model_len=0, **changes):
    """The runner that a worker builds for the model in `folder`, whose last 3 ids have no token."""
    TokenBytes.from_list([b"x"] * 37 + [b""] * 3).save(folder / "token_bytes.bin")
    model = prepared(
        weights or folder,
        format="gguf" if weights else "safetensors",
        architecture="",
        vocab_size=40,
        context_length=64,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    limits = {"kv_cache_bytes": 4 << 20, "num_threads": 1, "max_num_seqs": 2} | changes
    worker = WorkerConfig(runner=runner, **limits)
    told = ModelConfig(max_model_len=max_model_len)
    joined = SimpleNamespace(config=replace(Config(), worker=worker, model=told))
    return build_runner(joined, model, lambda what, share: None)[0]


@pytest.mark.parametrize("runner", ["auto", "torch", "hf"])
def test_every_runner_ends_the_vocabulary_where_the_tokens_end(tmp_path, runner):
    built = chosen(saved(tmp_path, "Llama"), runner)
    assert built.info.vocab_size == 37
    assert built.info.name.startswith({"auto": ("cpu-", "torch-")}.get(runner, runner))
    built.close()


def test_a_family_that_only_transformers_knows_is_run_by_its_class(tmp_path):
    folder = saved(tmp_path, "GPTNeoX")
    built = chosen(folder, "auto")
    assert built.info.name == "hf-cpu"
    built.close()
    for runner in ("torch", "cpu"):
        with pytest.raises(UnknownArchitectureError, match="gpt_neox"):
            chosen(folder, runner)


def test_a_misshapen_tensor_of_a_known_family_is_no_reason_to_look_further(tmp_path):
    folder = saved(tmp_path, "Llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 47)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.down_proj\.weight") as caught:
        chosen(folder, "auto")
    assert not isinstance(caught.value, UnknownArchitectureError)


def test_what_our_decoder_does_not_compute_is_left_to_transformers(tmp_path):
    """A known family with something of its own in the configuration."""
    folder = saved(tmp_path, "Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    built = chosen(folder, "auto")
    assert built.info.name == "hf-cpu"
    built.close()


def test_an_unknown_gguf_is_refused_with_what_is_known(tmp_path, write_gguf, toy_metadata):
    file = write_gguf(toy_metadata(**{}) | {"general.architecture": "phlogiston"})
    with pytest.raises(ModelLoadError, match=r"'phlogiston' is not supported \(supported: llama"):
        chosen(tmp_path, "auto", file)


@pytest.mark.parametrize("runner", ["torch", "hf"])
def test_a_context_that_the_kv_cache_does_not_hold_is_cut_to_what_it_holds(
    tmp_path, caplog, runner
):
    """Llama 3.2's 131,072 tokens are 4 GiB: by default, a start must not fail for that. What the operator names must be had."""
    folder = saved(tmp_path, "Llama")
    room = {"kv_cache_bytes": 4 * 16 * 2 * 2 * 2 * 16 * 4}  # 4 blocks; the first is padding
    built = chosen(folder, runner, **room)
    assert built.info.max_model_len == 48
    built.close()
    (said,) = [text for text in caplog.messages if "context" in text]
    assert (
        "may have 48 tokens, of the 64 of the model's context" in said
        and "--kv-cache-bytes" in said
    )
    with pytest.raises(
        ModelLoadError, match=r"holds 48 tokens, but one sequence of 64 .*--max-model-len"
    ):
        chosen(folder, runner, max_model_len=64, **room)
    with pytest.raises(ModelLoadError, match="one sequence of 64 "):
        chosen(folder, runner, chunked_prefill=False, **room)
    caplog.clear()
    chosen(folder, runner, max_model_len=40, **room).close()
    chosen(folder, runner).close()
    assert not [text for text in caplog.messages if "context" in text]


def test_the_kv_cache_takes_a_fraction_of_the_free_memory():
    default, half = kv_cache_bytes(0.0), kv_cache_bytes(0.5)
    assert 0 < default <= 1 << 30
    quarter = kv_cache_bytes(0.25)
    assert quarter < half < 3 * quarter  # others take and give memory meanwhile


@pytest.fixture
def gpu(monkeypatch):
    """What torch says of one beside its driver: whether it sees it, and its capability."""

    def make(is_seen: bool, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(runner_choice, "has_driver", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_seen)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return make


def test_a_gpu_that_the_kernels_run_on_is_taken(gpu, caplog):
    gpu(is_seen=True, capability=(8, 0))
    assert has_cuda() and not caplog.messages


def test_auto_computes_on_the_cpu_beside_a_gpu_that_is_too_old_and_says_so(tmp_path, gpu, caplog):
    gpu(is_seen=True, capability=(7, 5))
    built = chosen(saved(tmp_path, "Llama"), "auto")
    assert built.info.name.startswith(("cpu-", "torch-"))
    built.close()
    said = "the CPU computes: the GPU has compute capability 7.5, the kernels need 8.0"
    assert said in caplog.messages


@pytest.mark.parametrize(("told", "level"), [("0", "WARNING"), ("", "INFO")])
def test_a_gpu_that_torch_does_not_see_is_no_secret(gpu, caplog, monkeypatch, told, level):
    """The driver is older than torch's CUDA, or torch is a CPU build; who hides the GPU knows it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
    caplog.set_level("INFO")
    gpu(is_seen=False)
    assert not has_cuda()
    (record,) = caplog.records
    assert record.levelname == level and "sees no CUDA device" in record.message
