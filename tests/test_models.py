"""What a prepared model says, from GGUF files and Hugging Face folders, and how it is cached."""

import dataclasses
import errno
import json
import os
import pwd
import shutil
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from shmserve import model_cache
from shmserve.http.tokenizer import Tokenizer as HTTPTokenizer
from shmserve.models import DEFAULT_MODEL, ModelError, PreparedModel, prepare
from shmserve.token_bytes import byte_of_character

WORDS = ["<|end|>", "<|start|>", *sorted(byte_of_character()), "he", "ll", "hell", "hello"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]


def encode(model, text):
    return model.tokenizer().encode(text, add_special_tokens=False).ids


# The default model


def test_the_default_model_has_the_published_facts(default_model):
    model = default_model
    assert (model.name, model.spec) == ("SmolLM2-135M-Instruct", DEFAULT_MODEL)
    assert (model.format, model.architecture) == ("gguf", "llama")
    assert (model.vocab_size, model.context_length) == (49152, 8192)
    assert (model.bos_token_id, model.eos_token_ids) == (1, (2,))
    assert (model.pad_token_id, model.unk_token_id) == (2, 0)
    assert model.add_bos_token is False
    assert model.special_token_ids == tuple(range(17))


def test_a_child_loads_the_same_model_without_torch(default_model):
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from shmserve.models import PreparedModel
        model = PreparedModel.load(Path({str(default_model.folder)!r}))
        model.tokenizer(), model.token_bytes()
        heavy = {{"torch", "transformers", "huggingface_hub", "aiohttp"}} & set(sys.modules)
        assert not heavy, heavy
        print(model == eval(sys.stdin.read(), {{**vars(sys.modules["shmserve.models"]),
              "PosixPath": Path}}))
    """)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=repr(default_model),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


# GGUF files


def test_a_gguf_file_gives_its_facts(write_gguf, cache_dir, toy_metadata):
    model = prepare(str(write_gguf(toy_metadata(), name="Toy-1B.Q4_K_M.gguf")), cache_dir=cache_dir)
    assert model.name == "Toy-1B"
    assert model.eos_token_ids == (0, 1)
    assert model.bos_token_id is None and model.add_bos_token is False
    assert model.chat_template is None  # none is made up
    assert model.special_token_ids == (0, 1)
    assert encode(model, "hello<|end|>hell") == [WORDS.index("hello"), 0, WORDS.index("hell")]


def test_the_well_known_ends_of_a_gguf_end_an_answer_behind_its_own(
    write_gguf, cache_dir, toy_metadata
):
    """A Llama 3 whose file says <|end_of_text|>: its turns end with another token, which no key names."""
    tokens = ["<|end_of_text|>", "<|eot_id|>", *WORDS[2:-1], "<|im_end|>"]
    kinds = [3, 3, *[1] * (len(tokens) - 2)]  # the last one is text that looks like it
    path = write_gguf(
        toy_metadata("tokenizer.ggml.eot_token_id", tokens=tokens, token_type=kinds, merges=["h e"])
    )
    assert prepare(str(path), cache_dir=cache_dir).eos_token_ids == (0, 1)


@pytest.mark.parametrize("wrong", [2**32 - 1, 9999, -1])
def test_a_padding_that_is_no_token_is_none(write_gguf, cache_dir, toy_metadata, wrong):
    """Converters wrote -1 as an unsigned number."""
    path = write_gguf(toy_metadata(padding_token_id=wrong, unknown_token_id=wrong))
    model = prepare(str(path), cache_dir=cache_dir)
    assert (model.pad_token_id, model.unk_token_id) == (None, None)


def test_the_embedding_decides_how_many_ids_there_are(write_gguf, cache_dir, toy_metadata):
    rows = len(WORDS) + 3
    tensors = {"token_embd.weight": ((rows, 1), "F32", bytes(4 * rows))}
    model = prepare(str(write_gguf(toy_metadata(), tensors)), cache_dir=cache_dir)
    assert model.vocab_size == len(model.token_bytes()) == rows
    assert model.token_bytes()[rows - 1] == b""


# Hugging Face folders


def hf_folder(folder, *, tokenizer=None, config=None, settings=None, generation=None):
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps(defaults | (config or {})))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (tokenizer or toy_tokenizer()).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q2s", 2, b"{}"))
    return folder


def toy_tokenizer():
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|start|>")])
    return tokenizer


def test_a_folder_gives_the_facts_of_its_json_files(tmp_path, cache_dir):
    folder = hf_folder(
        tmp_path / "My-Model",
        config={"eos_token_id": 7, "bos_token_id": 9},
        generation={"eos_token_id": [0, 5]},
        settings={"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"},
    )
    model = prepare(str(folder), cache_dir=cache_dir)
    assert (model.name, model.format, model.weights) == ("My-Model", "safetensors", folder)
    assert (model.vocab_size, model.context_length) == (300, 128)
    assert model.bos_token_id == 1  # the tokenizer's own word for it beats config.json
    assert model.eos_token_ids == (0, 5)
    assert model.pad_token_id is None and model.chat_template is None
    assert model.special_token_ids == (0, 1)
    assert model.token_bytes_exact and len(model.token_bytes()) == 300


def test_the_first_end_is_the_one_that_templates_know(tmp_path, cache_dir):
    """transformers gives them the tokenizer's own eos_token, whatever comes first in the generation's list."""
    folder = hf_folder(
        tmp_path / "m", generation={"eos_token_id": [5, 0]}, settings={"eos_token": "<|end|>"}
    )
    assert prepare(str(folder), cache_dir=cache_dir).eos_token_ids == (0, 5)


def test_ids_that_are_no_tokens_of_the_model_are_left_out(tmp_path, cache_dir):
    """Llama 1 had the padding -1; the tokenizer of Gemma 3 has a special token more than its text models have rows."""
    none = {"pad_token_id": -1, "bos_token_id": -1, "eos_token_id": [-1, 1, 300]}
    tokenizer = toy_tokenizer()
    tokenizer.add_special_tokens(["<image>"])
    folder = hf_folder(
        tmp_path / "m", tokenizer=tokenizer, config=none | {"vocab_size": len(WORDS)}
    )
    model = prepare(str(folder), cache_dir=cache_dir)
    assert (model.pad_token_id, model.bos_token_id, model.eos_token_ids) == (None, None, (1,))
    assert model.special_token_ids == (0, 1)
    assert model.num_token_ids() == model.vocab_size == len(WORDS)
    HTTPTokenizer(model, 1).close()


@pytest.mark.parametrize(
    "sizes", [{"vocab_size": 10**12}, {"vocab_size": -4}, {"max_position_embeddings": -1}]
)
def test_sizes_that_no_model_has_are_refused_before_they_take_memory(tmp_path, cache_dir, sizes):
    with pytest.raises(ModelError, match=r"config\.json: no model has a vocabulary of .* tokens$"):
        prepare(str(hf_folder(tmp_path / "m", config=sizes)), cache_dir=cache_dir)


@pytest.mark.slow
def test_sizes_that_the_text_part_of_a_model_leaves_unsaid_are_its_classes(tmp_path, cache_dir):
    """Gemma 3 from 4B on; without a text part that is a mistake of the file."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2}
    unsaid = {"vocab_size": None, "max_position_embeddings": None}
    folder = hf_folder(
        tmp_path / "m", config=unsaid | {"model_type": "gemma3", "text_config": text}
    )
    model = prepare(str(folder), cache_dir=cache_dir)
    assert (model.vocab_size, model.context_length) == (262_208, 131_072)
    folder = hf_folder(tmp_path / "n", config=unsaid | {"model_type": "x", "text_config": text})
    with pytest.raises(ModelError, match="it gives no vocab_size"):
        prepare(str(folder), cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64}, 128),
        ({"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 100}, 128),
        ({"rope_type": "yarn", "factor": float("inf")}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {}}, 512),
        (None, 128),
    ],
)
def test_yarn_stretches_the_context_that_a_file_says(tmp_path, cache_dir, rope, expected):
    """Qwen's way to long contexts: a rope_scaling, and max_position_embeddings as it was."""
    folder = hf_folder(tmp_path / "m", config={"rope_scaling": rope})
    assert prepare(str(folder), cache_dir=cache_dir).context_length == expected


def test_a_token_that_the_tokenizer_says_it_has_not_is_not_looked_for_elsewhere(
    tmp_path, cache_dir
):
    """Qwen's tokenizer has no BOS, its config.json an id for it: a template would begin with it."""
    config = {"bos_token_id": 0, "eos_token_id": 1}
    folder = hf_folder(tmp_path / "m", config=config, settings={"bos_token": None})
    assert prepare(str(folder), cache_dir=cache_dir).bos_token_id is None
    folder = hf_folder(tmp_path / "n", config=config, settings={})
    assert prepare(str(folder), cache_dir=cache_dir).bos_token_id == 0


def test_merges_as_strings_and_as_pairs_give_the_same_ids_K4(tmp_path, cache_dir):
    folder = hf_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    seen = []
    for merges in ([list(pair) for pair in MERGES], [" ".join(pair) for pair in MERGES]):
        content["model"]["merges"] = merges
        path.write_text(json.dumps(content))
        seen.append(prepare(str(folder), cache_dir=cache_dir))
    assert seen[0].folder != seen[1].folder
    ids = [encode(model, "hello hell") for model in seen]
    assert ids[0] == ids[1] and ids[0][0] == WORDS.index("hello")


@pytest.mark.parametrize(
    "template", ["T", [{"name": "rag", "template": "R"}, {"name": "default", "template": "T"}]]
)
def test_the_chat_template_may_be_one_or_several(tmp_path, cache_dir, template):
    folder = hf_folder(tmp_path / "m", settings={"chat_template": template})
    assert prepare(str(folder), cache_dir=cache_dir).chat_template == "T"


def test_a_template_file_beats_the_config_and_keeps_every_byte(tmp_path, cache_dir):
    folder = hf_folder(tmp_path / "m", settings={"chat_template": "old"})
    (folder / "chat_template.jinja").write_bytes("a\r\nb\u00e9\n".encode())
    model = prepare(str(folder), cache_dir=cache_dir)
    assert model.chat_template == "a\r\nb\u00e9\n"
    assert PreparedModel.load(model.folder) == model


def test_bos_is_added_where_the_tokenizer_or_the_config_says_so(tmp_path, cache_dir):
    adding = toy_tokenizer()
    adding.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    for name, tokenizer, settings, expected in (
        ("post", adding, {}, True),
        ("off", adding, {"add_bos_token": False}, False),
        ("plain", toy_tokenizer(), {}, False),
        ("on", toy_tokenizer(), {"add_bos_token": True}, True),
    ):
        settings = {"bos_token": "<|start|>"} | settings
        folder = hf_folder(tmp_path / name, tokenizer=tokenizer, settings=settings)
        assert prepare(str(folder), cache_dir=cache_dir).add_bos_token is expected


def test_truncation_left_in_a_tokenizer_file_does_not_cut_prompts(tmp_path, cache_dir):
    tokenizer = toy_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    model = prepare(str(hf_folder(tmp_path / "m", tokenizer=tokenizer)), cache_dir=cache_dir)
    assert len(encode(model, "h" * 50)) == 50


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{}", "model_type"),
        ("config.json", '{"model_type": "llama", "vocab_size": "x"}', "vocab_size is 'x'"),
        ("config.json", '{"model_type": "llama", "vocab_size": 9}', "max_position_embeddings"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("model.safetensors", None, "no weights found"),
        ("chat_template.jinja", b"\xff", "cannot read it"),
    ],
)
def test_a_broken_folder_is_one_line(tmp_path, cache_dir, file, content, says):
    folder = hf_folder(tmp_path / "m")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=says) as caught:
        prepare(str(folder), cache_dir=cache_dir)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


# The cache


def test_the_second_start_reads_neither_the_model_nor_builds_again(
    write_gguf, cache_dir, monkeypatch, toy_metadata
):
    path = write_gguf(toy_metadata())
    first = prepare(str(path), cache_dir=cache_dir)
    monkeypatch.setattr(model_cache, "sha256_of", None)
    monkeypatch.setattr("shmserve.models.facts_of_gguf", None)
    assert prepare(str(path), cache_dir=cache_dir) == first


def test_a_changed_file_gets_a_new_folder_and_the_old_one_stays(
    write_gguf, cache_dir, toy_metadata
):
    old = prepare(str(write_gguf(toy_metadata())), cache_dir=cache_dir)
    new = prepare(
        str(write_gguf(toy_metadata() | {"llama.context_length": 65})), cache_dir=cache_dir
    )
    assert (old.context_length, new.context_length) == (64, 65)
    assert PreparedModel.load(old.folder) == old


def test_the_same_content_elsewhere_is_served_from_there(
    write_gguf, tmp_path, cache_dir, toy_metadata
):
    first = prepare(str(write_gguf(toy_metadata())), cache_dir=cache_dir)
    moved = tmp_path / "moved.gguf"
    shutil.move(first.weights, moved)
    assert prepare(str(moved), cache_dir=cache_dir).weights == moved


@pytest.mark.parametrize("file", ["model.json", "tokenizer.json", "token_bytes.bin"])
def test_a_damaged_folder_is_made_again(write_gguf, cache_dir, file, toy_metadata):
    path = write_gguf(toy_metadata())
    first = prepare(str(path), cache_dir=cache_dir)
    if file == "tokenizer.json":
        (first.folder / file).unlink()
    else:
        (first.folder / file).write_bytes(b"{")
    assert prepare(str(path), cache_dir=cache_dir) == first
    assert encode(first, "hello") == [WORDS.index("hello")]
    assert not list(cache_dir.rglob("*.partial"))


def test_a_folder_of_another_format_version_is_not_loaded(write_gguf, cache_dir, toy_metadata):
    folder = prepare(str(write_gguf(toy_metadata())), cache_dir=cache_dir).folder
    values = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(values | {"format_version": 0}))
    with pytest.raises(ModelError, match="another version"):
        PreparedModel.load(folder)


def test_a_prepared_model_cannot_be_changed(write_gguf, cache_dir, toy_metadata):
    model = prepare(str(write_gguf(toy_metadata())), cache_dir=cache_dir)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.name = "other"


def test_a_cache_that_cannot_be_written_names_itself_and_the_way_out(
    write_gguf, tmp_path, toy_metadata
):
    (tmp_path / "taken").touch()
    with pytest.raises(ModelError, match=r"taken.*XDG_CACHE_HOME") as caught:
        prepare(str(write_gguf(toy_metadata())), cache_dir=tmp_path / "taken" / "cache")
    assert "\n" not in str(caught.value)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache.cache_root() == tmp_path / "shmserve"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert model_cache.cache_root() == tmp_path / "home" / ".cache" / "shmserve"


def test_without_a_home_the_way_out_is_named(monkeypatch, write_gguf, toy_metadata):
    """A container's user without an entry in /etc/passwd."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
        prepare(str(write_gguf(toy_metadata())))


def test_a_cache_that_is_only_read_serves_what_is_in_it(
    write_gguf, cache_dir, toy_metadata, monkeypatch
):
    """In an image: its layers do not keep the fractions of a file's time, so the hash that was noted is no longer believed."""
    path = write_gguf(toy_metadata())
    model = prepare(str(path), cache_dir=cache_dir)
    os.utime(path, (1, 1))

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    assert prepare(str(path), cache_dir=cache_dir) == model
