"""The C kernels as a shared library: compiled with the system's compiler at the first start, found in the cache afterwards.

Owns: the compiler's command line and the cache key. Never: loads a library into this process.

    <cache>/kernels/<hash>.so     the hash is over the sources, the command line, the compiler's version and the CPU's features,
                                  so that a cache that moves to another machine is not used there

A library gets its name only after it passed its self-test in a process of its own: one that crashes costs that process and
not the worker. Safe in several processes at once. Every failure is a `KernelsError` of one line.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from shmserve.model_cache import exclusive, publish

SOURCES = Path(__file__).parent
FLAGS: tuple[str, ...] = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fPIC",
)
# gcc otherwise moves the multiplications of a tile before its additions and keeps them on the stack: a third slower.
# clang does not know these two, says so, and goes on.
FLAGS += ("-fno-tree-reassoc", "-fno-tree-ter")
LINK = ("-shared", "-pthread", "-lm")
NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 120
SELF_TEST_TIMEOUT_S = 60


class KernelsError(Exception):
    """One line that says why the C kernels cannot be used here."""


def compiled_library(cache: Path, defines: tuple[str, ...] = ()) -> Path:
    """The library's path; compiled now if the cache does not have it. `defines` are macros, for tests."""
    command = [*_compiler(), *FLAGS, *(f"-D{name}" for name in defines)]
    if native := NATIVE.get(platform.machine()):
        command.append(native)
    target = cache / "kernels" / f"{_key(command)}.so"
    if target.is_file():
        return target
    try:
        with exclusive(target, lambda text, share: None) as room:
            if not target.is_file():  # another process may have built it while this one waited
                built = room / "kernels.so"
                _compile([*command, str(SOURCES / "kernels.c"), "-o", str(built), *LINK])
                _self_test(built)
                publish(built, target)
    except OSError as error:
        raise KernelsError(f"{target}: {error.strerror or error}") from None
    return target


def _compiler() -> list[str]:
    """The compiler and its own arguments: $CC, else the first that there is."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for name in [chosen[0]] if chosen else COMPILERS:
        if path := shutil.which(name):
            return [path, *chosen[1:]]
    names = chosen[0] if chosen else ", ".join(COMPILERS)
    raise KernelsError(f"there is no C compiler ({names})")


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = _run([command[0], "--version"], 10, "its version cannot be asked")
    for text in (*command, *LINK, version, platform.machine(), cpu_features()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


def cpu_features() -> str:
    """What the first CPU of /proc/cpuinfo says of its model and features; empty where it is silent."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return ""  # the key is then less exact, and the self-test at each start still stands
    return "\n".join(
        line for line in first.splitlines() if line.partition("\t")[0].strip() in names
    )


def _compile(command: list[str]) -> None:
    _run(command, COMPILE_TIMEOUT_S, "the kernels cannot be compiled")


def _self_test(library: Path) -> None:
    """In a fresh process, since a wrong instruction would end it."""
    command = [sys.executable, "-P", "-m", "shmserve.worker.cpu.selftest", str(library)]
    _run(command, SELF_TEST_TIMEOUT_S, "the compiled kernels fail their self-test")


def _run(command: list[str], timeout_s: float, what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsError(f"{command[0]}: {what}: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [""]
        told = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise KernelsError(f"{command[0]}: {what} (status {done.returncode}): {told}")
    return done.stdout
