"""Libraries compiled once for all tests of the kernels."""

import pytest

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


@pytest.fixture(params=["native", "portable"])
def library(request):
    return request.getfixturevalue(request.param)
