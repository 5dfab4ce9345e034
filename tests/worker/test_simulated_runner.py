"""A GPU that is not there: its clock, its tokens, its scripts."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.request import SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker import simulated_runner
from shmserve.worker.batch import Batch
from shmserve.worker.sampling_state import SamplingState
from shmserve.worker.simulated_draws import mix
from shmserve.worker.simulated_runner import (
    ScriptError,
    SimulatedRunner,
    load_script,
    plain_ids,
)

EOS = 1
BYTES = TokenBytes.from_list(
    [b"<unk>", b"<eos>", b"a", b" b", b"\xc3", b"\xc3\xa9", b"", b"\n", b"\xef\xbf\xbd", b"z"]
)
PLAIN = [2, 3, 5, 9]


def runner_of(*, step_ms=4.48, wait_until=lambda due_ns: None, script=None) -> SimulatedRunner:
    return SimulatedRunner(
        BYTES, (0, EOS), EOS, step_ms=step_ms, max_model_len=64, num_blocks=8, script=script,
        wait_until=wait_until,
    )  # fmt: skip


def batch_of(rows: list[int], sampled: list[int] | None = None) -> Batch:
    n = len(rows)
    zeros = np.zeros(n, np.int32)
    return Batch(
        step=1, rows=np.array(rows, np.int32), token_ids=zeros, positions=zeros, kv_slots=zeros,
        cu_seqlens=np.arange(n + 1, dtype=np.int32), block_table=np.zeros((n, 1), np.int32), kv_lens=zeros + 1,
        sample_seqs=np.array(range(n) if sampled is None else sampled, np.int32), is_decode=True,
    )  # fmt: skip


def state_of(*seeds_and_positions: tuple[int, int]) -> SamplingState:
    state = SamplingState(len(seeds_and_positions))
    for row, (seed, position) in enumerate(seeds_and_positions):
        state.set(row, SamplingParams(max_tokens=9, seed=seed), (), position)
    return state


# -- the clock -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only as far as it is told. `due` is what the runner waited for."""

    class Clock:
        now_ns = 1_000_000
        due: list[int] = []  # noqa: RUF012  # one clock a test
        late_ns = 0

        def wait_until(self, due_ns: int) -> None:
            self.due.append(due_ns)
            self.now_ns = due_ns + self.late_ns

    made = Clock()
    made.due = []
    monkeypatch.setattr(simulated_runner.time, "monotonic_ns", lambda: made.now_ns)
    return made


def test_steps_end_at_multiples_of_the_period(clock):
    runner = runner_of(step_ms=4.48, wait_until=clock.wait_until)
    outputs = [runner.run(batch_of([0]), state_of((1, 0))) for _ in range(4)]
    assert clock.due == [4_480_000, 8_960_000, 13_440_000, 17_920_000]
    assert [output.time_ns for output in outputs] == clock.due


def test_a_late_step_does_not_delay_the_next(clock):
    runner = runner_of(step_ms=4.48, wait_until=clock.wait_until)
    clock.late_ns = 700_000  # each wakes late
    for _ in range(3):
        assert runner.run(batch_of([0]), state_of((1, 0))).time_ns == clock.now_ns
    assert clock.due == [4_480_000, 8_960_000, 13_440_000]
    clock.now_ns += (
        10_000_000  # a long step of the host: two grid points are missed, and the grid stays
    )
    runner.run(batch_of([0]), state_of((1, 0)))
    assert clock.due[-1] % 4_480_000 == 0
    assert 0 < clock.due[-1] - (13_440_000 + 700_000 + 10_000_000) <= 4_480_000


def test_a_step_that_ends_on_the_grid_waits_for_the_next_point(clock):
    clock.now_ns = 4_480_000
    runner_of(step_ms=4.48, wait_until=clock.wait_until).run(batch_of([0]), state_of((1, 0)))
    assert clock.due == [8_960_000]


def test_the_real_clock_never_wakes_early():
    runner = SimulatedRunner(
        BYTES, (0, EOS), EOS, step_ms=3, max_model_len=64, num_blocks=8, block_size=16
    )
    for _ in range(5):
        begin = time.monotonic_ns()
        time_ns = runner.run(batch_of([0]), state_of((1, 0))).time_ns
        assert time_ns >= (begin // 3_000_000 + 1) * 3_000_000


# -- tokens ----------------------------------------------------------------------------------------------------------------


def test_plain_ids_are_whole_printable_characters_and_not_special():
    assert plain_ids(BYTES, (0, EOS)).tolist() == PLAIN


def test_tokens_are_plain_and_all_of_them_come():
    state = state_of(*((seed, 0) for seed in range(200)))
    output = runner_of().run(batch_of(list(range(200))), state)
    assert output.token_ids.shape == (200, 1)
    assert output.token_ids.dtype == np.int32
    assert set(output.token_ids[:, 0].tolist()) == set(PLAIN)
    assert output.counts is None and output.failed == ()


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 10**6)), min_size=1, max_size=20),
    st.randoms(),
)
def test_a_token_depends_on_seed_and_position_alone(keys, random):
    alone = [int(runner_of().run(batch_of([0]), state_of(key)).token_ids[0, 0]) for key in keys]
    rows = list(range(len(keys)))
    random.shuffle(rows)
    together = runner_of().run(batch_of(rows), state_of(*keys)).token_ids[:, 0].tolist()
    assert together == [alone[row] for row in rows]


def test_positions_of_a_seed_and_seeds_of_a_position_differ():
    seeds = np.arange(1000, dtype=np.uint64)
    positions = np.arange(1000, dtype=np.int32)
    assert len(set(mix(seeds, np.zeros(1000, np.int32)).tolist())) == 1000
    assert len(set(mix(np.full(1000, 2**64 - 1, np.uint64), positions).tolist())) == 1000


def test_only_sampled_sequences_get_a_token():
    state = state_of(*((seed, 0) for seed in range(3)))
    all_three = runner_of().run(batch_of([0, 1, 2]), state).token_ids
    some = runner_of().run(batch_of([0, 1, 2], sampled=[2]), state).token_ids
    assert some.tolist() == all_three[2:].tolist()
    assert runner_of().run(batch_of([0, 1, 2], sampled=[]), state).token_ids.shape == (0, 1)


def test_a_bias_of_a_hundred_forces_a_token_and_less_does_not():
    state = state_of((7, 0), (7, 0), (7, 0))
    plain = int(runner_of().run(batch_of([0]), state).token_ids[0, 0])
    state.bias[1] = (np.array([4, 0], np.int32), np.array([5.0, 100.0], np.float32))
    state.bias[2] = (np.array([0], np.int32), np.array([99.0], np.float32))
    tokens = runner_of().run(batch_of([0, 1, 2]), state).token_ids[:, 0].tolist()
    assert tokens == [plain, 0, plain]


# -- scripts ---------------------------------------------------------------------------------------------------------------


def test_a_script_gives_its_steps_and_then_eos():
    runner = runner_of(script={5: [[2, 3], [9]], 6: []})
    assert runner.info.max_tokens_per_step == 2
    state = state_of((5, 0), (6, 0), (7, 0))
    output = runner.run(batch_of([0, 1, 2]), state)
    assert output.counts.tolist() == [2, 1, 1]
    assert output.token_ids[0].tolist() == [2, 3]
    assert output.token_ids[1, 0] == EOS
    assert output.token_ids[2, 0] == runner_of().run(batch_of([2]), state).token_ids[0, 0]
    followed = [
        runner.run(batch_of([0]), state_of((5, at))).token_ids[0].tolist() for at in (2, 3, 4)
    ]
    assert [step[0] for step in followed] == [9, EOS, EOS]


def test_a_script_is_taken_up_in_the_middle_of_a_step():
    """A sequence may have kept only some of a step's tokens, or was preempted: its position says where it stands."""
    runner = runner_of(script={5: [[2], [3, 5, 9]]})
    output = runner.run(batch_of([0]), state_of((5, 2)))
    assert output.counts.tolist() == [2]
    assert output.token_ids[0, :2].tolist() == [5, 9]


def test_a_script_file_is_read(tmp_path):
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"5": [[2, 3], [9]], "18446744073709551615": [[1]]}))
    assert load_script(str(path), 10) == {5: [[2, 3], [9]], 2**64 - 1: [[1]]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"a": [[1]]}',
        b'{"1": 5}',
        b'{"1": [5]}',
        b'{"1": ["23"]}',
        b'{"1": [["2"]]}',
        b'{"1": [[1.5]]}',
        b'{"1": [[true]]}',
        b'{"1": [[]]}',
        b'{"1": [[10]]}',
        b'{"1": [[-1]]}',
        b'{"1": [[1e999]]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_bad_script_is_one_line_that_names_the_file(tmp_path, content):
    path = tmp_path / "script.json"
    path.write_bytes(content)
    with pytest.raises(ScriptError) as caught:
        load_script(str(path), 10)
    assert str(caught.value).startswith(f"--script {path}: ")
    assert "\n" not in str(caught.value)


def test_a_script_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ScriptError, match="No such file"):
        load_script(str(tmp_path / "none.json"), 10)


def test_default_model_gives_plain_text(default_model):
    table, special = default_model.token_bytes(), default_model.special_token_ids
    ids = plain_ids(table, special)
    assert len(ids) > 40_000
    assert not set(ids.tolist()) & set(special)
    b"".join(
        table[i] for i in ids.tolist()
    ).decode()  # whole characters, whatever stands beside them
