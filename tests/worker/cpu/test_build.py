"""Compiling once, finding it again, and every way in which there can be no library."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmserve.worker.cpu import build
from shmserve.worker.cpu.build import KernelsError, compiled_library
from shmserve.worker.cpu.library import Library
from shmserve.worker.cpu.selftest import check


@pytest.fixture
def fake_compiler(tmp_path, kernel_cache, native, monkeypatch):
    """A compiler that notes each compilation and hands out the library that the session has compiled."""
    ready, notes = next((kernel_cache / "kernels").glob("*.so")), tmp_path / "notes"
    script = tmp_path / "fakecc"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo fake 1; exit 0; fi\n'
        f"echo compiled >> {notes}\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {ready} "$2"\n'
    )
    script.chmod(0o755)
    notes.touch()
    monkeypatch.setenv("CC", str(script))
    return notes


@pytest.mark.slow
def test_a_library_is_compiled_once(fake_compiler, cache_dir):
    first = compiled_library(cache_dir)
    assert first.parent == cache_dir / "kernels"
    assert compiled_library(cache_dir) == first
    assert fake_compiler.read_text() == "compiled\n"
    check(Library(first))


@pytest.mark.slow
def test_another_source_compiler_or_cpu_is_another_library(
    fake_compiler, cache_dir, monkeypatch, tmp_path
):
    first = compiled_library(cache_dir)
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    with monkeypatch.context() as patch:
        patch.setattr(build, "SOURCES", sources)
        assert compiled_library(cache_dir) == first
        (sources / "pool.h").write_text((sources / "pool.h").read_text() + "\n")
        other_source = compiled_library(cache_dir)
    with monkeypatch.context() as patch:
        patch.setattr(build, "cpu_features", lambda: "another CPU")
        other_cpu = compiled_library(cache_dir)
    with monkeypatch.context() as patch:
        patch.setenv("CC", os.environ["CC"] + " -O1")
        other_command = compiled_library(cache_dir)
    assert len({first, other_source, other_cpu, other_command}) == 4
    assert fake_compiler.read_text() == 4 * "compiled\n"


X86 = ("-march=x86-64", "-mavx2", "-mfma", "-mf16c")
VARIANTS = {
    "portable": ("-DSHM_PORTABLE",),
    "avx2": X86,
    "avx-vnni": (*X86, "-mavxvnni"),
    "avx512-vnni": (*X86, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
}
QUICK_VARIANTS = (
    "portable",
    "avx512-vnni",
)  # what has least in common; the others in `make test-all`


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=() if name in QUICK_VARIANTS else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_every_variant_compiles_without_a_warning(variant, monkeypatch):
    """Also those that this machine cannot run."""
    if variant != "portable" and platform.machine() != "x86_64":
        pytest.skip("the other variants are for x86-64")
    monkeypatch.delenv("CC", raising=False)
    strict = ("-Wall", "-Wextra", "-Werror", "-O1", "-fsyntax-only")
    source = str(build.SOURCES / "kernels.c")
    command = [*build._compiler(), *build.FLAGS, *strict, *VARIANTS[variant], source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_cpu_tells_its_features():
    assert len(build.cpu_features()) > 20


def test_two_processes_at_once_compile_once(fake_compiler, cache_dir):
    program = (
        "import sys; from pathlib import Path; from shmserve.worker.cpu.build import compiled_library; "
        "print(compiled_library(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(cache_dir)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert paths == {str(compiled_library(cache_dir))}
    assert fake_compiler.read_text() == "compiled\n"


def test_no_compiler_is_one_line(monkeypatch, cache_dir):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(cache_dir))
    with pytest.raises(KernelsError, match=r"^there is no C compiler \(cc, gcc, clang\)$"):
        compiled_library(cache_dir)
    monkeypatch.setenv("CC", "/no/such/compiler -m64")
    with pytest.raises(KernelsError, match=r"no C compiler \(/no/such/compiler\)"):
        compiled_library(cache_dir)


def failing_compiler(folder: Path, body: str) -> str:
    script = folder / "badcc"
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then exit 0; fi\n{body}\n')
    script.chmod(0o755)
    return str(script)


def test_a_compiler_that_fails_is_one_line_and_leaves_nothing(monkeypatch, tmp_path, cache_dir):
    body = "echo 'note: x' >&2; echo 'kernels.c:1: error: no room' >&2; echo 'bye' >&2; exit 3"
    monkeypatch.setenv("CC", failing_compiler(tmp_path, body))
    with pytest.raises(KernelsError) as caught:
        compiled_library(cache_dir)
    assert "\n" not in str(caught.value)
    assert "cannot be compiled (status 3): kernels.c:1: error: no room" in str(caught.value)
    assert not list((cache_dir / "kernels").glob("*.so"))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("(exponent << 23)", "(exponent << 22)", "the logits are off by"),
        pytest.param("e->step = step;", "__builtin_trap();", "status -", marks=pytest.mark.slow),
    ],
)
def test_a_library_that_computes_something_else_is_never_published(
    monkeypatch, tmp_path, cache_dir, before, after, told
):
    """Also where it crashes: that ends the child alone."""
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    changed = 0
    for path in (*sources.glob("*.h"), *sources.glob("*.c")):
        path.write_text(path.read_text().replace(before, after))
        changed += path.read_text().count(after)
    assert changed == 1
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "FLAGS", ("-O0", "-std=gnu11", "-Wno-psabi", "-fPIC"))
    with pytest.raises(KernelsError) as caught:
        compiled_library(cache_dir)
    assert "fail their self-test" in str(caught.value) and told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((cache_dir / "kernels").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_one_line(fake_compiler, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(KernelsError, match=r"Not a directory|File exists"):
        compiled_library(blocked)


def test_a_file_that_is_no_library_is_one_line(tmp_path):
    path = tmp_path / "x.so"
    path.write_text("nonsense")
    with pytest.raises(KernelsError, match=r"x\.so"):
        Library(path)
