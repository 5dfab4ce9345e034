"""A toy GGUF of each quantised type, loaded and computed by both CPU runners, against the same values as float32."""

import struct

import numpy as np
import pytest

from shmserve.ggml_blocks import TENSOR_TYPES
from shmserve.gguf import GGUFFile
from shmserve.models import prepare
from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.cpu.runner import CpuRunner
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import TorchRunner, open_model

pytestmark = pytest.mark.slow

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS, BLOCK = 256, 512, 4, 2, 2, 16
SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
TOKENS = np.random.default_rng(5).integers(0, 262, 24).astype(np.int32)
# type -> where its float16 lie in a block, and about what they are for weights of about 0.1
HALVES = {
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: -0.15},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 6e-5},
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Where the kernels are compiled once for all tests of this file."""
    return tmp_path_factory.mktemp("kernels")


def random_blocks(type_name: str, rows: int, columns: int, rng) -> bytes:
    elements, size = SIZES[type_name]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for at, typical in HALVES[type_name].items():
        scales = (typical * rng.uniform(0.5, 1.5, len(blocks))).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def model_file(write_gguf, toy_metadata, type_name: str, vocab: int = 262):
    """(the quantised file, the same model with the values of its tensors as F32)"""
    metadata = toy_metadata() | {
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    rng = np.random.default_rng(11)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    matrices = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv_rows, HIDDEN),
        "attn_v": (kv_rows, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    ones = np.ones(HIDDEN, "<f4").tobytes()
    tensors = {
        "token_embd.weight": ((vocab, HIDDEN), type_name),
        "output_norm.weight": ((HIDDEN,), "F32", ones),
    }
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_norm.weight"] = ((HIDDEN,), "F32", ones)
        tensors[f"blk.{layer}.ffn_norm.weight"] = ((HIDDEN,), "F32", ones)
        for name, shape in matrices.items():
            tensors[f"blk.{layer}.{name}.weight"] = (shape, type_name)
    quantised = {
        name: entry if len(entry) == 3 else (*entry, random_blocks(entry[1], *entry[0], rng))
        for name, entry in tensors.items()
    }
    path = write_gguf(metadata, quantised, name="quantised.gguf")
    file = GGUFFile(path)
    plain = {
        name: (info.shape, "F32", file.array(name).astype("<f4").tobytes())
        for name, info in file.tensors.items()
    }
    return path, write_gguf(metadata, plain, name="plain.gguf")


def logprobs_of(runner_kind, path, cache_dir, vocab: int = 262, **more) -> np.ndarray:
    """The log-probabilities behind the last token, from a prompt in one chunk."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": None}
    limits |= {"kv_cache_bytes": 1 << 20, "block_size": BLOCK, "num_threads": 1}
    model = prepare(str(path), cache_dir=cache_dir)
    runner = runner_kind(model, **limits, **more, progress=lambda what, share: None)
    positions = np.arange(len(TOKENS), dtype=np.int32)
    table = np.array([[1, 2]], np.int32)
    batch = Batch(
        step=0,
        rows=np.zeros(1, np.int32),
        token_ids=TOKENS,
        positions=positions,
        kv_slots=table[0, positions // BLOCK] * BLOCK + positions % BLOCK,
        cu_seqlens=np.array([0, len(TOKENS)], np.int32),
        block_table=table,
        kv_lens=np.array([len(TOKENS)], np.int32),
        sample_seqs=np.zeros(1, np.int32),
        is_decode=False,
    )
    state = SamplingState(1)
    state.set(0, SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=vocab), (), 0)
    output = runner.run(batch, state)
    ids, values = output.top[0]
    runner.close()
    found = np.full(vocab, np.nan)
    found[ids] = values
    return found


@pytest.mark.parametrize("type_name", HALVES)
def test_the_torch_runner_computes_with_exactly_the_values_of_the_blocks(
    write_gguf, toy_metadata, cache_dir, type_name
):
    quantised, plain = model_file(write_gguf, toy_metadata, type_name)
    ours = logprobs_of(TorchRunner, quantised, cache_dir)
    assert np.array_equal(ours, logprobs_of(TorchRunner, plain, cache_dir))
    assert np.isfinite(ours).all() and ours.std() > 0.5


@pytest.mark.parametrize("type_name", HALVES)
def test_the_kernels_are_as_near_as_eight_bits_are(
    write_gguf, toy_metadata, cache_dir, kernels, type_name
):
    quantised, plain = model_file(write_gguf, toy_metadata, type_name)
    ours = logprobs_of(CpuRunner, quantised, cache_dir, cache=kernels)
    exact = logprobs_of(TorchRunner, plain, cache_dir)
    rms = np.sqrt(np.square(ours - exact).mean())
    assert rms < 0.05 * exact.std(), (rms, exact.std())


@pytest.mark.parametrize("runner_kind", [TorchRunner, CpuRunner])
def test_a_type_that_cannot_be_read_is_named_with_its_tensor(
    write_gguf, toy_metadata, cache_dir, kernels, runner_kind
):
    _, plain = model_file(write_gguf, toy_metadata, "Q5_0")
    file = GGUFFile(plain)
    tensors = {
        name: (info.shape, "F32", file.raw(name).tobytes()) for name, info in file.tensors.items()
    }
    shape = tensors["blk.1.ffn_up.weight"][0]
    tensors["blk.1.ffn_up.weight"] = (shape, "Q2_K", bytes(shape[0] * 84))
    metadata = {key: _plain(value) for key, value in file.metadata.items()}
    path = write_gguf(metadata, tensors, name="q2.gguf")
    more = {"cache": kernels} if runner_kind is CpuRunner else {}
    with pytest.raises(
        ModelLoadError, match=r"q2\.gguf: tensor blk\.1\.ffn_up\.weight: .*Q2_K"
    ) as e:
        logprobs_of(runner_kind, path, cache_dir, **more)
    assert "\n" not in str(e.value)


def test_more_layers_than_tensors_are_refused_before_memory_is_taken_for_them(
    write_gguf, toy_metadata
):
    quantised, _ = model_file(write_gguf, toy_metadata, "Q5_0")
    file = GGUFFile(quantised)
    metadata = {key: _plain(value) for key, value in file.metadata.items()}
    path = write_gguf(
        metadata | {"llama.block_count": 2**32 - 1},
        {"token_embd.weight": ((262, HIDDEN), "F32", bytes(4 * 262 * HIDDEN))},
    )
    with pytest.raises(ModelLoadError, match=r"block_count is 4294967295, but .* has 1 tensors"):
        open_model(path, "gguf")


@pytest.mark.parametrize("runner_kind", [TorchRunner, CpuRunner])
def test_an_absurd_size_is_refused_with_the_tensor_before_memory_is_taken_for_it(
    write_gguf, toy_metadata, cache_dir, kernels, runner_kind
):
    quantised, _ = model_file(write_gguf, toy_metadata, "Q5_0")
    content = quantised.read_bytes()
    key = b"llama.feed_forward_length" + struct.pack("<I", 4)
    assert content.count(key) == 1
    path = quantised.with_name("absurd.gguf")
    absurd = content.replace(key + struct.pack("<I", FFN), key + struct.pack("<I", 2**32 - 256))
    path.write_bytes(absurd)
    more = {"cache": kernels} if runner_kind is CpuRunner else {}
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.ffn_gate\.weight .*4294967040"):
        logprobs_of(runner_kind, path, cache_dir, **more)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
