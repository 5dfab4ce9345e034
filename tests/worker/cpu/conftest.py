"""Libraries compiled once for all tests of the kernels."""

import subprocess
from pathlib import Path

import pytest

from shmserve.worker.cpu import build
from shmserve.worker.cpu.build import compiled_library
from shmserve.worker.cpu.library import Library


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def native(kernel_cache):
    """The variant of this machine."""
    return Library(compiled_library(kernel_cache))


@pytest.fixture(scope="session")
def portable(kernel_cache):
    """The variant without intrinsics: what every other machine gets."""
    return Library(compiled_library(kernel_cache, ("SHM_PORTABLE",)))


def emulated(folder: Path, define: str, *more: str, sources: Path = build.SOURCES) -> Library:
    """A variant with instructions that this CPU may lack, emulated: it runs on any x86-64 CPU of the last ten years. `more` are
    flags of the compiler."""
    if not {"avx2", "fma", "f16c"} <= set(build.cpu_features().split()):
        pytest.skip("the emulation needs AVX2, FMA and F16C")
    path, header = folder / f"{define}.so", Path(__file__).with_name("vnni_emulation.h")
    flags = ("-O1", "-march=x86-64-v3", f"-D{define}", "-include", str(header), *more)
    source = str(sources / "kernels.c")
    command = [*build._compiler(), *build.FLAGS, *flags, source, "-o", str(path), *build.LINK]
    subprocess.run(command, check=True)
    return Library(path)


@pytest.fixture(scope="session")
def avx512(kernel_cache):
    return emulated(kernel_cache, "SHM_AVX512_VNNI")


@pytest.fixture(scope="session")
def avx_vnni(kernel_cache):
    return emulated(kernel_cache, "__AVXVNNI__")


@pytest.fixture(scope="session")
def emulated_variant():
    return emulated


@pytest.fixture(scope="session")
def compiled_amx():
    """Compiles the AVX512-VNNI variant with AMX, whose tiles are in plain C too, into a folder."""
    tiles = Path(__file__).with_name("amx_emulated.h")
    flags = ("-Og", "-DSHM_AMX", f'-DSHM_AMX_EMULATION="{tiles}"')

    def compiled(folder: Path, sources: Path = build.SOURCES) -> Library:
        return emulated(folder, "SHM_AVX512_VNNI", *flags, sources=sources)

    return compiled


@pytest.fixture(params=["native", "portable", pytest.param("avx512", marks=pytest.mark.slow)])
def library(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(
    params=[
        "portable",
        pytest.param("avx512", marks=pytest.mark.slow),
        pytest.param("avx_vnni", marks=pytest.mark.slow),
    ]
)
def other(request):
    """A variant that must give the bits of the native one."""
    return request.getfixturevalue(request.param)
