"""The CUDA runner on the CPU: the same tokens as the torch runner, recorded or not, carried or not."""

import dataclasses
import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import write_toy
from overlapped import scheduled

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch, PromptPart
from shmserve.worker.cuda.buffers import StepBuffers
from shmserve.worker.cuda.ops import REFERENCE
from shmserve.worker.cuda.runner import CudaRunner, checked_device, kernels
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.overlap import OverlappingRunner
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import TorchRunner

BLOCK, HIDDEN, FFN, VOCAB, DIM = 16, 64, 128, 256, 16
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 64}
LIMITS |= {"kv_cache_bytes": 1 << 20, "block_size": BLOCK, "progress": lambda what, share: None}
LIMITS |= {"num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": VOCAB}
    heads = {"num_attention_heads": HIDDEN // DIM, "num_key_value_heads": 2}
    write_toy(folder, seed=5, scale=0.2, max_position_embeddings=128, **sizes, **heads)
    return SimpleNamespace(weights=folder, format="safetensors")


def cuda_runner(model, **options) -> CudaRunner:
    options = {"device": "cpu", "dtype": torch.float32, "ops": REFERENCE} | options
    return CudaRunner(model, **{**LIMITS, **options})


def batch_of(parts, num_computed) -> Batch:
    """`parts` are (row, tokens); row r has blocks 3 r + 1 and the two behind it."""
    rows = np.array([row for row, _ in parts], np.int32)
    counts = np.array([len(tokens) for _, tokens in parts])
    starts = np.array([num_computed[row] for row, _ in parts])
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    table = (3 * rows[:, None] + 1 + np.arange(3)).astype(np.int32)
    positions = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    ).astype(np.int32)
    owner = np.repeat(np.arange(len(rows)), counts)
    return Batch(
        step=1,
        rows=rows,
        token_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
        positions=positions,
        kv_slots=(table[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        cu_seqlens=cu,
        block_table=table,
        kv_lens=(starts + counts).astype(np.int32),
        sample_seqs=np.arange(len(rows), dtype=np.int32),
        is_decode=bool((counts == 1).all()),
    )


def state_of(num_rows=12, **params) -> SamplingState:
    state = SamplingState(num_rows, VOCAB)
    for row in range(num_rows):
        state.set(row, SamplingParams(max_tokens=9, **{"temperature": 0.0} | params), (), 0)
    return state


def generated(runner, prompts, state, num_steps=6) -> list[list[int]]:
    """Prompts of rows 0, 1, ... at once, then a token of each a step."""
    num_computed = dict.fromkeys(range(len(prompts)), 0)
    next_tokens = dict(enumerate(prompts))
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_steps):
        output = runner.run(batch_of(list(next_tokens.items()), num_computed), state)
        assert output.failed == ()
        for row, token in enumerate(output.token_ids[:, 0].tolist()):
            num_computed[row] += len(next_tokens[row])
            next_tokens[row] = [token]
            out[row].append(token)
            state.position[row] += 1
    return out


PROMPTS = [[5, 9, 200], [17] * 1, list(range(40, 61))]
LONG = [(7 * i + 3) % VOCAB for i in range(41)]
MANY = [[3 * i + 1, i, 7] for i in range(11)]


@pytest.fixture(scope="module")
def expected(model):
    runner = TorchRunner(model, **LIMITS)
    yield {len(p): generated(runner, p, state_of()) for p in (PROMPTS, MANY)}
    runner.close()


@pytest.mark.parametrize("prompts", [PROMPTS, MANY], ids=["gemv", "mm"])
def test_greedy_tokens_are_those_of_the_torch_runner(model, expected, prompts):
    runner = cuda_runner(model)
    assert generated(runner, prompts, state_of()) == expected[len(prompts)]
    runner.close()


def test_carried_tokens_are_the_tokens_of_the_step_before(model, expected):
    """Two steps in flight all the time; the host never says which token is computed. A row leaves on the way."""
    runner, state = cuda_runner(model), state_of()
    runner.launch(batch_of(list(enumerate(PROMPTS)), dict.fromkeys(range(3), 0)), state)
    lengths = {row: len(prompt) for row, prompt in enumerate(PROMPTS)}
    rows, out = [0, 1, 2], {row: [] for row in range(3)}
    for step in range(5):
        before, rows = rows, [row for row in rows if not (step == 2 and row == 1)]
        assert runner.can_carry(np.array(rows, np.int32), state)
        carried = np.array([before.index(row) for row in rows], np.int32)
        runner.launch(batch_of([(row, [0]) for row in rows], lengths), state, carried)
        for row, token in zip(before, runner.collect().token_ids[:, 0].tolist(), strict=True):
            out[row].append(token)
            state.position[row] += 1
        for row in rows:
            lengths[row] += 1
    for row, token in zip(rows, runner.collect().token_ids[:, 0].tolist(), strict=True):
        out[row].append(token)
    reference = expected[len(PROMPTS)]
    assert out == {0: reference[0], 1: reference[1][:3], 2: reference[2]}


def test_a_carried_draw_is_the_draw_of_its_position(model):
    prompts = [[5, 9, 200], [8, 8]]
    runner, state = cuda_runner(model), state_of(temperature=1.3, seed=99)
    plain = generated(runner, prompts, state, 2)
    state.position[:] = 0
    runner.launch(batch_of(list(enumerate(prompts)), {0: 0, 1: 0}), state)
    follow = batch_of([(0, [0]), (1, [0])], {0: 3, 1: 2})
    runner.launch(follow, state, np.array([0, 1], np.int32))
    first, second = runner.collect(), runner.collect()
    both = np.concatenate([first.token_ids, second.token_ids], axis=1)
    assert both.tolist() == plain


@pytest.mark.parametrize(
    "params",
    [
        {"num_logprobs": 2},
        {"logit_bias": ((3, 5.0),)},
        {"allowed_token_ids": (3, 4, 5)},
        {"bad_words": ((3,), (4, 5))},
    ],
    ids=lambda params: next(iter(params)),
)
def test_rows_that_the_kernel_cannot_sample_are_sampled_on_the_host_and_not_carried(model, params):
    ours, theirs = cuda_runner(model), TorchRunner(model, **LIMITS)
    state = state_of(temperature=0.8, seed=3)
    tokens = np.array([*PROMPTS[1], 0], np.int32)
    limited = SamplingParams(max_tokens=9, temperature=0.8, seed=3, **params)
    state.set(1, limited, (), 0, tokens, len(PROMPTS[1]))
    batch = batch_of(list(enumerate(PROMPTS)), dict.fromkeys(range(3), 0))
    assert not ours.can_carry(np.array([1], np.int32), state)
    assert ours.can_carry(np.array([0, 2], np.int32), state)
    mine, other = ours.run(batch, state), theirs.run(batch, state)
    assert mine.token_ids[1, 0] == other.token_ids[1, 0]
    if "num_logprobs" in params:
        assert mine.top is not None and other.top is not None
        assert mine.top[1][0].tolist() == other.top[1][0].tolist()
        assert mine.top[1][0].shape == (1, 2)
        assert mine.logprobs[1, 0] == pytest.approx(other.logprobs[1, 0], abs=1e-4)
    ours.launch(batch, state)
    assert not ours.can_carry(np.array([0], np.int32), state), "its logits would be overwritten"
    ours.collect()


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.5}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}],
    ids=["top-p", "top-k", "all"],
)
def test_rows_with_limits_are_sampled_on_the_device_and_carried(model, params):
    ours, theirs = cuda_runner(model), TorchRunner(model, **LIMITS)
    state = state_of(temperature=0.8, seed=3, **params)
    assert ours.can_carry(np.arange(3, dtype=np.int32), state)
    mine = generated(ours, PROMPTS, state)
    state.position[:] = 0
    assert mine == generated(theirs, PROMPTS, state)


def decoded_beside(runner, state, is_ahead: bool) -> list[list[int]]:
    """Rows 0 and 1 compute prompts, and decode twice, the second time beside LONG; in order of rows, what each made."""
    prompts = list(enumerate(PROMPTS[:2]))
    lengths = {row: len(prompt) for row, prompt in prompts} | {2: 0}
    first = runner.run(batch_of(prompts, dict.fromkeys(lengths, 0)), state).token_ids[:, 0]
    state.position[:2] += 1
    runner.launch(batch_of([(row, [first[row]]) for row in range(2)], lengths), state)
    after = {0: lengths[0] + 1, 1: lengths[1] + 1, 2: 0}
    if is_ahead:
        mixed = batch_of([(0, [0]), (1, [0]), (2, LONG)], after)
        runner.launch(mixed, state, np.array([0, 1, -1], np.int32))
        second = runner.collect().token_ids[:, 0]
    else:
        second = runner.collect().token_ids[:, 0]
        state.position[:2] += 1
        mixed = batch_of([(0, [second[0]]), (1, [second[1]]), (2, LONG)], after)
        runner.launch(mixed, state)
    third = runner.collect().token_ids[:, 0]
    return [[*map(int, row)] for row in (first, second, third)]


def test_rows_that_decode_beside_a_prompt_may_be_ahead_of_the_host(model):
    """Drawn, so that a draw at a wrong position shows: the prompt's is at its first, the others' are one further."""
    made = [
        decoded_beside(runner, state_of(temperature=1.2, seed=5), is_ahead)
        for runner, is_ahead in (
            (cuda_runner(model), True),
            (cuda_runner(model), False),
            (TorchRunnerAhead(model, **LIMITS), False),
        )
    ]
    assert made[0] == made[1] == made[2]
    assert len(made[0][2]) == 3


class TorchRunnerAhead(TorchRunner):
    """Launched and collected as the CUDA runner is."""

    def launch(self, batch, state):
        self.output = self.run(batch, state)

    def collect(self):
        return self.output


def test_rows_that_decode_attend_alike_beside_a_prompt_and_without_one(model):
    """By the operation whose work is cut along the context; the prompt's by the other, and nobody is computed by both."""
    calls = []

    def decode(q, *args):
        calls.append(("decode", len(q)))
        REFERENCE.decode_attention(q, *args)

    def prefill(*args, first=0):
        calls.append(("prefill", first))
        REFERENCE.prefill_attention(*args, first=first)

    ops = dataclasses.replace(REFERENCE, decode_attention=decode, prefill_attention=prefill)
    runner = cuda_runner(model, ops=ops)
    num_layers = runner._model.config.num_layers
    calls.clear()
    decoded_beside(runner, state_of(), is_ahead=False)
    assert calls[-2 * num_layers :] == [("decode", 2), ("prefill", 2)] * num_layers
    assert calls[:num_layers] == [("prefill", 0)] * num_layers


def test_a_row_that_follows_a_grammar_gets_what_it_may_and_is_not_carried(model):
    runner, state = cuda_runner(model), state_of()
    batch = batch_of(list(enumerate(PROMPTS)), dict.fromkeys(range(3), 0))
    free = runner.run(batch, state).token_ids[:, 0].tolist()
    only = (free[1] + 5) % VOCAB
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    mask[only // 32] = np.array(1 << (only % 32), np.uint32).view(np.int32)
    coming: Future[dict[int, np.ndarray]] = Future()
    coming.set_result({1: mask})
    state.expect_masks(coming)
    runner.launch(batch, state)
    assert not runner.can_carry(np.array([0, 2], np.int32), state)
    assert runner.collect().token_ids[:, 0].tolist() == [free[0], only, free[2]]


def test_what_lies_in_a_block_behind_the_length_changes_nothing(model, expected):
    runner = cuda_runner(model)
    with torch.inference_mode():
        runner._model.keys[:, 1:].fill_(float("nan"))
        runner._model.values[:, 1:].fill_(float("nan"))
    assert generated(runner, PROMPTS, state_of()) == expected[len(PROMPTS)]


def test_steps_launched_ahead_by_the_scheduler_give_the_tokens_of_the_torch_runner(model):
    """Chunks behind chunks, more requests than rows, equal prompts, greedy and drawn; one is sampled on the host, and holds back the others."""
    requests = [
        (prompt, SamplingParams(max_tokens=4 + 9 * turn, temperature=0.9 * turn, min_p=0.3, seed=7))
        for turn in range(2)
        for prompt in (*PROMPTS, PROMPTS[2])
    ]
    limits = {"temperature": 0.9, "top_k": 30, "top_p": 0.8}
    requests.append((LONG, SamplingParams(max_tokens=9, seed=2, **limits)))
    edited = {"temperature": 0.9, "logit_bias": ((3, 5.0),)}
    requests.append((PROMPTS[0], SamplingParams(max_tokens=5, seed=1, **edited)))
    ours, theirs = cuda_runner(model), TorchRunner(model, **LIMITS)
    assert isinstance(ours, OverlappingRunner) and not isinstance(theirs, OverlappingRunner)
    (mine, num_ahead), (other, num_none) = (scheduled(r, requests) for r in (ours, theirs))
    assert mine == other and num_ahead > 10 and num_none == 0
    assert all(mine.values())


def test_prompt_scores_are_those_of_the_torch_runner(model):
    part = PromptPart(2, 4, 1, np.array(PROMPTS[2][1:], np.int32), 3)
    batch = batch_of(list(enumerate(PROMPTS)), dict.fromkeys(range(3), 0))
    batch = dataclasses.replace(batch, prompt_parts=(part,))
    runners = cuda_runner(model), TorchRunner(model, **LIMITS)
    (mine,), (other,) = (runner.run(batch, state_of()).prompt_scores for runner in runners)
    assert mine.part is part and mine.top_ids.tolist() == other.top_ids.tolist()
    np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
    np.testing.assert_allclose(mine.top_logprobs, other.top_logprobs, atol=1e-4)


class CountingCapture:
    """Records calls, and notes on each replay where the buffers are."""

    def __init__(self, addresses) -> None:
        self.addresses, self.seen, self.num_recorded = addresses, [], 0

    def record(self, work):
        self.num_recorded += 1
        work()

        def replay() -> None:
            self.seen.append(self.addresses())
            work()

        return replay


def test_decode_steps_are_replayed_over_buffers_that_never_move(model, expected, monkeypatch):
    made: list[StepBuffers] = []
    init = StepBuffers.__init__
    monkeypatch.setattr(
        StepBuffers,
        "__init__",
        lambda self, *args, **kwargs: (made.append(self), init(self, *args, **kwargs))[1],
    )

    def addresses():
        (buffers,) = made
        inputs = buffers.inputs(4, 4)
        fields = [getattr(inputs, name).data_ptr() for name in inputs.__dataclass_fields__]
        return (*fields, buffers.results.data_ptr())

    capture = CountingCapture(addresses)
    runner = cuda_runner(model, capture=capture)
    at_start = addresses()
    assert capture.num_recorded == 5  # 1, 2, 4, 8, 12
    assert generated(runner, PROMPTS, state_of()) == expected[len(PROMPTS)]
    assert capture.seen == [at_start] * 5, (
        "five decode steps behind the prompts, all of them replayed"
    )


def test_no_cuda_device_is_one_line(model):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ModelLoadError, match=r"^--runner cuda: .* sees no CUDA device"):
        CudaRunner(model, **LIMITS)


def a_gpu(monkeypatch, capability, current=2) -> list[torch.device]:
    """There is one of this capability; the devices that were made current."""
    chosen: list[torch.device] = []
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: current,
        "get_device_capability": lambda device: capability,
        "set_device": chosen.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return chosen


@pytest.mark.parametrize(("name", "index"), [("cuda", 2), ("cuda:1", 1)])
def test_the_device_becomes_the_current_one(monkeypatch, name, index):
    chosen = a_gpu(monkeypatch, (9, 0))
    assert checked_device(name) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


def test_a_device_that_the_kernels_do_not_fit_is_one_line(monkeypatch):
    a_gpu(monkeypatch, (7, 5))
    line = r"^--runner cuda: cuda:2 has compute capability 7\.5, the kernels need 8\.0 or more"
    with pytest.raises(ModelLoadError, match=line):
        checked_device("cuda")


def test_no_triton_is_one_line(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr("shmserve.worker.cuda.runner.triton_ops", missing)
    with pytest.raises(ModelLoadError, match=r"^--runner cuda: its kernels need triton: No module"):
        kernels()


def test_no_python_headers_are_one_line_that_names_them(monkeypatch, tmp_path):
    """Triton compiles what launches its kernels, and its own error is the compiler's command."""
    pytest.importorskip("triton")
    from triton.runtime import driver

    class NoDriver:
        def get_current_target(self):
            raise subprocess.CalledProcessError(1, ["gcc", "driver.c"])

    monkeypatch.setattr(driver, "_active", NoDriver())
    with pytest.raises(ModelLoadError, match=r"launches its kernels: Command .* exit status 1"):
        kernels()
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"there is no /.*Python\.h \(install python3-dev"):
        kernels()


INTERPRETED = """
import os, sys, torch
sys.path[:0] = sys.argv[1], os.path.dirname(sys.argv[1])
from types import SimpleNamespace
from pathlib import Path
import test_runner as t
from shmserve.worker.cuda.ops import triton_ops
runner = t.cuda_runner(
    SimpleNamespace(weights=Path(sys.argv[2]), format="safetensors"), ops=triton_ops(), **t.FEW
)
print(t.generated(runner, t.PROMPTS, t.state_of(), 3))
"""
FEW = {"max_num_seqs": 4}


@pytest.mark.slow
@pytest.mark.triton
def test_interpreted_kernels_give_the_tokens_of_the_torch_runner(model, expected):
    """In a process of its own: triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(Path(__file__).parent), str(model.weights)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    tokens = [row[:3] for row in expected[len(PROMPTS)]]
    assert json.loads(ran.stdout.splitlines()[-1]) == tokens
