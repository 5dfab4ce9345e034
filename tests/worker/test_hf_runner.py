"""Decoders that only transformers knows: its own numbers, through our paged attention; and what is refused by name."""

from __future__ import annotations

import functools
from pathlib import Path

import batches
import numpy as np
import pytest
import torch
from checkpoints import prepared

from shmserve.request import SamplingParams
from shmserve.worker.batch import PromptPart
from shmserve.worker.models.config import ModelLoadError, UnknownArchitectureError
from shmserve.worker.sampling_state import SamplingState

transformers = pytest.importorskip("transformers")

VOCAB, CONTEXT, BLOCK = 96, 64, 4
NUM_TOP = 20
PROMPT = np.random.default_rng(1).integers(3, VOCAB, 21).tolist()

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
}
FAMILIES = {
    # fused projection, partial rotary, parallel residual
    "GPTNeoX": SIZES,
    # learned positions
    "GPT2": GPT2,
    # windows on some layers, soft-capped scores, another scale than the head size says
    "Gemma2": {
        **GROUPED,
        **MIXED,
        "tie_word_embeddings": False,
        "head_dim": 10,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    # attention sinks, experts
    "GptOss": {
        **GROUPED,
        **MIXED,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
MORE_FAMILIES = {
    "Phi": GROUPED,
    "StableLm": GROUPED,
    "Olmo2": GROUPED,
    "Cohere": GROUPED,
    "Granite": {**GROUPED, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    "Starcoder2": {**GROUPED, "sliding_window": 7},
    "Cohere2": {**GROUPED, **MIXED},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    # values of another size than keys
    "DeepseekV3": {
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}
ALL_FAMILIES = [
    *FAMILIES,
    *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES),
]


def config_of_family(name: str):
    return getattr(transformers, f"{name}Config")(**{**FAMILIES, **MORE_FAMILIES}[name])


def random_model(config):
    """A model whose greedy tokens are not all the same, with no weight left at its neutral value."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def saved(config, folder: Path) -> Path:
    random_model(config).save_pretrained(folder)
    return folder


def runner_of(folder: Path, **kwargs):
    from shmserve.worker.hf_runner import HFRunner  # seconds: not for those who only collect tests

    sizes = {"vocab_size": VOCAB, "context_length": CONTEXT}
    ids = {"bos_token_id": 1, "eos_token_ids": (2,)}
    model = prepared(folder, format=kwargs.pop("format", "safetensors"), **sizes, **ids)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": None}
    limits |= {"kv_cache_bytes": 1 << 20, "block_size": BLOCK, "num_threads": 1}
    return HFRunner(model, **{**limits, **kwargs}, progress=lambda what, share: None)


batch_of = functools.partial(batches.batch_of, block_size=BLOCK)


def greedy_state() -> SamplingState:
    state = SamplingState(8)
    for row in range(8):
        params = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=NUM_TOP)
        state.set(row, params, (), 0)
    return state


def assert_logprobs(output, index: int, expected: np.ndarray) -> None:
    """The most likely tokens of a row have the log-probabilities expected f4[VOCAB]."""
    ids, values = (part[0] for part in output.top[index])
    assert len(ids) == NUM_TOP and ids[0] == expected.argmax()
    np.testing.assert_allclose(values, expected[ids], atol=1e-4)


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def family(request, tmp_path_factory):
    """transformers' own model, and a runner over the same files."""
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(config_of_family(request.param))
    model.save_pretrained(folder)
    runner = runner_of(folder)
    yield model, runner
    runner.close()


@pytest.fixture(scope="module")
def reference(family):
    """Log-probabilities after each token of the prompt, f4[21, VOCAB], by transformers' own attention."""
    with torch.inference_mode():
        logits = family[0](input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1).numpy()


def test_the_prompt_has_transformers_own_logits(family, reference):
    _, runner = family
    output = runner.run(batch_of((PROMPT, 0, [3, 5, 4, 7, 6, 9])), greedy_state())
    assert_logprobs(output, 0, reference[-1])


def test_a_prompt_in_chunks_over_scattered_blocks_equals_the_prompt_at_once(family, reference):
    _, runner = family
    for start, end in ((0, 9), (9, 10), (10, 18), (18, 21)):
        part = (PROMPT[start:end], start, [31, 12, 40, 13, 22, 11])
        output = runner.run(batch_of(part), greedy_state())
        assert_logprobs(output, 0, reference[end - 1])


def test_greedy_decoding_gives_the_tokens_of_generate(family):
    model, runner = family
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
    ids, blocks, start = list(PROMPT), list(range(1, 11)), 0
    while len(ids) < len(expected):
        output = runner.run(batch_of((ids[start:], start, blocks)), greedy_state())
        start = len(ids)
        ids.append(int(output.token_ids[0, 0]))
    assert ids == expected
    assert len(set(ids[len(PROMPT) :])) > 2


def test_a_ragged_batch_equals_its_sequences_alone(family, reference):
    """Prefill, a later chunk and decode rows of different lengths in one step, two of them over the same first blocks."""
    _, runner = family
    state, shared = greedy_state(), [1, 2]
    runner.run(batch_of((PROMPT[:8], 0, shared)), state)
    runner.run(batch_of((PROMPT[8:20], 8, [*shared, 3, 4, 5, 6])), state)
    runner.run(batch_of((PROMPT[:3], 0, [10])), state)
    cuts = [
        (20, 21, [1, 2, 3, 4, 5, 6]),
        (8, 15, [1, 2, 7, 8]),  # its first 8 tokens are those that the one before it computed
        (3, 4, [10]),
        (0, 13, [11, 12, 13, 14]),
        (0, 1, [15]),
    ]
    parts = [(PROMPT[start:end], start, blocks) for start, end, blocks in cuts]
    output = runner.run(batch_of(*parts), state)
    for index, (_, end, _) in enumerate(cuts):
        assert_logprobs(output, index, reference[end - 1])


def test_parts_of_a_prompt_are_scored(family, reference):
    _, runner = family
    part = PromptPart(0, 2, 3, np.array(PROMPT[3:9], np.int32), 5)
    output = runner.run(batch_of((PROMPT[:12], 0, [1, 2, 3]), prompt_parts=(part,)), greedy_state())
    (scores,) = output.prompt_scores
    expected = reference[np.arange(2, 8), PROMPT[3:9]]
    np.testing.assert_allclose(scores.logprobs, expected, atol=1e-4)
    np.testing.assert_array_equal(scores.top_ids[:, 0], reference[2:8].argmax(-1))
    assert_logprobs(output, 0, reference[11])


# --- bounds


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    return saved(config_of_family("GPTNeoX"), tmp_path_factory.mktemp("neox"))


def test_ids_without_a_token_are_never_sampled(neox):
    """The likeliest id of a prompt is taken away: what is left of the vocabulary ends before it."""
    state = greedy_state()
    likeliest = int(runner_of(neox).run(batch_of((PROMPT, 0, range(1, 7))), state).token_ids[0, 0])
    runner = runner_of(neox, num_token_ids=likeliest)
    assert runner.info.vocab_size == likeliest
    output = runner.run(batch_of((PROMPT, 0, range(1, 7))), state)
    assert output.token_ids[0, 0] < likeliest and output.top[0][0].max() < likeliest


def test_info_says_what_the_memory_holds(neox):
    block_bytes = 3 * 2 * 4 * 8 * 4 * BLOCK
    info = runner_of(neox, kv_cache_bytes=10 * block_bytes + 1).info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (10, BLOCK, 9 * BLOCK)
    assert info.vocab_size == VOCAB
    with pytest.raises(ModelLoadError, match="one sequence of 37 needs"):
        runner_of(neox, kv_cache_bytes=10 * block_bytes, max_model_len=37)


def test_a_rope_that_depends_on_the_batch_is_served_only_within_its_first_context(tmp_path):
    """Beyond it, transformers would rotate all sequences as the longest one of the batch needs."""
    factors = [1.0] * 4
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": [8.0] * 4}
    rope |= {"rope_theta": 100.0, "original_max_position_embeddings": 32}
    config = transformers.Phi3Config(
        **GROUPED, original_max_position_embeddings=32, rope_parameters=rope
    )
    folder = saved(config, tmp_path)
    assert runner_of(folder).info.max_model_len == 32
    with pytest.raises(ModelLoadError, match="beyond the model's context of 32 tokens"):
        runner_of(folder, max_model_len=33)


def test_a_sequence_that_breaks_does_not_harm_its_batch(tmp_path):
    model = random_model(config_of_family("GPTNeoX"))
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("inf")
    model.save_pretrained(tmp_path)
    runner, healthy = runner_of(tmp_path), [token for token in PROMPT if token != 5]
    alone = runner.run(batch_of((healthy, 0, range(1, 7))), greedy_state())
    output = runner.run(
        batch_of(([5, 6], 0, [20]), (healthy, 0, range(1, 7))),
        greedy_state(),
    )
    assert output.failed == (0,) and output.token_ids[1] == alone.token_ids[0]
    np.testing.assert_allclose(output.top[1][1], alone.top[0][1], atol=1e-4)


# --- refusals, one line each, by name


REFUSED = {
    "a state-space model": ("MambaConfig", {"num_hidden_layers": 2}, "mamba cannot be served"),
    "layers with a state": (
        "BambaConfig",
        {**GROUPED, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8},
        "layers of type linear_attention are not supported",
    ),
    "chunked attention": (
        "Llama4TextConfig",
        {**GROUPED, "head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2},
        "layers of type chunked_attention are not supported",
    ),
    "an encoder with a decoder": ("T5Config", {"num_layers": 2}, "attends across"),
    "both directions": ("BertConfig", SIZES, "BertLMHeadModel cannot be served: its mask"),
    "no positions": ("BloomConfig", {"n_layer": 2}, "does not take the positions"),
    "attention of its own": (
        "GPTNeoConfig",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
        "its attention does not go through transformers' AttentionInterface",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, what):
    name, values, words = REFUSED[what]
    values = {"hidden_size": 32, "vocab_size": VOCAB, **values}
    config = getattr(transformers, name)(**values)
    generates = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnknownArchitectureError) as caught:
        runner_of(tmp_path)
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(neox, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((neox / "config.json").read_bytes())
    tensors = load_file(neox / "model.safetensors")
    del tensors["gpt_neox.layers.1.attention.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"tensor gpt_neox\.layers\.1\.attention\.dense"):
        runner_of(tmp_path)


def test_a_misshapen_tensor_is_refused_in_one_line(neox, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((neox / "config.json").read_bytes())
    tensors = load_file(neox / "model.safetensors")
    tensors["gpt_neox.final_layer_norm.weight"] = torch.ones(31)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="GPTNeoXForCausalLM cannot be loaded") as caught:
        runner_of(tmp_path)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UnknownArchitectureError)


def test_a_model_type_that_nobody_knows_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "phlogiston"}')
    with pytest.raises(ModelLoadError, match="phlogiston") as caught:
        runner_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_is_refused(tmp_path):
    with pytest.raises(UnknownArchitectureError, match="read safetensors, not gguf"):
        runner_of(tmp_path, format="gguf")


def test_a_mask_is_a_window_only_if_every_token_sees_as_many():
    from shmserve.worker.hf_attention import UnfitAttentionError, window_of

    def causal(b, h, q, kv):
        return kv <= q

    assert window_of(causal, 64) is None
    assert window_of(lambda b, h, q, kv: (kv <= q) & (kv > q - 7), 64) == 7
    assert window_of(lambda b, h, q, kv: (kv <= q) & (kv > q - 64), 64) is None
    for mask in (
        lambda b, h, q, kv: q >= 0,
        lambda b, h, q, kv: (kv <= q) & (kv // 8 == q // 8),
        lambda b, h, q, kv: (kv <= q) & ((kv > q - 7) | (kv < 4)),
    ):
        with pytest.raises(UnfitAttentionError, match="not a causal window"):
            window_of(mask, 64)
