"""Tiny random models of each architecture against a plain float64 implementation, and what is refused at load."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import prepared, random_weights, write_folder
from safetensors.torch import save_file

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.models import attention
from shmserve.worker.models.config import ModelLoadError, Rope
from shmserve.worker.models.hf_config import config_from_hf
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import TorchRunner, open_model

VOCAB, BLOCK = 61, 4
BASE = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama without grouped heads": {"num_key_value_heads": 4},
    "llama bias": {"attention_bias": True},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "rope of newer files": {
        "rope_theta": None,
        "rope_parameters": {**LLAMA3, "rope_theta": 100.0},
    },
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
    "layer types": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


# --- the plain implementation: one token at a time, float64, rotation by complex numbers


def plain_frequencies(config: dict) -> np.ndarray:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    frequencies = np.array(
        [theta ** (-2 * j / config["head_dim"]) for j in range(config["head_dim"] // 2)]
    )
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        for j, frequency in enumerate(frequencies):
            wavelength = 2 * np.pi / frequency
            original = rope["original_max_position_embeddings"]
            if wavelength > original / rope["low_freq_factor"]:
                frequencies[j] = frequency / rope["factor"]
            elif wavelength >= original / rope["high_freq_factor"]:
                low, high = rope["low_freq_factor"], rope["high_freq_factor"]
                smooth = (original / wavelength - low) / (high - low)
                frequencies[j] = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
    return frequencies


def plain_window(config: dict, layer: int) -> int | None:
    if config["model_type"] == "mistral":
        return config["sliding_window"]
    if not config.get("use_sliding_window"):
        return None
    if "layer_types" in config:
        return 5 if config["layer_types"][layer] == "sliding_attention" else None
    return config["sliding_window"] if layer >= config["max_window_layers"] else None


def plain_logprobs(config: dict, weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Log-softmax after each token, [len(tokens), VOCAB]."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    head, eps = config["head_dim"], config["rms_norm_eps"]
    num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    frequencies = plain_frequencies(config)

    def norm(x, gain):
        return x / np.sqrt(np.mean(x * x) + eps) * gain

    def turn(x, position):
        z = (x[: head // 2] + 1j * x[head // 2 :]) * np.exp(1j * position * frequencies)
        return np.concatenate([z.real, z.imag])

    keys = [[] for _ in range(config["num_hidden_layers"])]
    values = [[] for _ in range(config["num_hidden_layers"])]
    out = []
    for position, token in enumerate(tokens):
        h = w["model.embed_tokens.weight"][token]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = norm(h, w[at + "input_layernorm.weight"])
            parts = {}
            for name, heads in (("q", num_q), ("k", num_kv), ("v", num_kv)):
                y = w[f"{at}self_attn.{name}_proj.weight"] @ x
                y = y + w.get(f"{at}self_attn.{name}_proj.bias", 0.0)
                parts[name] = y.reshape(heads, head)
            if config["model_type"] == "qwen3":
                for name in "qk":
                    gain = w[f"{at}self_attn.{name}_norm.weight"]
                    parts[name] = np.stack([norm(one, gain) for one in parts[name]])
            keys[layer].append([turn(one, position) for one in parts["k"]])
            values[layer].append(parts["v"])
            window = plain_window(config, layer)
            first = 0 if window is None else max(0, position + 1 - window)
            seen_k = np.array(keys[layer][first:])
            seen_v = np.array(values[layer][first:])
            mixed = []
            for index in range(num_q):
                shared = index // (num_q // num_kv)
                scores = seen_k[:, shared] @ turn(parts["q"][index], position) / np.sqrt(head)
                share = np.exp(scores - scores.max())
                mixed.append(share / share.sum() @ seen_v[:, shared])
            h = h + w[at + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
            h = h + w.get(at + "self_attn.o_proj.bias", 0.0)
            x = norm(h, w[at + "post_attention_layernorm.weight"])
            gate, up = w[at + "mlp.gate_proj.weight"] @ x, w[at + "mlp.up_proj.weight"] @ x
            h = h + w[at + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        tied = w["model.embed_tokens.weight"]
        logits = w.get("lm_head.weight", tied) @ norm(h, w["model.norm.weight"])
        out.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
    return np.array(out)


# --- driving the runner


def runner_of(path: Path, format: str = "safetensors", progress=lambda what, share: None, **kwargs):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": None}
    limits |= {"kv_cache_bytes": 1 << 19, "block_size": BLOCK, "num_threads": 1}
    model = prepared(path, format=format, vocab_size=VOCAB, context_length=96)
    return TorchRunner(model, **{**limits, **kwargs}, progress=progress)


def chunk(tokens, start: int, blocks) -> Batch:
    """One sequence that computes `tokens` from position `start` on."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    table = np.array([blocks], np.int32)
    return Batch(
        step=0,
        rows=np.array([0], np.int32),
        token_ids=np.array(tokens, np.int32),
        positions=positions,
        kv_slots=table[0, positions // BLOCK] * BLOCK + positions % BLOCK,
        cu_seqlens=np.array([0, len(tokens)], np.int32),
        block_table=table,
        kv_lens=np.array([start + len(tokens)], np.int32),
        sample_seqs=np.array([0], np.int32),
        is_decode=len(tokens) == 1,
    )


def all_logprobs(output) -> np.ndarray:
    ids, values = output.top[0]
    out = np.full(VOCAB, np.nan)
    out[ids] = values
    return out


def everything() -> SamplingState:
    """Greedy, with the log-probability of every token."""
    state = SamplingState(1)
    asked = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB)
    state.set(0, asked, (), 0)
    return state


BLOCKS = [9, 3, 12, 1, 30, 2, 17, 8, 21, 5, 33, 14]
TOKENS = np.random.default_rng(5).integers(0, VOCAB, 45).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("chunks", [[45], [1] * 45, [20, 1, 11, 13]])
def test_every_architecture_agrees_with_the_plain_implementation(
    tmp_path, monkeypatch, name, chunks
):
    monkeypatch.setattr(attention, "PREFILL_TILE_ROWS", 9)
    config = {**BASE, **ARCHITECTURES[name]}
    weights = random_weights(config)
    runner = runner_of(write_folder(tmp_path, config, weights))
    expected = plain_logprobs(config, weights, TOKENS)
    start, state = 0, everything()
    for size in chunks:
        output = runner.run(chunk(TOKENS[start : start + size], start, BLOCKS), state)
        start += size
        np.testing.assert_allclose(all_logprobs(output), expected[start - 1], atol=2e-4)
    assert output.token_ids[0, 0] == expected[-1].argmax()
    runner.close()


def test_llama_gguf_rows_are_put_into_half_split_order(tmp_path, write_gguf):
    """The same model as GGUF: q and k interleaved, llama3's scaling as the tensor rope_freqs."""
    config = {**BASE, "rope_scaling": LLAMA3, "tie_word_embeddings": True}
    weights = random_weights(config)
    plain = {**BASE, "rope_scaling": None}
    factors = plain_frequencies(plain) / plain_frequencies(config)
    path = write_gguf(gguf_metadata("llama"), gguf_tensors(weights, "llama", factors))
    output = runner_of(path, "gguf").run(chunk(TOKENS, 0, BLOCKS), everything())
    expected = plain_logprobs(config, weights, TOKENS)[-1]
    np.testing.assert_allclose(all_logprobs(output), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_gguf_rows_stay_as_they_are(tmp_path, write_gguf, kind):
    config = {**BASE, "model_type": kind}
    weights = random_weights(config)
    path = write_gguf(gguf_metadata(kind), gguf_tensors(weights, kind))
    output = runner_of(path, "gguf").run(chunk(TOKENS, 0, BLOCKS), everything())
    expected = plain_logprobs(config, weights, TOKENS)[-1]
    np.testing.assert_allclose(all_logprobs(output), expected, atol=2e-4)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_metadata(kind: str) -> dict:
    return {
        "general.architecture": kind,
        f"{kind}.block_count": 3,
        f"{kind}.context_length": 96,
        f"{kind}.embedding_length": 24,
        f"{kind}.feed_forward_length": 40,
        f"{kind}.attention.head_count": 4,
        f"{kind}.attention.head_count_kv": 2,
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{kind}.rope.freq_base": 100.0,
    }


def gguf_tensors(weights: dict[str, np.ndarray], kind: str, factors=None) -> dict:
    out = {}
    for name, array in weights.items():
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = 4 if "q_proj" in name else 2
            array = array.copy()
            for head in range(heads):  # file row 2j is HF row j, file row 2j + 1 is HF row j + 3
                rows = weights[name][head * 6 : head * 6 + 6]
                array[head * 6 : head * 6 + 6 : 2], array[head * 6 + 1 : head * 6 + 6 : 2] = (
                    rows[:3],
                    rows[3:],
                )
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        out[name] = (array.shape, "F32", array.astype("<f4").tobytes())
    if factors is not None:
        out["rope_freqs.weight"] = (factors.shape, "F32", factors.astype("<f4").tobytes())
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_computed_in_float32(tmp_path, dtype):
    weights = random_weights(BASE)
    runner = runner_of(write_folder(tmp_path, BASE, weights, dtype))
    rounded = {name: torch.from_numpy(a).to(dtype).float().numpy() for name, a in weights.items()}
    output = runner.run(chunk(TOKENS, 0, BLOCKS), everything())
    expected = plain_logprobs(BASE, rounded, TOKENS)[-1]
    np.testing.assert_allclose(all_logprobs(output), expected, atol=2e-4)


def test_sharded_files_are_read_by_their_index(tmp_path):
    weights = random_weights(BASE)
    write_folder(tmp_path, BASE, weights)
    expected = all_logprobs(runner_of(tmp_path).run(chunk(TOKENS, 0, BLOCKS), everything()))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in shards.items():
        save_file({name: torch.from_numpy(weights[name]) for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in shards.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    output = runner_of(tmp_path).run(chunk(TOKENS, 0, BLOCKS), everything())
    np.testing.assert_allclose(all_logprobs(output), expected, atol=1e-5)

    index["weight_map"]["model.norm.weight"] = "model-3.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-3\.safetensors: cannot be read"):
        runner_of(tmp_path)


def test_a_tied_head_is_the_embedding_itself_K3(tmp_path):
    config = {**BASE, "tie_word_embeddings": True}
    runner = runner_of(write_folder(tmp_path, config, random_weights(config)))
    weights = runner._decoder._weights
    assert weights.head is weights.embedding


def test_progress_rises_from_tensor_to_tensor_up_to_1(tmp_path):
    for name in ("llama", "llama tied", "llama bias", "qwen2", "qwen3"):
        config = {**BASE, **ARCHITECTURES[name]}
        heard = []
        folder = write_folder(tmp_path / name, config, random_weights(config))
        runner_of(folder, progress=lambda what, share, heard=heard: heard.append(share))
        assert heard == sorted(set(heard))
        assert len(heard) == len(random_weights(config))
        assert heard[-1] == 1.0


# --- what is refused, in one line


def refusal(path: Path, format: str = "safetensors", **kwargs) -> str:
    with pytest.raises(ModelLoadError) as caught:
        runner_of(path, format, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_a_missing_tensor_is_named_with_its_file_and_shape(tmp_path):
    weights = random_weights(BASE)
    del weights["model.layers.1.mlp.up_proj.weight"]
    text = refusal(write_folder(tmp_path, BASE, weights))
    assert (
        f"{tmp_path}/model.safetensors: tensor model.layers.1.mlp.up_proj.weight is missing" in text
    )
    assert "[40, 24]" in text


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path, write_gguf):
    weights = random_weights(BASE)
    weights["model.layers.2.self_attn.k_proj.weight"] = np.zeros((13, 24), np.float32)
    text = refusal(write_folder(tmp_path, BASE, weights))
    assert "model.layers.2.self_attn.k_proj.weight has shape [13, 24], expected [12, 24]" in text
    path = write_gguf(gguf_metadata("qwen2"), gguf_tensors(weights, "qwen2"))
    text = refusal(path, "gguf")
    assert f"{path}: tensor blk.2.attn_k.weight has shape [13, 24], expected [12, 24]" in text


def test_a_head_that_is_not_tied_must_exist(tmp_path):
    weights = random_weights(BASE)
    del weights["lm_head.weight"]
    assert "lm_head.weight is missing" in refusal(write_folder(tmp_path, BASE, weights))


def test_a_type_that_cannot_be_read_is_named(tmp_path):
    weights = random_weights(BASE)
    write_folder(tmp_path, BASE, weights)
    tensors = {name: torch.from_numpy(a) for name, a in weights.items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.norm.weight has type I8" in refusal(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    folder = write_folder(tmp_path, BASE, random_weights(BASE))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert f"{folder}/model.safetensors: cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', expected a number"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 kv heads"),
        ({"head_dim": 5}, "a head size of 5"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "each of the 3 layers"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(tmp_path, change, words):
    folder = write_folder(tmp_path, BASE, random_weights(BASE))
    (folder / "config.json").write_text(json.dumps({**BASE, **change}))
    text = refusal(folder)
    assert text.startswith(f"{folder}/config.json: ") and words in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4, but heads have 6"),
        ({"llama.attention.head_count_kv": [2, 2, 1]}, "head_count_kv differs between layers"),
    ],
)
def test_gguf_metadata_that_cannot_be_computed_are_refused_by_name(write_gguf, change, words):
    metadata = {**gguf_metadata("llama"), **change}
    path = write_gguf(metadata, gguf_tensors(random_weights(BASE), "llama"))
    text = refusal(path, "gguf")
    assert text.startswith(f"{path}: ") and words in text


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.ffn_down.bias",  # granite-code is a llama with biases everywhere
        "blk.1.attn_output.bias",  # the first layer has none
        "blk.0.attn_q_norm.bias",
        "blk.3.attn_norm.weight",  # beyond the layers that there are
        "output.bias",
    ],
)
def test_a_gguf_tensor_that_would_be_ignored_is_refused_by_name(write_gguf, name):
    tensors = gguf_tensors(random_weights(BASE), "llama")
    vector = ((24,), "F32", bytes(4 * 24))
    path = write_gguf(gguf_metadata("llama"), {**tensors, name: vector})
    assert refusal(path, "gguf") == f"{path}: tensor {name}: not supported in a model of llama"
    path = write_gguf(gguf_metadata("llama"), {**tensors, name: vector, "cls.bias": vector})
    assert name in refusal(path, "gguf")


def test_a_folder_without_weights_or_config_is_refused(tmp_path):
    assert "config.json: cannot be read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert "has neither model.safetensors nor" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "expected a JSON object" in refusal(tmp_path)


def test_defaults_of_a_config_follow_from_other_fields(tmp_path):
    small = {
        k: v for k, v in BASE.items() if k not in ("head_dim", "num_key_value_heads", "rope_theta")
    }
    (tmp_path / "config.json").write_text(json.dumps({**small, "sliding_window": 4}))
    config = config_from_hf(tmp_path / "config.json")
    assert (config.head_dim, config.num_kv_heads) == (6, 4)
    assert config.ropes == (Rope(10000.0),) * 3
    assert config.sliding_windows == (None, None, None)  # llama has no windows, whatever is written


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 3),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 3),
        ({"model_type": "qwen2", "sliding_window": 5}, (None,) * 3),
        ({"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True}, (None,) * 3),
    ],
)
def test_a_window_that_is_not_mentioned_is_the_architectures_own(tmp_path, change, windows):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **change}))
    assert config_from_hf(tmp_path / "config.json").sliding_windows == windows


def test_a_gguf_with_a_window_uses_it(write_gguf):
    metadata = {**gguf_metadata("llama"), "llama.attention.sliding_window": 7}
    path = write_gguf(metadata, gguf_tensors(random_weights(BASE), "llama"))
    config, _ = open_model(path, "gguf")
    assert config.sliding_windows == (7, 7, 7)
    assert not config.tied_head
