"""What no line of the package does: run what a file or a peer says. By the syntax tree, so that a comment is no offence."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmserve"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
MODULES |= {"multiprocessing"}  # its queues and pipes pickle
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "np.load",
    "numpy.load",
    "os.system",
}
CALLS |= {"os.popen", "yaml.load", "yaml.unsafe_load"}
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}


def offences(source: str) -> list[str]:
    """Each line's offence: an import, a call by name, or a keyword that is not plainly False."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                found.append(name)
            if (
                name.endswith(".from_pretrained")
                and name != "transformers.AutoConfig.from_pretrained"
            ):
                values = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if values.get("use_safetensors") != "True":
                    found.append(f"{name} without use_safetensors")
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in KEYWORDS and not is_false:
                    found.append(f"{keyword.arg}=")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled_evaluated_or_given_to_a_shell(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "from multiprocessing.connection import Client",
        "torch.load(path)",
        "x = np.load(path, mmap_mode='r')",
        "eval(text)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(spec, trust_remote_code=flag)",
        "AutoModel.from_pretrained(folder)",
    ],
)
def test_each_of_them_would_be_found(line: str) -> None:
    assert offences(line)


def test_what_is_harmless_is_not_found() -> None:
    harmless = "model.eval()\nast.literal_eval(text)\nre.compile(x)\n# pickle\nrun(shell=False)"
    assert offences(harmless) == []
