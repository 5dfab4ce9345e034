"""A config.json in both spellings, what it leaves unsaid, and what is refused by name."""

import json
import warnings

import pytest
from toys import FAMILIES, SIZES

from shmserve.worker.models.config import (
    ModelLoadError,
    Rope,
    RopeScaling,
    UnknownArchitectureError,
)
from shmserve.worker.models.hf_config import HF_ARCHITECTURES, config_from_hf
from shmserve.worker.torch_runner import open_model

pytestmark = pytest.mark.slow

SAID = {key: value for key, value in SIZES.items() if key != "attn_implementation"}
SAID |= {"rms_norm_eps": 1e-6, "num_hidden_layers": 8, "hidden_size": 1024}


def read(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return config_from_hf(path)


@pytest.mark.parametrize("architecture", HF_ARCHITECTURES)
def test_what_a_file_leaves_unsaid_is_what_transformers_takes(tmp_path, architecture):
    """The same file, once as it is and once with everything that transformers' class adds to it."""
    few = {"model_type": architecture, **SAID}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig

        everything = AutoConfig.for_model(**few).to_dict()
    assert len(everything) > len(few) + 3
    ours, theirs = read(tmp_path, few), read(tmp_path, everything)
    assert ours == theirs
    assert ours.tied_head is everything["tie_word_embeddings"]
    if everything.get("layer_types") and ours.sliding_windows != (None,) * 8:
        kinds = [
            "sliding_attention" if window else "full_attention" for window in ours.sliding_windows
        ]
        assert kinds == everything["layer_types"]


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_of_the_rotary_parameters_mean_the_same(toy, tmp_path, name):
    new = toy(name).config()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    rope = dict(new["rope_parameters"])
    if "full_attention" in rope:
        full, sliding = dict(rope["full_attention"]), rope["sliding_attention"]
        old |= {"rope_local_base_freq": sliding["rope_theta"], "rope_theta": full.pop("rope_theta")}
        old["rope_scaling"] = full
    else:
        old["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        old["rope_scaling"] = None if rope["type"] == "default" else rope
    assert read(tmp_path, old) == read(tmp_path, new)
    assert any(config_rope is not None for config_rope in read(tmp_path, old).ropes)


def test_gemma3_rotates_its_windowed_layers_by_their_own_base(tmp_path):
    config = read(tmp_path, {"model_type": "gemma3_text", **SAID, "sliding_window_pattern": 4})
    local, general = Rope(10_000.0), Rope(1_000_000.0)
    assert config.ropes == (local, local, local, general) * 2
    assert config.sliding_windows == (4096, 4096, 4096, None) * 2
    assert config.embedding_scale == 32.0 and config.attention_softcap is None


def test_smollm3_lists_the_layers_that_are_rotated(tmp_path):
    values = {"model_type": "smollm3", **SAID, "no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 0, 1]}
    rope = Rope(2_000_000.0)
    assert read(tmp_path, values).ropes == (rope, None, None, rope, rope, rope, rope, None)
    windows = {"use_sliding_window": True, "sliding_window": 16}
    assert read(tmp_path, {**values, **windows}).sliding_windows == (
        *(None, 16, 16, None),
        *(None, None, None, 16),
    )


def test_yarn_scales_as_its_paper_says_unless_the_file_says_otherwise(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
    values = {"model_type": "qwen2", **SAID, "rope_scaling": yarn}
    scaling = read(tmp_path, values).ropes[0].scaling
    assert scaling == RopeScaling(
        "yarn", 4.0, original_context_length=24, magnitude=pytest.approx(1.138629436)
    )
    yarn["attention_factor"] = 1.5
    assert read(tmp_path, values).ropes[0].scaling.magnitude == 1.5


def test_yarn_stretches_the_context_beyond_what_the_model_was_trained_with(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for said, expected in ((32, 128), (96, 128), (200, 200)):
        values = {"model_type": "qwen2", **SAID, "rope_scaling": yarn}
        config = read(tmp_path, values | {"max_position_embeddings": said})
        assert config.context_length == expected


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("mamba", {}, "model_type 'mamba' is not supported (supported: llama, mistral, "),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope'"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "rope scaling 'su'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5",
        ),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_theta": 10.0}}},
            "rotary parameters by layer type (full_attention) are not supported in qwen2",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_what_is_not_computed_is_left_to_others_by_its_name(tmp_path, architecture, change, words):
    with pytest.raises(UnknownArchitectureError) as caught:
        read(tmp_path, {"model_type": architecture, **SAID, **change})
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/config.json: ") and words in text and "\n" not in text


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "1 or 0 for each of the 8 layers"),
        ("smollm3", {"no_rope_layers": ["a"] * 8}, "1 or 0 for each of the 8 layers"),
        ("gemma2", {"layer_types": ["full_attention"]}, "each of the 8 layers"),
        ("gemma2", {"layer_types": [["full_attention"]] * 8}, "each of the 8 layers"),
        ("gemma2", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 10.0}}, "expected an object by layer"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": -1}}, "factor is -1.0"),
        ("llama", {"intermediate_size": float("inf")}, "intermediate_size is inf, expected"),
        ("llama", {"intermediate_size": float("nan")}, "intermediate_size is nan, expected"),
        (
            "llama",
            {"intermediate_size": [[8], [8]]},
            r"intermediate_size is [8], expected a number",
        ),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, at most"),
        ("llama", {"intermediate_size": []}, "intermediate_size differs between layers"),
    ],
)
def test_a_file_that_makes_no_sense_is_an_error_that_names_the_field(
    tmp_path, architecture, change, words
):
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, {"model_type": architecture, **SAID, **change})
    assert not isinstance(caught.value, UnknownArchitectureError)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/config.json: ") and words in text and "\n" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_key_value_heads": 4},
            "self_attn.qkv_proj.weight has shape [80, 40], expected [120, 40]",
        ),
        (
            {"intermediate_size": 70},
            "mlp.gate_up_proj.weight has shape [144, 40], expected [140, 40]",
        ),
        ({"num_hidden_layers": 4}, "model.layers.3."),
    ],
)
def test_a_fused_tensor_of_another_shape_is_named_with_both(toy, tmp_path, change, words):
    made = toy("phi3")
    for file in made.folder.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps({**made.config(), **change}))
    from shmserve.worker.models.weights import load_weights

    config, source = open_model(tmp_path, "safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load_weights(source, config)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/model.safetensors: tensor model.layers.")
    assert words in text and "\n" not in text
