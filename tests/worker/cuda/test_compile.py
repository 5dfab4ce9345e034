"""Every kernel compiled for GPUs that are not here, with the very launches of the operations: it fits them and spills nothing.

The operations run on tensors of the meta device; what reaches `launch.run` is compiled instead of launched.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shmserve.worker.cuda.ops import triton_ops
from shmserve.worker.cuda.reference import DecodeScratch, SampleScratch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from shmserve.worker.cuda import launch  # noqa: E402

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(launch.IS_INTERPRETED, reason="this process interprets kernels"),
]

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""What a block may have at most, by architecture. 87 and 89 have the code of 86, and as much or more."""
REGISTERS_OF_SM = 65_536
PARKED_BYTES = 32
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Shape:
    num_q: int = 32
    num_kv: int = 8
    dim: int = 128
    hidden: int = 4096
    ffn: int = 14_336
    vocab: int = 128_256
    context: int = 131_072
    window: int = 0
    softcap: float = 0.0
    has_norms: bool = False
    has_bias: bool = False
    gelu: bool = False
    dtype: torch.dtype = torch.bfloat16


LLAMA_8B = Shape()
OTHERS = {
    "SmolLM2-135M": Shape(9, 3, 64, 576, 1536, 49_152, 8192),
    "Mistral-7B": Shape(vocab=32_000, context=32_768, window=4096),
    "Qwen2-72B": Shape(64, 8, 128, 8192, 29_568, 152_064, 32_768, has_bias=True),
    "Qwen3-8B": Shape(32, 8, 128, 4096, 12_288, 151_936, 40_960, has_norms=True),
    "Phi-3": Shape(32, 32, 96, 3072, 8192, 32_064, 4096, window=2047),
    "a head of 80": Shape(32, 32, 80, 2560, 10_240, 51_200, 2048),
    "Gemma-2-9B": Shape(16, 8, 256, 3584, 14_336, 256_000, 8192, 4096, 50.0, gelu=True),
    "SmolLM2-135M in float32": Shape(9, 3, 64, 576, 1536, 49_152, 8192, dtype=torch.float32),
}


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    def _bound(self, arch: int) -> tuple[Any, ...]:
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, _ = bind(*self.args, **self.constants, **self.options)
        return target, backend, bound, specialization

    def version(self, arch: int) -> str:
        """Of the kernel, the one that is compiled for these arguments: triton makes a constant of a 1, and cares who divides by 16."""
        return f"{self.kernel.__name__} {self._bound(arch)[3]}"

    def compiled(self, arch: int) -> Any:
        """As triton's own `kernel[grid](...)` would compile it on such a GPU."""
        target, backend, bound, specialization = self._bound(arch)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, self.options, bound, specialization, None
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=options.__dict__)


@pytest.fixture
def caught(monkeypatch) -> list[Launch]:
    launches: list[Launch] = []

    def catch(kernel, grid, args, constants, num_warps, num_stages=1):
        assert all(size > 0 for size in grid)
        options = launch.options(num_warps, num_stages)
        launches.append(Launch(kernel, args, dict(constants), options))

    monkeypatch.setattr(launch, "run", catch)
    return launches


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def run_all_operations(s: Shape, rows: int = 7, num_blocks: int = 1000) -> None:
    ops = triton_ops()

    def t(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=s.dtype, device=META)

    def f(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    def i(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    width = (s.num_q + 2 * s.num_kv) * s.dim
    bias = f(width) if s.has_bias else None
    q_norm = f(s.dim) if s.has_norms else None
    turn = (f(s.context, s.dim // 2), f(s.context, s.dim // 2))
    cache = (t(num_blocks, 16, s.num_kv, s.dim), t(num_blocks, 16, s.num_kv, s.dim))
    q, table = t(rows, s.num_q, s.dim), i(rows, s.context // 16)
    scratch = DecodeScratch.allocate(rows, s.num_q, s.dim, s.context, META)
    mask = (s.dim**-0.5, s.window, s.softcap)

    ops.embed(i(rows), i(rows), i(rows), t(s.vocab, s.hidden), t(rows, s.hidden))
    for residual in (None, t(rows, s.hidden)):
        ops.add_rms_norm(t(rows, s.hidden), residual, f(s.hidden), t(rows, s.hidden), 1e-5)
    norms = (bias, q_norm, q_norm)
    ops.rotary_write(t(rows, width), *norms, *turn, i(rows), i(rows), q, *cache, 1e-5)
    ops.decode_attention(q, *cache, table, i(rows), q, scratch, *mask)
    ops.prefill_attention(q, *cache, table, i(rows + 1), i(rows), q, rows, *mask)
    ops.gated_mul(t(rows, 2 * s.ffn), t(rows, s.ffn), s.gelu)
    matrices = ((s.num_q * s.dim, s.hidden), (s.hidden, 2 * s.ffn), (s.ffn, s.hidden))
    for depth, columns in (*matrices, (s.hidden, s.vocab)):
        ops.gemv(t(rows, depth), t(columns, depth), None, t(rows, columns))
    ops.gemv(t(rows, s.hidden), t(width, s.hidden), bias, f(rows, width))
    seeds = i(rows, dtype=torch.int64)
    results = (i(rows), f(rows), i(rows))
    logits, samples = t(rows, s.vocab), SampleScratch.allocate(rows, s.vocab, META)
    limits = (f(rows), f(rows), i(rows), f(rows))
    ops.sample(logits, *limits, seeds, i(rows), *results, samples)


def assert_fits(one: Launch, arch: int, folder: Path) -> None:
    kernel = one.compiled(arch)
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(binary)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found, said
    registers, stack, local = map(int, found.groups())
    what = f"{one.kernel.__name__} for sm_{arch}: {said.split('Function', 1)[-1].strip()}"
    # No kernel has an array of its own, so a stack holds nothing but spilled registers. A few pass: triton 3.7.1's ptxas leaves 8 bytes in
    # _limit_row (stored before the loop, loaded behind it), and 32 in Gemma's _attend_chunk for sm_80, where nobody has looked.
    assert stack <= PARKED_BYTES and not local, what
    # A constant below float32's normal numbers is a float64 to triton, and so is all that is compared with it: a sixty-fourth of the speed.
    assert ".f64" not in kernel.asm["ptx"], what
    # Two blocks at least share an SM, so that one computes while the other waits for memory.
    assert 2 * registers * 32 * kernel.metadata.num_warps <= REGISTERS_OF_SM, what
    assert kernel.metadata.shared <= SHARED_BYTES[arch], what


KERNELS = {
    "_embed", "_add_rms_norm", "_rotary_write", "_attend_split", "_join_splits", "_attend_chunk",
    "_gated_mul", "_gemv", "_chunk_figures", "_limit_row", "_chunk_best", "_best_of_row",
}  # fmt: skip


SLOW = pytest.mark.slow
ARCHITECTURES = [
    pytest.param(80, marks=SLOW),
    pytest.param(86, marks=SLOW),
    pytest.param(90, marks=SLOW),
]
ARCHITECTURES += [pytest.param(120, marks=SLOW)]
"""90 has instructions of its own, 120 the least shared memory. About 10 s each."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_an_8b_llama_fit_and_spill_nothing(arch, caught, tmp_path):
    run_all_operations(LLAMA_8B)
    assert {one.kernel.__name__ for one in caught} == KERNELS
    for one in caught:
        assert_fits(one, arch, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_other_models_fit_and_spill_nothing(name, caught, tmp_path):
    run_all_operations(OTHERS[name])
    for arch in SHARED_BYTES:
        for one in caught:
            assert_fits(one, arch, tmp_path)


def test_a_launch_does_not_depend_on_how_many_rows_there_are_nor_on_their_lengths(caught):
    """So that a graph is compiled once, and a row is computed alone as it is among others: the same code, the same tiles."""
    run_all_operations(LLAMA_8B, rows=2)
    few = [(one.kernel, one.constants, one.options) for one in caught]
    caught.clear()
    run_all_operations(LLAMA_8B, rows=8)
    assert [(one.kernel, one.constants, one.options) for one in caught] == few


def test_no_number_of_rows_has_a_version_of_a_kernel_of_its_own(caught):
    """It would be compiled when the first such batch comes, while everybody waits."""
    versions = []
    for rows in (1, 2, 8):
        run_all_operations(LLAMA_8B, rows=rows)
        versions.append([one.version(90) for one in caught])
        caught.clear()
    assert versions[0] == versions[1] == versions[2]


@pytest.mark.slow
def test_a_kernel_that_spills_is_found(caught, tmp_path):
    run_all_operations(LLAMA_8B)
    (chunk,) = [one for one in caught if one.kernel.__name__ == "_attend_chunk"]
    greedy = chunk.constants | {"BLOCK_M": 128, "TILE_TOKENS": 32, "BLOCK_N": 128}
    with pytest.raises(AssertionError, match="_attend_chunk for sm_80"):
        assert_fits(Launch(chunk.kernel, chunk.args, greedy, chunk.options), 80, tmp_path)
