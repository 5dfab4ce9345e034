"""Prompts by AMX: the bits of every other variant, over tiles in plain C where the CPU has none; and no worker is lost to it."""

import ctypes
import logging
import platform
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from batches import batch_of

from shmserve.config import WorkerConfig
from shmserve.worker import runner_choice
from shmserve.worker.cpu import amx, build
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import Engine, Library
from shmserve.worker.cpu.pack import Arena, pack_blocks, pack_floats
from shmserve.worker.cpu.selftest import check_amx, toy_model

# Compiled four times, twice over the emulation: half a minute.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

AMX_ROWS = 32
"""Rows of a step from which on it is a prompt's."""

BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144}
BLOCK_SIZES = {"Q4_K": 256}
SHAPES = [(16, 1), (40, 2), (33, 3), (16, 4), (7, 5), (48, 6), (16, 18)]  # rows, groups of 32


@pytest.fixture(scope="module")
def library(tmp_path_factory, compiled_amx):
    return compiled_amx(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="module")
def native_with_amx(native):
    amx.switch_on(native)
    if not native.uses_amx:
        pytest.skip("the kernel gives no tiles, or the compiler does not know them")
    return native


@pytest.fixture(
    params=["library", *["native_with_amx"] * ("amx_int8" in build.cpu_features().split())]
)
def tiled(request):
    """A library that uses AMX: the emulated one, and the native one on a CPU that has it."""
    chosen = request.getfixturevalue(request.param)
    chosen.use_amx(True)
    yield chosen
    chosen.use_amx(False)


def counts(library: Library) -> tuple[int, int, int]:
    """What the emulation saw: faults, products of two tiles, threads that have a configuration now. Zeros of a real one."""
    found = (ctypes.c_int32 * 3)()
    if hasattr(library.c, "shm_emulated_counts"):
        library.c.shm_emulated_counts(found)
    return tuple(found)


def products_of(library: Library, compute) -> int:
    """How many products of tiles `compute` makes; it must leave no fault and no tile behind."""
    _, before, _ = counts(library)
    compute()
    faults, after, configured = counts(library)
    assert (faults, configured) == (0, 0)
    return after - before


def packed(kind: str, rows: int, groups: int):
    rng = np.random.default_rng(rows + groups)
    if kind == "floats":
        return pack_floats(rng.normal(size=(rows, groups * 32)).astype(np.float32), Arena())
    blocks = groups * 32 // BLOCK_SIZES.get(kind, 32)
    raw = rng.integers(0, 256, (rows, blocks, BLOCK_BYTES[kind]), dtype=np.uint8)
    num_halves = 2 if kind in ("Q4_1", "Q4_K") else 1
    factors = rng.normal(size=(rows, blocks, num_halves)).astype("<f2")
    raw[..., : 2 * num_halves] = factors.view(np.uint8)
    return pack_blocks(kind, raw.reshape(rows, -1), Arena())


def rows_of(num_tokens: int, groups: int) -> np.ndarray:
    x = np.random.default_rng(num_tokens).normal(size=(num_tokens, groups * 32))
    return x.astype(np.float32)


# --- products


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "floats"])
def test_products_have_the_bits_of_the_other_variants(tiled, native, portable, kind):
    shapes = [(20, 8), (16, 16)] if kind == "Q4_K" else SHAPES
    for rows, groups in shapes:
        matrix = packed(kind, rows, groups)
        for num_tokens in (32, 33, 47, 48, 49, 64, 79, 96, 115):
            x = rows_of(num_tokens, groups)
            got = tiled.matmul(matrix, x)
            np.testing.assert_array_equal(got, portable.matmul(matrix, x))
            native.use_amx(False)
            np.testing.assert_array_equal(got, native.matmul(matrix, x))
            native.use_amx(tiled is native)


@pytest.mark.parametrize(
    ("num_tokens", "num_tiles"), [(32, 2), (33, 3), (48, 3), (49, 4), (64, 4), (65, 5), (113, 8)]
)
def test_a_prompt_is_multiplied_by_tiles_of_16_rows(library, num_tokens, num_tiles):
    """One product for each 16 rows, 16 columns and group; rows that are not 16 share a tile with some that were done."""
    matrix = packed("Q4_1", 48, 7)
    library.use_amx(True)
    made = products_of(library, lambda: library.matmul(matrix, rows_of(num_tokens, 7)))
    assert made == num_tiles * 3 * 7


def test_few_rows_and_a_library_that_may_not_use_no_tile(library):
    matrix = packed("Q8_0", 16, 2)
    library.use_amx(True)
    few = rows_of(AMX_ROWS - 1, 2)
    assert products_of(library, lambda: library.matmul(matrix, few)) == 0
    many = rows_of(AMX_ROWS, 2)
    assert products_of(library, lambda: library.matmul(matrix, many)) == 2 * 2
    library.use_amx(False)
    assert products_of(library, lambda: library.matmul(matrix, many)) == 0


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_8_bit_products_do_not_saturate(tiled, weight, sign):
    raw = np.full((16, 34), weight & 255, np.uint8)
    raw[:, :2] = np.array([1], "<f2").view(np.uint8)
    x = np.full((37, 32), sign * 127, np.float32)
    assert np.all(tiled.matmul(pack_blocks("Q8_0", raw, Arena()), x) == 32 * 127 * sign * weight)


@pytest.mark.parametrize("sign", [1, -1])
def test_4_bits_are_not_taken_for_a_sign(tiled, sign):
    raw = np.full((16, 20), 0xFF, np.uint8)
    raw[:, :4] = np.array([1, -2], "<f2").view(np.uint8)
    x = np.full((37, 32), sign * 127, np.float32)
    assert np.all(tiled.matmul(pack_blocks("Q4_1", raw, Arena()), x) == 32 * 127 * sign * 13)


def test_a_row_that_is_not_finite_poisons_itself_only(tiled):
    matrix, x = packed("Q4_1", 16, 3), rows_of(41, 3)
    clean = tiled.matmul(matrix, x)
    x[36, 50] = np.nan
    got = tiled.matmul(matrix, x)
    assert np.isnan(got[36]).all()
    np.testing.assert_array_equal(np.delete(got, 36, 0), np.delete(clean, 36, 0))


# --- whole steps


def test_steps_have_the_bits_of_the_native_variant_and_leave_no_thread_with_tiles(tiled, native):
    """A prompt whole and in parts, beside another, and the tokens after it; more threads than work now and then."""
    model, blocks = toy_model(3), ([5, 1, 9], [2, 7])
    ids = np.random.default_rng(1).integers(0, 61, 43).astype(np.int32)
    steps = [
        batch_of((ids[:37], 0, blocks[0]), (ids[:9], 0, blocks[1])),
        batch_of((ids[37:38], 37, blocks[0]), (ids[9:40][::-1], 9, blocks[1])),
        batch_of((ids[38:39], 38, blocks[0])),
        batch_of((ids, 0, blocks[0])),
    ]

    def logits_of(library: Library) -> list[np.ndarray]:
        engine = Engine(
            library,
            model,
            num_blocks=10,
            block_size=16,
            max_tokens=64,
            max_samples=64,
            num_threads=3,
        )
        found = [
            engine.run(step, np.arange(step.num_tokens, dtype=np.int32))[0].copy() for step in steps
        ]
        engine.close()
        return found

    native.use_amx(False)
    expected, got = logits_of(native), []
    tiled.use_amx(True)
    made = products_of(tiled, lambda: got.extend(logits_of(tiled)))
    assert made > 0 or tiled is native
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# --- whether it may be used


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, amx.__name__)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_library_that_passes_uses_amx_and_says_so_in_its_name(library, said):
    library.use_amx(False)
    assert library.variant == "avx512-vnni"
    made = products_of(library, lambda: amx.switch_on(library))
    assert library.uses_amx and library.variant == "avx512-vnni-amx" and made > 0
    assert said() == []


def test_a_library_without_the_code_is_left_alone(portable, said, monkeypatch):
    monkeypatch.setattr(amx, "_tried_in_child", lambda path: pytest.fail("a child for nothing"))
    amx.switch_on(portable)
    assert not (portable.has_amx or portable.uses_amx) and said() == []
    with pytest.raises(KernelsError, match="no tiles: Function not implemented"):
        portable.use_amx(True)
    portable.use_amx(False)


def never(is_wanted: bool) -> None:
    pytest.fail("AMX is switched on where a child could not use it")


def test_what_a_child_cannot_use_the_worker_does_not_try(tmp_path, said):
    path = tmp_path / "x.so"
    path.write_text("nonsense")
    amx.switch_on(SimpleNamespace(has_amx=True, path=path, use_amx=never))
    [(level, line)] = said()
    assert level == "INFO" and line.startswith("AMX is not used: ") and "x.so" in line
    assert "\n" not in line


def test_a_kernel_that_refuses_after_the_child_is_one_line(said, monkeypatch):
    def refuse(is_wanted: bool) -> None:
        raise KernelsError("the kernel gives this process no tiles: Invalid argument")

    monkeypatch.setattr(amx, "_tried_in_child", lambda path: "")
    amx.switch_on(SimpleNamespace(has_amx=True, path=None, use_amx=refuse))
    line = "AMX is not used: the kernel gives this process no tiles: Invalid argument"
    assert said() == [("INFO", line)]


def test_no_amx_keeps_the_runner_from_it(monkeypatch, tmp_path):
    given = []
    module = SimpleNamespace(CpuRunner=lambda model, **kwargs: given.append(kwargs))
    monkeypatch.setitem(sys.modules, "shmserve.worker.cpu.runner", module)
    monkeypatch.setattr(runner_choice, "refuse_without_room", lambda *sizes: None)
    model = SimpleNamespace(weights=tmp_path, num_token_ids=lambda: 5)
    for wanted in (True, False):
        runner_choice.own_runner(WorkerConfig(runner="cpu", amx=wanted), model, {})
    assert [kwargs["may_use_amx"] for kwargs in given] == [True, False]


# --- mutants: what these tests and the self-test are worth


def changed(tmp_path, before: str, after: str):
    """The sources with one place of amx.h changed."""
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources)
    header = sources / "amx.h"
    text = header.read_text()
    assert text.count(before) == 1
    header.write_text(text.replace(before, after))
    return sources


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("memcpy(out, sums[num_rows - n]", "memcpy(out, sums[0]"),
        ("offsets += 4 * stride) {", "offsets += 3 * stride) {"),
        ("q + AMX_TILE * stride", "q + 8 * stride"),
        ("amx_dots(num_tiles, depth, w + g * block_bytes,", "amx_dots(num_tiles, depth, w,"),
    ],
)
def test_the_self_test_finds_wrong_bits(tmp_path, compiled_amx, said, before, after):
    library = compiled_amx(tmp_path, changed(tmp_path, before, after))
    amx.switch_on(library)
    [(level, line)] = said()
    assert level == "WARNING" and "of 40 rows have other logits than without it" in line
    assert not library.uses_amx and library.variant == "avx512-vnni"
    library.use_amx(True)
    with pytest.raises(KernelsError, match="other logits"):
        check_amx(library)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("GROUP / 4, GROUP / 4}", "16, 16}"),  # B higher than A is wide
        (".palette = 1", ".palette = 2"),
        (
            "    tiles_release();\n    amx_is_begun = false;\n",
            "    tiles_release();\n",
        ),  # tiles that are gone are taken for configured
        ("    tiles_configure(&config);\n", ""),
    ],
)
def test_the_emulation_finds_tiles_that_are_misused(tmp_path, compiled_amx, before, after):
    library = compiled_amx(tmp_path, changed(tmp_path, before, after))
    library.use_amx(True)
    for _ in range(2):
        library.matmul(packed("Q8_0", 16, 2), rows_of(40, 2))
    assert counts(library)[0] > 0


# --- the real instructions


REAL = (
    *("-march=x86-64-v3", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    *("-mamx-tile", "-mamx-int8"),
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_the_real_instructions_compile_and_are_there(tmp_path, monkeypatch):
    """On a CPU without: compiled and assembled, not run."""
    monkeypatch.delenv("CC", raising=False)
    assembly = tmp_path / "kernels.s"
    compiler = build._compiler()
    strict = (*build.FLAGS, "-Wall", "-Wextra", "-Werror", "-O1", *REAL)
    source = str(build.SOURCES / "kernels.c")
    for command in (
        [*compiler, *strict, "-S", source, "-o", str(assembly)],
        [*compiler, "-c", str(assembly), "-o", str(tmp_path / "kernels.o")],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    words = set(assembly.read_text().split())
    assert {"ldtilecfg", "tileloadd", "tilezero", "tdpbssd", "tilestored", "tilerelease"} <= words


def real(tmp_path, request, sources) -> Library:
    """The real tile instructions between emulated AVX-512 ones."""
    native = request.getfixturevalue("native")
    if native.has_amx or platform.machine() != "x86_64":
        pytest.skip("this CPU has AMX, or none ever")
    emulated = request.getfixturevalue("emulated_variant")
    return emulated(
        tmp_path, "SHM_AVX512_VNNI", "-Og", "-DSHM_AMX", "-mamx-tile", "-mamx-int8", sources=sources
    )


@pytest.mark.slow
def test_a_kernel_without_amx_refuses_and_nothing_is_lost(tmp_path, request, said):
    library = real(tmp_path, request, build.SOURCES)
    amx.switch_on(library)
    [(level, line)] = said()
    assert level == "INFO" and "the kernel gives this process no tiles" in line
    assert not library.uses_amx


@pytest.mark.slow
def test_a_cpu_that_dies_of_a_tile_costs_the_child_only(tmp_path, request, said):
    """A kernel that says yes where the CPU has none."""
    sources = changed(tmp_path, "        return errno;\n", "        return 0;\n")
    text = (sources / "amx.h").read_text()
    assert text.count("? 0 : EPERM;") == 1
    (sources / "amx.h").write_text(text.replace("? 0 : EPERM;", "? 0 : 0;"))
    library = real(tmp_path, request, sources)
    amx.switch_on(library)
    assert said() == [
        ("INFO", "AMX is not used: a process that tried it died: Illegal instruction")
    ]
    assert not library.uses_amx
