"""The torch runner: facts of the real model, and that batching, chunking and block choice change nothing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import batches
import jinja2
import numpy as np
import pytest
from checkpoints import prepared, write_toy

from shmserve.request import SamplingParams
from shmserve.worker.batch import Batch
from shmserve.worker.models.config import ModelLoadError
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.torch_runner import TorchRunner

BLOCK = 16
PARIS = [504, 3575, 282, 4649, 314]
NUM_ROWS = 16
NUM_TOP = 20


@dataclass
class Part:
    """A sequence in a batch: it computes `tokens` from position `start`, in `blocks`, under row slot `row`."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    start: int = 0
    row: int = 0
    samples: bool = True


def batch_of(*parts: Part, block_size: int = BLOCK) -> Batch:
    return batches.batch_of(
        *((part.tokens, part.start, part.blocks) for part in parts),
        rows=[part.row for part in parts],
        samples=[part.samples for part in parts],
        block_size=block_size,
    )


def greedy_state(num_top: int = NUM_TOP) -> SamplingState:
    state = SamplingState(NUM_ROWS)
    for row in range(NUM_ROWS):
        asked = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=num_top)
        state.set(row, asked, (), 0)
    return state


@pytest.fixture(scope="module")
def runner(default_model):
    """The real model with a cache of about 80 blocks."""
    runner = TorchRunner(
        default_model,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=512,
        max_model_len=None,
        kv_cache_bytes=60 << 20,
        num_threads=2,
        progress=lambda what, share: None,
    )
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def text_ids(default_model):
    text = (
        "The kettle had been on the stove for 12 minutes when the letter came. Anna read it twice, put it "
        "down beside the bread and looked out at the harbour, where the first of the boats was coming in. "
        "It said that the house would be sold in spring, and that nobody was to blame."
    )
    return default_model.tokenizer().encode(text, add_special_tokens=False).ids


def assert_same(one, other, index: int = 0, other_index: int = 0) -> None:
    """Same token; the most likely tokens have the same log-probabilities up to rounding."""
    assert one.token_ids[index, 0] == other.token_ids[other_index, 0]
    left = dict(zip(*(part[0].tolist() for part in one.top[index]), strict=True))
    right = dict(zip(*(part[0].tolist() for part in other.top[other_index]), strict=True))
    shared = left.keys() & right.keys()
    assert len(shared) >= NUM_TOP - 1  # the last of them may change places with the next
    for token in shared:
        assert left[token] == pytest.approx(right[token], abs=2e-3)


def next_token(runner, ids) -> tuple[int, float]:
    num_blocks = -(-len(ids) // BLOCK)
    output = runner.run(batch_of(Part(ids, range(1, 1 + num_blocks))), greedy_state())
    return int(output.token_ids[0, 0]), float(output.logprobs[0, 0])


# --- facts of the real model


def test_next_token_of_the_capital_of_france(runner):
    token, logprob = next_token(runner, PARIS)
    assert token == 7042 and logprob == pytest.approx(-0.258, abs=0.02)


def test_next_token_of_counting(runner, default_model):
    ids = default_model.tokenizer().encode("1, 2, 3, 4, 5, 6,", add_special_tokens=False).ids
    token, logprob = next_token(runner, ids)
    assert token == 216 and logprob == pytest.approx(-0.053, abs=0.02)


def test_next_token_of_a_chat(runner, default_model):
    template = jinja2.Environment().from_string(default_model.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    ids = default_model.tokenizer().encode(text, add_special_tokens=False).ids
    assert len(ids) == 31
    token, logprob = next_token(runner, ids)
    assert token == 19556 and logprob == pytest.approx(-0.531, abs=0.02)


def test_info_says_what_the_memory_holds(runner):
    info = runner.info
    block_bytes = 2 * 30 * 3 * 64 * 4 * BLOCK
    assert info.num_blocks == (60 << 20) // block_bytes == 85
    assert info.vocab_size == 49152
    assert info.max_model_len == 84 * BLOCK
    assert (info.block_size, info.max_tokens_per_step) == (BLOCK, 1)


def test_a_tied_embedding_is_in_memory_once(runner):
    weights = runner._decoder._weights
    assert weights.head.data_ptr() == weights.embedding.data_ptr()


# --- batching, chunking and blocks change nothing


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 2, 3, 5, 7, 11, 13],
        *(pytest.param(s, marks=pytest.mark.slow) for s in ([17], [16], [31, 1, 1])),
    ],
)
def test_chunked_prefill_equals_prefill_at_once(runner, text_ids, sizes):
    blocks = range(1, 1 + -(-len(text_ids) // BLOCK))
    whole = runner.run(batch_of(Part(text_ids, blocks)), greedy_state())
    other = [80 - index for index in range(len(blocks))]
    start, turn = 0, 0
    while start < len(text_ids):
        chunk = text_ids[start : start + sizes[turn % len(sizes)]]
        is_last = start + len(chunk) == len(text_ids)
        part = Part(chunk, other, start, samples=is_last)
        output = runner.run(batch_of(part), greedy_state())
        assert output.token_ids.shape == (int(is_last), 1)
        start, turn = start + len(chunk), turn + 1
    assert_same(output, whole)


def test_scattered_blocks_equal_contiguous_blocks(runner, text_ids):
    num_blocks = -(-len(text_ids) // BLOCK)
    near = runner.run(batch_of(Part(text_ids, range(1, 1 + num_blocks))), greedy_state())
    scattered = np.random.default_rng(1).permutation(np.arange(1, 85))[:num_blocks]
    far = runner.run(batch_of(Part(text_ids, scattered)), greedy_state())
    assert_same(far, near)


def test_a_ragged_batch_equals_its_sequences_alone(runner, text_ids):
    """Prefill, a later chunk of a prefill, and decode rows of very different lengths in one step."""
    cuts = [(0, 37), (0, 1), (20, 33), (50, 51), (5, 6), (0, 9), (15, 16), (16, 17)]
    blocks = np.arange(1, 85).reshape(-1, 4)[: len(cuts)]
    state = greedy_state()
    alone = []
    for (start, end), own in zip(cuts, blocks, strict=True):
        if start:
            runner.run(batch_of(Part(text_ids[:start], own)), state)
        alone.append(runner.run(batch_of(Part(text_ids[start:end], own, start)), state))
    for (start, _), own in zip(cuts, blocks, strict=True):
        if start:
            runner.run(batch_of(Part(text_ids[:start], own)), state)
    parts = [
        Part(text_ids[start:end], own, start, row)
        for row, ((start, end), own) in enumerate(zip(cuts, blocks, strict=True))
    ]
    together = runner.run(batch_of(*parts), state)
    for index, one in enumerate(alone):
        assert_same(together, one, index)


def test_decode_equals_prefill_of_the_same_tokens(runner):
    ids, state = list(PARIS), greedy_state()
    output = runner.run(batch_of(Part(ids, [3, 4])), state)
    for _ in range(20):
        ids.append(int(output.token_ids[0, 0]))
        output = runner.run(batch_of(Part(ids[-1:], [3, 4], len(ids) - 1)), state)
    again = runner.run(batch_of(Part(ids, [7, 6])), state)
    assert_same(output, again)


def test_only_the_named_sequences_sample(runner, text_ids):
    state = greedy_state()
    parts = [
        Part(text_ids[:9], [1], row=0, samples=False),
        Part(PARIS, [2], row=1),
        Part(text_ids[:5], [3], row=2, samples=False),
        Part(text_ids[:12], [4], row=3),
    ]
    output = runner.run(batch_of(*parts), state)
    assert output.token_ids.shape == (2, 1) and output.token_ids.dtype == np.int32
    assert output.token_ids[0, 0] == 7042
    assert_same(output, runner.run(batch_of(Part(text_ids[:12], [5])), state), 1)


def test_sampling_parameters_belong_to_the_row_slot(runner):
    """Rows sit in other slots than in the batch; a seeded draw repeats, another position draws anew."""
    state = SamplingState(NUM_ROWS)
    state.set(11, SamplingParams(max_tokens=9, temperature=0.0), (), 0)
    state.set(4, SamplingParams(max_tokens=9, temperature=1.5, seed=77), (), 0)
    parts = [Part(PARIS, [1], row=4), Part(PARIS, [2], row=11), Part(PARIS, [3], row=4)]
    output = runner.run(batch_of(*parts), state)
    assert output.logprobs is None and output.top is None
    assert output.token_ids[1, 0] == 7042
    assert output.token_ids[0, 0] == output.token_ids[2, 0]
    alone = runner.run(batch_of(Part(PARIS, [30], row=4)), state)
    assert alone.token_ids[0, 0] == output.token_ids[0, 0]
    drawn = set()
    for position in range(12):
        state.position[4] = position
        drawn.add(int(runner.run(batch_of(Part(PARIS, [30], row=4)), state).token_ids[0, 0]))
    assert len(drawn) > 1


def test_time_ns_is_taken_when_the_step_is_done(runner):
    before = time.monotonic_ns()
    output = runner.run(batch_of(Part(PARIS, [1])), greedy_state())
    assert before < output.time_ns <= time.monotonic_ns()


# --- failures


def toy_runner(folder: Path, **kwargs) -> TorchRunner:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": None}
    limits |= {"kv_cache_bytes": 8 * TOY_BLOCK_BYTES, "block_size": 8, "num_threads": 1}
    return TorchRunner(prepared(folder), **{**limits, **kwargs}, progress=lambda what, share: None)


TOY_BLOCK_BYTES = 2 * 2 * 8 * 4 * 8


def test_a_sequence_that_breaks_harms_neither_its_batch_nor_the_next_owner_of_its_blocks(tmp_path):
    state = greedy_state(5)
    healthy = [1, 2, 3, 4, 5]
    clean = toy_runner(write_toy(tmp_path / "clean"))
    expected = clean.run(batch_of(Part(healthy, [1]), block_size=8), state)

    runner = toy_runner(write_toy(tmp_path / "poisoned", poison_token=7))
    broken = Part([7] * 16, [2, 3], row=0)
    beside = Part(healthy, [1], row=1)
    output = runner.run(batch_of(broken, beside, block_size=8), state)
    assert output.failed == (0,)
    assert output.token_ids[1] == expected.token_ids[0]
    assert output.logprobs[1] == pytest.approx(expected.logprobs[0], abs=1e-4)
    # Blocks 2 and 3 hold NaN in every position; their next owners fill them only in part.
    output = runner.run(batch_of(Part(healthy, [3]), block_size=8), state)
    assert output.failed == ()
    np.testing.assert_allclose(output.top[0][1], expected.top[0][1], atol=1e-4)
    runner.run(batch_of(Part(healthy[:1], [2]), block_size=8), state)
    for at in range(1, 5):
        output = runner.run(batch_of(Part(healthy[at : at + 1], [2], at), block_size=8), state)
    assert output.failed == ()
    np.testing.assert_allclose(output.top[0][1], expected.top[0][1], atol=1e-4)


def test_block_0_is_never_written(tmp_path):
    runner = toy_runner(write_toy(tmp_path))
    runner.run(
        batch_of(Part([1, 2, 3], [1], row=0), Part(range(1, 20), [4, 2, 3], row=1), block_size=8),
        greedy_state(),
    )
    assert not runner._cache.keys[:, 0].any() and not runner._cache.values[:, 0].any()
    assert runner._cache.keys[:, 1:5].any()


def test_without_a_limit_the_context_is_what_model_and_memory_allow(tmp_path):
    folder = write_toy(tmp_path)
    assert toy_runner(folder).info.max_model_len == 7 * 8
    assert toy_runner(folder, kv_cache_bytes=100 * TOY_BLOCK_BYTES).info.max_model_len == 64
    assert toy_runner(folder, max_model_len=50).info.max_model_len == 50


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_model_len": 65}, "max_model_len 65 is beyond the model's context of 64 tokens"),
        (
            {"max_model_len": 57},
            f"holds 56 tokens, but one sequence of 57 needs {9 * TOY_BLOCK_BYTES}",
        ),
        (
            {"kv_cache_bytes": 0},
            f"holds 0 tokens, but one sequence of 8 needs {2 * TOY_BLOCK_BYTES}",
        ),
        ({"kv_cache_bytes": TOY_BLOCK_BYTES}, "holds 0 tokens"),
    ],
)
def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers(tmp_path, limits, words):
    with pytest.raises(ModelLoadError) as caught:
        toy_runner(write_toy(tmp_path), **limits)
    assert words in str(caught.value)


def test_a_step_without_samples_gives_no_tokens(tmp_path):
    runner = toy_runner(write_toy(tmp_path))
    output = runner.run(batch_of(Part([1, 2], [1], samples=False), block_size=8), greedy_state())
    assert output.token_ids.shape == (0, 1) and output.logprobs is None
