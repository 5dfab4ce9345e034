"""The CPU runner: facts of the real model, agreement with float32, what it samples, and who computes where it cannot."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jinja2
import numpy as np
import pytest
import torch
from batches import batch_of
from checkpoints import prepared, write_toy

from shmserve.config import Config, WorkerConfig
from shmserve.models import PreparedModel
from shmserve.request import SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker.batch import PromptPart
from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import block_bytes
from shmserve.worker.cpu.runner import SCORED_TOGETHER, CpuRunner, default_num_threads
from shmserve.worker.models.attention import AttentionPlan
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.runner_choice import build_runner
from shmserve.worker.sampler import sample
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import TorchRunner

PARIS = [504, 3575, 282, 4649, 314]
BLOCK, NUM_ROWS = 16, 32
TEXT = (
    "The kettle had been on the stove for 12 minutes when the letter came. Anna read it twice, put it down beside the "
    "bread and looked out at the harbour, where the first of the boats was coming in. It said that the house would be "
    "sold in spring, and that nobody was to blame. She did not believe that."
)


def state_of(*params: SamplingParams) -> SamplingState:
    state = SamplingState(NUM_ROWS)
    for row, row_params in enumerate(params):
        state.set(row, row_params, (), 0)
    return state


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
GREEDY_TOP = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=20)


def runner_of(kind, model: PreparedModel, cache: Path | None = None, **kwargs):
    limits = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 512, "max_model_len": None}
    limits |= {"kv_cache_bytes": 60 << 20, "num_threads": 1, "progress": lambda what, share: None}
    if cache is not None:
        limits["cache"] = cache
    return kind(model, **{**limits, **kwargs})


@pytest.fixture(scope="module")
def runner(default_model, kernel_cache):
    runner = runner_of(CpuRunner, default_model, kernel_cache)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def text_ids(default_model):
    return default_model.tokenizer().encode(TEXT, add_special_tokens=False).ids


def blocks_of(ids, first: int = 1):
    return range(first, first + 1 + len(ids) // BLOCK)


# --- facts of the real model


def next_token(runner, ids) -> tuple[int, float]:
    output = runner.run(batch_of((ids, 0, blocks_of(ids))), state_of(GREEDY_TOP))
    return int(output.token_ids[0, 0]), float(output.logprobs[0, 0])


def test_next_token_of_the_capital_of_france(runner):
    token, logprob = next_token(runner, PARIS)
    assert token == 7042 and logprob == pytest.approx(-0.258, abs=0.05)


def test_next_token_of_counting(runner, default_model):
    ids = default_model.tokenizer().encode("1, 2, 3, 4, 5, 6,", add_special_tokens=False).ids
    token, logprob = next_token(runner, ids)
    assert token == 216 and logprob == pytest.approx(-0.053, abs=0.02)


def test_next_token_of_a_chat(runner, default_model):
    template = jinja2.Environment().from_string(default_model.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids = default_model.tokenizer().encode(text, add_special_tokens=False).ids
    token, logprob = next_token(runner, ids)
    assert token == 19556 and logprob == pytest.approx(-0.531, abs=0.05)


def test_info_says_what_the_memory_holds(runner):
    info = runner.info
    assert info.name.startswith("cpu-")
    assert block_bytes(30, 3, 64, BLOCK) == 2 * 30 * 3 * 64 * 2 * BLOCK
    assert info.num_blocks == (60 << 20) // block_bytes(30, 3, 64, BLOCK) == 170
    assert (info.vocab_size, info.max_model_len) == (49152, 169 * BLOCK)


def test_logits_on_real_text_are_near_those_of_float32(runner, default_model, text_ids):
    """8-bit activations cost about as much as bfloat16 would."""
    ids = text_ids[:64]
    batch = batch_of((ids, 0, blocks_of(ids)))
    exact = runner_of(TorchRunner, default_model)
    with torch.inference_mode():
        hidden = exact._decoder.hidden_states(
            *(torch.from_numpy(array).long() for array in (batch.token_ids, batch.positions)),
            torch.from_numpy(batch.kv_slots).long(),
            exact._cache,
            {None: AttentionPlan(batch, BLOCK, None)},
        )
        expected = exact._decoder.logits(hidden)
    exact.close()
    ours = torch.from_numpy(
        np.concatenate(
            [logits_of(runner, (ids[at : at + 1], at, blocks_of(ids))) for at in range(len(ids))]
        )
    )
    rms = (ours - expected).square().mean().sqrt().item()
    logs, expected_logs = ours.log_softmax(-1), expected.log_softmax(-1)
    kl = (expected_logs.exp() * (expected_logs - logs)).sum(-1).mean().item()
    agreement = (ours.argmax(-1) == expected.argmax(-1)).float().mean().item()
    assert rms < 0.35 and kl < 0.008 and agreement > 0.87, (rms, kl, agreement)


# --- batching changes no bit of the real model


def logits_of(runner, *parts) -> np.ndarray:
    return runner._engine.run(batch_of(*parts))[0].copy()


def test_prefill_chunks_decode_and_batches_give_the_same_bits(runner, text_ids):
    whole = logits_of(runner, (text_ids, 0, blocks_of(text_ids)))[0]
    other = [160 - index for index in blocks_of(text_ids)]
    start = 0
    for size in (1, 16, 3, 20, 1, 1, len(text_ids)):
        chunk = text_ids[start : start + size]
        neighbour = (PARIS, 0, [169])
        parts = logits_of(runner, (chunk, start, other), neighbour)
        start += len(chunk)
    np.testing.assert_array_equal(parts[0], whole)


def test_decoded_tokens_leave_the_cache_as_a_prefill_would(runner):
    """A prefix cache may take blocks of generated tokens: recomputing them gives the same next token, to the bit."""
    ids = list(PARIS)
    logits = logits_of(runner, (ids, 0, [3, 4, 5]))
    for _ in range(30):
        ids.append(int(logits[0].argmax()))
        logits = logits_of(runner, (ids[-1:], len(ids) - 1, [3, 4, 5]))
    np.testing.assert_array_equal(logits_of(runner, (ids, 0, [9, 8, 7])), logits)


# --- sampling


def test_sampled_rows_are_what_the_sampler_gives_for_their_logits(runner, text_ids):
    params = [
        GREEDY,
        SamplingParams(max_tokens=9, temperature=1.0, seed=5),
        GREEDY_TOP,
        SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, seed=6, num_logprobs=3),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((11, 100.0),)),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=1),
    ]
    state = state_of(*params)
    parts = [(text_ids[seq : seq + 9], 0, [seq + 1]) for seq in range(len(params))]
    output = runner.run(batch_of(*parts), state)
    logits = torch.from_numpy(logits_of(runner, *parts))
    expected = sample(logits, np.arange(len(params), dtype=np.int32), state)
    np.testing.assert_array_equal(output.token_ids[:, 0], expected.token_ids)
    np.testing.assert_allclose(output.logprobs[:, 0], expected.logprobs, atol=1e-5)
    assert output.token_ids[4, 0] == 11
    assert output.top.keys() == expected.top.keys() == {2, 3}
    for index in (2, 3):
        np.testing.assert_array_equal(output.top[index][0][0], expected.top[index][0])
        np.testing.assert_allclose(output.top[index][1][0], expected.top[index][1], atol=1e-5)
    assert output.failed == ()


def test_a_prompt_scored_in_chunks_has_the_bits_of_one_scored_at_once(runner, text_ids):
    ids = np.array(text_ids, np.int32)
    blocks = blocks_of(text_ids)

    def scores(first, end):
        """Of tokens first + 1 to end, with another prompt beside it."""
        batch = batch_of((PARIS, 0, [169]), (text_ids[first:end], first, blocks), samples=False)
        targets = ids[first + 1 : end + 1]
        part = PromptPart(1, len(PARIS), first + 1, targets, 3)
        (found,) = runner.run(replace(batch, prompt_parts=(part,)), state_of(GREEDY)).prompt_scores
        return found.logprobs, found.top_ids, found.top_logprobs

    end = len(ids)
    whole = scores(0, end)
    assert len(whole[0]) == end - 1 > SCORED_TOGETHER
    chunks = [scores(first, min(first + 23, end)) for first in range(0, end, 23)]
    for ours, theirs in zip(zip(*chunks, strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(ours), theirs)
    for at in (1, 9, end - 1):
        row = logits_of(runner, (text_ids[:at], 0, blocks))[0].astype(np.float64)
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert whole[0][at - 1] == pytest.approx(expected[ids[at]], abs=1e-4)
        assert whole[1][at - 1, 0] == row.argmax()


def test_without_questions_there_are_no_logprobs(runner):
    output = runner.run(batch_of((PARIS, 0, [1]), (PARIS, 0, [2])), state_of(GREEDY, GREEDY))
    assert output.token_ids.tolist() == [[7042], [7042]] and output.token_ids.dtype == np.int32
    assert output.logprobs is None and output.top is None and output.failed == ()


def test_a_step_that_samples_nothing_gives_no_tokens(runner):
    output = runner.run(batch_of((PARIS, 0, [1]), samples=False), state_of(GREEDY))
    assert output.token_ids.shape == (0, 1)


# --- toys, failures, fallback


def toy_folder(folder: Path, poison_token: int | None = None) -> Path:
    """A random qwen3 in bfloat16, no size of which is round."""
    sizes = {"hidden_size": 40, "intermediate_size": 72, "head_dim": 10}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1000.0}
    return write_toy(
        folder,
        dtype=torch.bfloat16,
        poison_token=poison_token,
        model_type="qwen3",
        **sizes,
        **heads,
    )


TOY_BLOCK_BYTES = 2 * 2 * (10 + 16) * BLOCK * 2


def test_bfloat16_safetensors_run_in_8_bits(tmp_path, kernel_cache):
    model = prepared(toy_folder(tmp_path))
    ids = list(range(1, 40))
    ours = runner_of(CpuRunner, model, kernel_cache)
    theirs = runner_of(TorchRunner, model)
    batch, state = batch_of((ids, 0, [1, 2, 3])), state_of(GREEDY_TOP)
    expected = dict(
        zip(*(part[0].tolist() for part in theirs.run(batch, state).top[0]), strict=True)
    )
    got = dict(zip(*(part[0].tolist() for part in ours.run(batch, state).top[0]), strict=True))
    shared = expected.keys() & got.keys()
    assert len(shared) >= 15
    assert max(abs(expected[token] - got[token]) for token in shared) < 0.5
    ours.close()
    theirs.close()


def test_a_sequence_that_breaks_is_named_and_harms_no_other(tmp_path, kernel_cache):
    broken = runner_of(CpuRunner, prepared(toy_folder(tmp_path, poison_token=7)), kernel_cache)
    healthy = (list(range(8, 30)), 0, [1, 2])
    alone = broken.run(batch_of(healthy), state_of(GREEDY_TOP))
    params = [GREEDY, GREEDY_TOP, SamplingParams(max_tokens=1, temperature=1.0, seed=1)]
    poisoned = ([7] * 20, 0, [3, 4])
    output = broken.run(batch_of(poisoned, healthy, ([3, 7], 0, [5])), state_of(*params))
    assert output.failed == (0, 2)
    assert output.token_ids[1] == alone.token_ids[0] and output.logprobs[1] == alone.logprobs[0]
    after = broken.run(batch_of((healthy[0], 0, [4, 3])), state_of(GREEDY_TOP))
    assert after.failed == () and after.logprobs[0] == alone.logprobs[0]
    broken.close()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_model_len": 65}, "max_model_len 65 is beyond the model's context of 64 tokens"),
        (
            {"kv_cache_bytes": TOY_BLOCK_BYTES},
            f"holds 0 tokens, but one sequence of 16 needs {2 * TOY_BLOCK_BYTES}",
        ),
        (
            {"max_model_len": 40, "kv_cache_bytes": 3 * TOY_BLOCK_BYTES},
            "holds 32 tokens, but one sequence of 40",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path, kernel_cache, limits, words):
    with pytest.raises(ModelLoadError, match=words):
        runner_of(CpuRunner, prepared(toy_folder(tmp_path)), kernel_cache, **limits)


def test_a_missing_tensor_is_named(tmp_path, kernel_cache):
    folder = toy_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(
        ModelLoadError, match=r"mlp.gate_proj.weight has shape \[72, 40\], expected \[80, 40\]"
    ):
        runner_of(CpuRunner, prepared(folder), kernel_cache)


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 2), (3, 2), (8, 7)])
def test_a_core_is_left_to_the_front_end_where_there_are_three(monkeypatch, num_cores, num_threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_cores)))
    assert default_num_threads() == num_threads


def built(tmp_path, monkeypatch, cache: Path, **worker):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config = Config(worker=WorkerConfig(kv_cache_bytes=1 << 20, **worker))
    model = prepared(toy_folder(tmp_path / "model"))
    TokenBytes.from_list([b"a"] * 50).save(model.folder / "token_bytes.bin")
    return build_runner(SimpleNamespace(config=config), model, lambda what, share: None)[0]


@pytest.fixture
def shmserve_cache(tmp_path, kernel_cache, native):
    """A cache directory in which the kernels are compiled already."""
    (tmp_path / "shmserve").symlink_to(kernel_cache)
    return tmp_path


def test_auto_takes_the_kernels(tmp_path, monkeypatch, shmserve_cache, caplog):
    runner = built(tmp_path, monkeypatch, shmserve_cache)
    assert isinstance(runner, CpuRunner) and not caplog.records
    runner.close()


def test_a_runner_has_room_for_a_prompt_that_is_not_cut(tmp_path, monkeypatch, shmserve_cache):
    worker = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 16}
    runner = built(tmp_path, monkeypatch, shmserve_cache, chunked_prefill=False, **worker)
    length = runner.info.max_model_len - 1
    output = runner.run(batch_of(([5] * length, 0, range(1, 9))), state_of(GREEDY))
    assert output.token_ids.shape == (1, 1)
    runner.close()


def test_auto_without_a_compiler_takes_torch_and_says_why_in_one_line(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with caplog.at_level(logging.INFO):
        runner = built(tmp_path, monkeypatch, tmp_path)
    assert isinstance(runner, TorchRunner)
    (record,) = caplog.records
    assert "no C compiler (/no/such/compiler)" in record.getMessage()
    assert "\n" not in record.getMessage()
    runner.close()


def test_auto_with_a_block_size_of_8_takes_torch(tmp_path, monkeypatch, shmserve_cache, caplog):
    runner = built(tmp_path, monkeypatch, shmserve_cache, block_size=8)
    assert isinstance(runner, TorchRunner)
    assert "block size 8 is not a multiple of 16" in caplog.text
    runner.close()


def test_auto_with_kernels_that_fail_their_self_test_takes_torch(
    tmp_path, monkeypatch, shmserve_cache, caplog
):
    def refuse(library):
        raise KernelsError("avx9: the logits are off by 0.5 of their size")

    monkeypatch.setattr("shmserve.worker.cpu.runner.check", refuse)
    runner = built(tmp_path, monkeypatch, shmserve_cache)
    assert isinstance(runner, TorchRunner) and "off by 0.5" in caplog.text
    runner.close()


def test_cpu_without_a_compiler_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(KernelsError, match="no C compiler"):
        built(tmp_path, monkeypatch, tmp_path, runner="cpu")
