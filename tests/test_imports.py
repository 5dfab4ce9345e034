"""The direction of imports, as data; and what each process must never load.

A module may import modules of its own level and below. The worker and the front end are separate programs: nobody but
themselves imports them. `rings` imports nothing of the package but `rings`, in the order of its list.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmserve"

LEVELS: tuple[tuple[str, ...], ...] = (
    ("__init__", "config", "request"),
    ("rings",),
    ("wire", "stop", "token_bytes", "token_text", "boards", "control"),
    (
        "gguf",
        "ggml_blocks",
        "gguf_pre_tokenizers",
        "tokenizer_build",
        "model_cache",
        "model_facts",
        "model_source",
        "model_memory",
    ),
    ("models", "child", "stop_regex"),
    ("grammar",),
    ("worker", "http"),
    ("loop", "health", "progress", "notify", "sockets", "instance_socket", "children", "posts"),
    ("wiring", "claim", "instance_server", "crew", "supervisor", "loadgen", "top"),
    ("settings", "cli", "demo", "__main__"),
)
CLOSED = ("worker", "http")
RINGS_ORDER = ("layout", "segment", "wakeup", "spsc", "policy", "channel", "board", "observe")
USES_TORCH = ("shmserve.worker.torch_runner", "shmserve.worker.sampler", "shmserve.worker.models")
USES_TORCH += ("shmserve.worker.kernels", "shmserve.worker.cuda_graphs", "shmserve.worker.philox")
USES_TORCH += ("shmserve.worker.cuda", "shmserve.worker.torch_output")
USES_TORCH += ("shmserve.worker.hf_attention", "shmserve.worker.hf_runner")
USES_TORCH += ("shmserve.worker.cpu.loading", "shmserve.worker.cpu.runner")

MODULES = sorted(
    ".".join(("shmserve", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in PACKAGE.rglob("*.py")
)


def level_of(module: str) -> int:
    """The level of "shmserve.X..."."""
    top = module.split(".")[1] if "." in module else "__init__"
    for level, names in enumerate(LEVELS):
        if top in names:
            return level
    pytest.fail(f"{module} has no level: put it into the table of test_imports.py")


def imports_of(module: str) -> list[str]:
    """Modules of the package that `module` imports, anywhere in its text: dotted, as far as they are modules."""
    path = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole in MODULES else str(node.module))
    return [name for name in found if name.split(".")[0] == "shmserve"]


@pytest.mark.parametrize("module", MODULES)
def test_no_arrow_points_upwards_or_across(module: str) -> None:
    for imported in imports_of(module):
        assert level_of(imported) <= level_of(module), f"{module} imports {imported}"
        top = imported.split(".")[1] if "." in imported else ""
        if top in CLOSED:
            assert module.split(".")[1] == top, f"{module} imports {imported}"


def test_rings_import_only_rings_and_in_their_order() -> None:
    inside = [m for m in MODULES if m.startswith("shmserve.rings.") and "__" not in m]
    assert sorted(m.split(".")[2] for m in inside) == sorted(RINGS_ORDER)
    for module in inside:
        for imported in imports_of(module):
            assert imported.startswith("shmserve.rings"), f"{module} imports {imported}"
            if imported != "shmserve.rings":
                ours, theirs = module.split(".")[2], imported.split(".")[2]
                assert RINGS_ORDER.index(theirs) < RINGS_ORDER.index(ours)


IMPORT_EACH = """
import importlib, os, sys, traceback
for name in sys.argv[1].split(","):
    if name: importlib.import_module(name)   # what all of them load: once
for module in sys.argv[2].split(","):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            importlib.import_module(module)
            assert sys.argv[1] == "torch" or "torch" not in sys.modules, "it loads torch"
            code = 0
        except BaseException:
            print(module, file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"{module} cannot be imported alone")
"""


def run_python(*args: str) -> str:
    """stdout of a fresh interpreter that takes warnings for errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *args],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_torch_module(module: str) -> bool:
    return module.startswith(USES_TORCH)


def test_each_module_can_be_imported_alone() -> None:
    modules = [m for m in MODULES if not is_torch_module(m) and m != "shmserve.__main__"]
    run_python("-c", IMPORT_EACH, "numpy,msgspec", ",".join(modules))


@pytest.mark.slow
def test_each_torch_module_can_be_imported_alone() -> None:
    modules = [m for m in MODULES if is_torch_module(m)]
    run_python("-W", "default", "-c", IMPORT_EACH, "torch", ",".join(modules))


def loaded_by(*modules: str) -> set[str]:
    """What is loaded after importing `modules` in a fresh interpreter: packages, and our own modules to two names."""
    names = run_python("-c", f"import sys, {', '.join(modules)}; print(*sys.modules)").split()
    ours = {".".join(name.split(".")[:2]) for name in names if name.startswith("shmserve.")}
    return {name.split(".")[0] for name in names} | ours


@pytest.mark.parametrize(
    ("modules", "never"),
    [
        (("shmserve.http.__main__",), ("torch", "transformers", "shmserve.worker")),
        (
            ("shmserve.worker.__main__", "shmserve.worker.simulated_runner"),
            ("torch", "aiohttp", "transformers", "shmserve.http"),
        ),
        (
            ("shmserve.supervisor", "shmserve.models"),
            ("torch", "aiohttp", "transformers", "asyncio", "shmserve.http", "shmserve.worker"),
        ),
        (("shmserve.cli",), ("torch", "aiohttp", "transformers", "numpy", "tokenizers")),
        (("shmserve.rings.observe",), ("torch", "aiohttp", "asyncio", "tokenizers")),
    ],
    ids=lambda names: names[0],
)
def test_process_never_loads(modules: tuple[str, ...], never: tuple[str, ...]) -> None:
    assert not [module for module in modules if module not in MODULES]
    assert not loaded_by(*modules) & set(never)
