"""The direction of imports, as data; and what each process must never load.

A module may import modules of its own level and below. The worker and the front end are separate programs: nobody but
themselves imports them. `rings` imports nothing of the package but `rings`, in the order of its list.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmserve"

LEVELS: tuple[tuple[str, ...], ...] = (
    ("__init__", "config", "request", "lazy_heap"),
    ("rings",),
    (
        "wire",
        "stop",
        "token_bytes",
        "token_text",
        "boards",
        "control",
        "keys",
        "tls",
        "log_writer",
        "cgroup",
        "devices",
    ),
    (
        "gguf",
        "ggml_blocks",
        "gguf_pre_tokenizers",
        "tokenizer_build",
        "model_cache",
        "model_facts",
        "model_source",
        "model_memory",
        "memory_bounds",
    ),
    ("models", "child", "stop_regex", "instance_socket"),
    ("orphan",),
    ("grammar",),
    ("worker", "http"),
    (
        "loop",
        "health",
        "progress",
        "notify",
        "lobby",
        "log_file",
        "sockets",
        "children",
        "posts",
        "health_rounds",
        "ledger",
    ),
    ("recording", "crash_dump", "dump", "dump_output", "watch", "top", "top_screen"),
    ("wiring", "claim", "instance_server", "death_records", "crew", "supervisor"),
    ("stream_reading", "target", "load_spec", "load_report", "loadgen"),
    ("load_table", "load_plot", "load_file", "chat_turns", "chat_lines", "terminal_chat"),
    ("daemon", "systemd_unit", "settings", "commands", "cli", "demo", "__main__"),
)
CLOSED = ("worker", "http")
RINGS_ORDER = ("layout", "segment", "wakeup", "spsc", "policy", "channel")
RINGS_ORDER += ("board_table", "board", "observe")
USES_TORCH = ("shmserve.worker.torch_runner", "shmserve.worker.sampler", "shmserve.worker.models")
USES_TORCH += ("shmserve.worker.kernels", "shmserve.worker.cuda_graphs", "shmserve.worker.philox")
USES_TORCH += ("shmserve.worker.cuda", "shmserve.worker.torch_output")
USES_TORCH += tuple(f"shmserve.worker.hf_{name}" for name in ("attention", "loading", "runner"))
USES_TORCH += ("shmserve.worker.cpu.loading", "shmserve.worker.cpu.runner")
USES_TORCH += tuple(
    f"shmserve.worker.parallel.{name}" for name in ("group", "team", "device_share", "lead")
)

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


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")).read_text())


def imports_of(module: str) -> list[str]:
    """Modules of the package that `module` imports, anywhere in its text: dotted, as far as they are modules."""
    found = []
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole in MODULES else str(node.module))
    return [name for name in found if name.split(".")[0] == "shmserve"]


def test_no_arrow_points_upwards_or_across() -> None:
    wrong = []
    for module in MODULES:
        for imported in imports_of(module):
            top = imported.split(".")[1] if "." in imported else ""
            is_across = top in CLOSED and module.split(".")[1] != top
            if is_across or level_of(imported) > level_of(module):
                wrong.append(f"{module} imports {imported}")
    assert not wrong


def statements_run_by_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if is_function or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            continue
        yield child
        yield from statements_run_by_import(child)


def loaded_first(module: str) -> set[str]:
    """The modules of the package that importing `module` imports directly, the packages that they are in among them."""
    names = {module.rpartition(".")[0]}
    for node in statements_run_by_import(tree_of(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    whole = {".".join(n.split(".")[:k]) for n in names for k in range(1, n.count(".") + 2)}
    return {m for m in MODULES if m.removesuffix(".__init__") in whole} - {module}


def test_no_import_leads_back_to_where_it_began() -> None:
    """With it goes: if all modules can be imported in one order, each can be imported first."""
    order = graphlib.TopologicalSorter({module: loaded_first(module) for module in MODULES})
    order.prepare()  # raises CycleError, which names the circle


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
import gc, importlib, os, sys, traceback
for name in sys.argv[1].split(","):
    importlib.import_module(name)
gc.disable()   # each child would look at all of that, and so get its own copy of the memory
for module in sys.argv[2].split(","):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            importlib.import_module(module)
            assert "torch" in sys.argv[1] or "torch" not in sys.modules, "it loads torch"
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


# What others wrote is loaded once, before the forks: ours are what is tested, and each of them would load the most of it again.
OTHERS = "numpy,msgspec,aiohttp.web,click,jinja2.ext,posix_ipc,prometheus_client,re2,tokenizers"
NO_TORCH = [m for m in MODULES if not is_torch_module(m) and m != "shmserve.__main__"]
IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1].split(","):
    importlib.import_module(module)
    assert "torch" not in sys.modules, f"{module} loads torch"
"""


def test_modules_can_be_imported_and_load_no_torch() -> None:
    run_python("-c", IMPORT_ALL, ",".join(NO_TORCH))


# In three parts, or they take too long for one test where others have the cores.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_each_module_can_be_imported_alone(part: int) -> None:
    run_python("-c", IMPORT_EACH, OTHERS, ",".join(NO_TORCH[part::3]))


@pytest.mark.slow
def test_each_torch_module_can_be_imported_alone() -> None:
    modules = [m for m in MODULES if is_torch_module(m)]
    run_python("-W", "default", "-c", IMPORT_EACH, "torch,safetensors.torch", ",".join(modules))


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
        (
            ("shmserve.top", "shmserve.top_screen"),
            ("torch", "aiohttp", "tokenizers", "shmserve.http"),
        ),
        (("shmserve.rings.observe",), ("torch", "aiohttp", "asyncio", "tokenizers")),
    ],
    ids=lambda names: names[0],
)
def test_process_never_loads(modules: tuple[str, ...], never: tuple[str, ...]) -> None:
    assert not [module for module in modules if module not in MODULES]
    assert not loaded_by(*modules) & set(never)
