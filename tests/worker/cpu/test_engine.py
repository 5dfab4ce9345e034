"""Whole steps of toy models: right against numpy, and the same bits whatever the batch, the chunks, the blocks, the threads."""

import dataclasses
import itertools

import numpy as np
import pytest
from batches import batch_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmserve.worker.cpu.build import KernelsError
from shmserve.worker.cpu.library import Engine
from shmserve.worker.cpu.pack import Arena, pack_floats
from shmserve.worker.cpu.selftest import reference_logits, toy_model

VOCAB = 61
SHAPES = {
    "odd": {},
    "one head each": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64},
    "seven share": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "hidden": 128},
    "wide heads": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    "heads of 80": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 80},
    "heads of 96": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 96},
    "tiny": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "hidden": 24},
}


def engine_of(library, model, **kwargs) -> Engine:
    limits = {"num_blocks": 64, "block_size": 16, "max_tokens": 600, "max_samples": 16}
    return Engine(library, model, **{**limits, "num_threads": 2, **kwargs})


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def alone(engine, ids, block_size: int = 16) -> np.ndarray:
    """Logits of the last position, computed in one step in blocks 1, 2, ..."""
    blocks = range(1, 2 + len(ids) // block_size)
    return engine.run(batch_of((ids, 0, blocks), block_size=block_size))[0][0].copy()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_numpy(native, shape):
    model = toy_model(1, **shape)
    ids = tokens(300)
    expected = reference_logits(model, ids)
    engine = engine_of(native, model)
    for length in (1, 2, 17, 40, 256, 257, 300):
        got, want = alone(engine, ids[:length]), expected[length - 1]
        # Now and then an activation rounds to the neighbouring integer: a hundredth of the logits' size.
        assert np.abs(got - want).max() < 0.03 * np.abs(want).max()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_variant_gives_the_same_bits(native, other, shape):
    model, ids = toy_model(2, **shape), tokens(270)
    results = []
    for library in (native, other):
        engine = engine_of(library, model)
        results.append([alone(engine, ids[:length]) for length in (1, 33, 270)])
        engine.close()
    np.testing.assert_array_equal(results[0], results[1])


def test_plain_layers_without_biases_norms_and_windows(native):
    model = toy_model(3)
    names = ("q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "window")
    layers = [dataclasses.replace(layer, **dict.fromkeys(names)) for layer in model.layers]
    model = dataclasses.replace(model, layers=tuple(layers))
    ids = tokens(70)
    engine = engine_of(native, model)
    want = reference_logits(model, ids)[-1]
    assert np.abs(alone(engine, ids) - want).max() < 0.03 * np.abs(want).max()
    engine.close()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_change_nothing(native, num_threads):
    model, ids = toy_model(4), tokens(150)
    one, many = (
        engine_of(native, model, num_threads=1),
        engine_of(native, model, num_threads=num_threads),
    )
    expected = alone(one, ids)
    for _ in range(20):
        np.testing.assert_array_equal(alone(many, ids), expected)
    one.close()
    many.close()


@pytest.mark.parametrize("block_size", [32, 64])
def test_the_block_size_changes_nothing(native, block_size):
    model, ids = toy_model(5), tokens(290)
    small, large = engine_of(native, model), engine_of(native, model, block_size=block_size)
    np.testing.assert_array_equal(alone(large, ids, block_size), alone(small, ids))
    small.close()
    large.close()


@pytest.mark.parametrize("window", [19, 64, 70, 100, None])
def test_a_window_gives_the_same_bits_however_the_prompt_is_cut(native, window):
    """Rows that go together widen strips of the cache, few rows do not; a window begins and ends anywhere in a strip."""
    model, ids, blocks = toy_model(13), tokens(330), range(1, 23)
    layers = (dataclasses.replace(layer, window=window) for layer in model.layers)
    engine = engine_of(native, dataclasses.replace(model, layers=tuple(layers)))
    engine._cache[:] = 0x7E00  # NaN: whatever is read beyond the view shows
    results = []
    for cuts in ([0, 330], [0, 1, 64, 65, 130, 200, 330], [0, 300, *range(301, 331)]):
        for start, end in itertools.pairwise(cuts):
            logits, _ = engine.run(batch_of((ids[start:end], start, blocks)))
        results.append(logits[0].copy())
    engine.close()
    assert np.isfinite(results[0]).all()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


class Invariance:
    """One engine and the expected logits of some sequences, each computed alone in one step."""

    LENGTHS = (1, 15, 16, 17, 33, 64, 100, 258, 300)

    def __init__(self, library) -> None:
        self.engine = engine_of(library, toy_model(6), num_blocks=100, max_tokens=1024)
        self.sequences = [tokens(length, seed=length) for length in self.LENGTHS]
        self.expected = [alone(self.engine, ids) for ids in self.sequences]


@pytest.fixture(scope="module")
def invariance(native):
    case = Invariance(native)
    yield case
    case.engine.close()


@settings(
    max_examples=settings.default.max_examples * 2 // 5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_batch_chunks_and_blocks_change_no_bit(invariance, data):
    chosen = data.draw(st.lists(st.sampled_from(range(9)), min_size=1, max_size=6, unique=True))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    free = rng.permutation(np.arange(1, 100))
    blocks, done = {}, dict.fromkeys(chosen, 0)
    for index in chosen:
        count = 1 + invariance.LENGTHS[index] // 16
        blocks[index], free = free[:count], free[count:]
    while left := [i for i in chosen if done[i] < invariance.LENGTHS[i]]:
        some = [index for index in left if rng.random() < 0.7] or left[:1]
        parts = []
        for index in some:
            most = invariance.LENGTHS[index] - done[index]
            count = int(rng.choice([1, min(most, 7), min(most, 40), most]))
            parts.append(
                (invariance.sequences[index][done[index] :][:count], done[index], blocks[index])
            )
            done[index] += count
        logits, greedy = invariance.engine.run(batch_of(*parts))
        for place, index in enumerate(some):
            if done[index] == invariance.LENGTHS[index]:
                np.testing.assert_array_equal(logits[place], invariance.expected[index])
                assert greedy[place] == invariance.expected[index].argmax()


def test_a_row_alone_equals_the_row_among_32(native):
    model = toy_model(7)
    engine = engine_of(native, model, num_blocks=100, max_samples=32)
    for seq in range(32):
        engine.run(batch_of((tokens(40, seq), 0, [3 * seq + 1, 3 * seq + 2, 3 * seq + 3])))
    rows = [
        (tokens(1, 100 + seq), 40, [3 * seq + 1, 3 * seq + 2, 3 * seq + 3]) for seq in range(32)
    ]
    together = engine.run(batch_of(*rows))[0].copy()
    for seq in (0, 1, 17, 31):
        np.testing.assert_array_equal(engine.run(batch_of(rows[seq]))[0][0], together[seq])
    engine.close()


def test_what_an_earlier_owner_left_in_a_block_is_never_seen(library):
    """All of the cache is NaN before: a result that touches a position beyond its own is NaN."""
    model, ids = toy_model(8), tokens(45)
    clean = engine_of(library, model)
    expected = alone(clean, ids)
    dirty = engine_of(library, model)
    dirty._cache[:] = 0x7E00
    np.testing.assert_array_equal(alone(dirty, ids), expected)
    for start, end in ((0, 3), (3, 30), (30, 31), (31, 45)):
        logits, _ = dirty.run(batch_of((ids[start:end], start, [9, 4, 7])))
    np.testing.assert_array_equal(logits[0], expected)
    clean.close()
    dirty.close()


def test_a_sequence_that_is_not_finite_leaves_its_neighbours_alone(native):
    model = toy_model(9)
    values = np.random.default_rng(0).normal(size=(VOCAB, model.hidden_size)).astype(np.float32)
    values[7] = np.inf
    embedding = pack_floats(values, Arena())
    engine = engine_of(native, dataclasses.replace(model, embedding=embedding))
    healthy = tokens(20) % 7
    expected = alone(engine, healthy)
    bad = np.array([1, 2, 7, 3], np.int32)
    logits, greedy = engine.run(batch_of((bad, 0, [5]), (healthy, 0, [6, 7])))
    assert greedy[0] == -1 and greedy[1] == expected.argmax()
    np.testing.assert_array_equal(logits[1], expected)
    engine.close()


def test_greedy_takes_the_lowest_id_of_equals(native):
    model = toy_model(10)
    head = np.random.default_rng(1).normal(size=(VOCAB, model.hidden_size)).astype(np.float32)
    head[33:] = head[:28]  # every one of the first 28 has an equal
    engine = engine_of(native, dataclasses.replace(model, head=pack_floats(head, Arena())))
    winners = set()
    for length in range(1, 30):
        logits, greedy = engine.run(batch_of((tokens(length, length), 0, [1, 2])))
        assert greedy[0] == np.flatnonzero(logits[0] == logits[0].max())[0]
        winners.add(int(greedy[0]))
    assert any(winner < 28 for winner in winners)
    engine.close()


def test_a_step_that_samples_nothing_still_fills_the_cache(native):
    model, ids = toy_model(11), tokens(50)
    engine = engine_of(native, model)
    expected = alone(engine, ids)
    first = dataclasses.replace(
        batch_of((ids[:30], 0, [8, 9, 3, 5])), sample_seqs=np.zeros(0, np.int32)
    )
    logits, greedy = engine.run(first)
    assert logits.shape == (0, VOCAB) and greedy.shape == (0,)
    logits, _ = engine.run(batch_of((ids[30:], 30, [8, 9, 3, 5])))
    np.testing.assert_array_equal(logits[0], expected)
    engine.close()


def test_a_step_of_too_many_items_is_refused(native):
    with pytest.raises(KernelsError, match="a step of 600000 tokens and 2 kv heads"):
        engine_of(native, toy_model(0), max_tokens=600_000)


def test_engines_come_and_go_with_their_threads(native):
    model, ids = toy_model(12), tokens(20)
    results = []
    for _ in range(30):
        engine = engine_of(native, model, num_threads=4)
        results.append(alone(engine, ids))
        engine.close()
    assert all(np.array_equal(result, results[0]) for result in results)
