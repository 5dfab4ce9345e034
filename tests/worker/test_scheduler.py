"""What one step computes, who is preempted for whom, and what a sequence keeps meanwhile."""

import numpy as np
import pytest

from shmserve.request import SamplingParams
from shmserve.worker.columns import STOP_COLUMNS
from shmserve.worker.runner import RunnerInfo
from shmserve.worker.scheduler import NeverFitsError, Scheduler
from shmserve.worker.sequence import Sequence

EOS = 99


class Bench:
    """A scheduler whose model answers each sequence's position as its token."""

    def __init__(
        self,
        *,
        num_rows=4,
        num_blocks=33,
        block_size=4,
        budget=16,
        max_model_len=64,
        most_tokens=1,
        eos_ids=(EOS,),
        **options,
    ):
        info = RunnerInfo("fake", 100, max_model_len, num_blocks, block_size, most_tokens)
        self.scheduler = Scheduler(
            info,
            max_num_seqs=num_rows,
            max_num_batched_tokens=budget,
            eos_ids=eos_ids,
            **options,
        )
        self.num_added = 0
        self.now_ns = 0

    def add(self, num_prompt=3, *, prompt=None, cache_salt=b"", **params) -> Sequence:
        self.num_added += 1
        params.setdefault("max_tokens", 50)
        if prompt is None:  # nobody else's
            prompt = 1000 * self.num_added + np.arange(num_prompt)
        sequence = Sequence(
            self.num_added,
            0,
            SamplingParams(**params),
            np.array(prompt, np.int32),
            self.num_added,
            self.now_ns,
            cache_salt=cache_salt,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Compute one step; {sequence: tokens computed}, or None if there was nothing to compute."""
        scheduler, columns = self.scheduler, self.scheduler.columns
        self.now_ns += 1000
        batch, self.started = scheduler.schedule(1, self.now_ns)
        scheduler.check()
        self.batch = batch
        if batch is None:
            return None
        counts = np.diff(batch.cu_seqlens).tolist()
        computed = {
            scheduler.by_row[row]: n for row, n in zip(batch.rows.tolist(), counts, strict=True)
        }
        scheduler.advance(batch, self.now_ns)
        for index in batch.sample_seqs.tolist():
            row = int(batch.rows[index])
            columns.token_ids[row, columns.num_tokens[row]] = columns.num_tokens[row]
            columns.num_tokens[row] += 1
            columns.last_time_ns[row] = self.now_ns
            scheduler.sampling.position[row] += 1
        scheduler.check()
        return computed


def test_a_prompt_is_computed_and_then_a_token_a_step():
    bench = Bench()
    sequence = bench.add(5)
    assert bench.step() == {sequence: 5}
    assert bench.started == [sequence]
    assert not bench.batch.is_decode
    assert bench.batch.sample_seqs.tolist() == [0]
    for _ in range(3):
        assert bench.step() == {sequence: 1}
        assert bench.batch.is_decode
        assert bench.started == []


def test_a_long_prompt_is_chunked_and_decoding_never_waits_for_it():
    bench = Bench(budget=8, num_rows=2)
    first = bench.add(3)
    bench.step()
    long = bench.add(20)
    assert bench.step() == {first: 1, long: 7}
    assert bench.batch.sample_seqs.tolist() == [0]
    assert bench.step() == {first: 1, long: 7}
    assert bench.step() == {first: 1, long: 6}
    assert bench.batch.sample_seqs.tolist() == [0, 1]
    assert bench.step() == {first: 1, long: 1}
    assert bench.batch.is_decode


def test_the_budget_goes_to_prompts_in_order_of_admission():
    bench = Bench(budget=10)
    a, b, c = bench.add(6), bench.add(6), bench.add(6)
    assert bench.step() == {a: 6, b: 4}
    assert bench.step() == {a: 1, b: 2, c: 6}
    assert bench.batch.sample_seqs.tolist() == [0, 1, 2]


def test_every_row_may_decode_whatever_the_budget_is():
    bench = Bench(budget=1, num_rows=3)
    sequences = [bench.add(1) for _ in range(3)]
    bench.step()
    assert bench.step() == dict.fromkeys(sequences, 1)


def test_stamps_are_those_of_the_steps():
    bench = Bench(budget=4, num_rows=1)
    sequence = bench.add(6)
    bench.step()
    assert sequence.stamps() == (0, 1000, 1000, 0, 0)
    bench.step()
    assert sequence.stamps() == (0, 1000, 1000, 2000, 2000)
    bench.step()
    assert sequence.stamps() == (0, 1000, 1000, 2000, 2000)


def test_priority_comes_before_arrival_in_the_waiting_list():
    bench = Bench(num_rows=1)
    late = bench.add(3, priority=1)
    early = bench.add(3)
    urgent = bench.add(3, priority=-1)
    assert bench.scheduler.waiting == [urgent, early, late]
    assert list(bench.step()) == [urgent]


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_the_last_in_order_is_preempted_and_continues_with_the_same_tokens(caches_prefixes):
    bench = Bench(num_blocks=5, block_size=4, caches_prefixes=caches_prefixes)
    first, last = bench.add(4), bench.add(6)
    bench.step()
    bench.step()  # 6 and 8 tokens: all four blocks are taken
    assert bench.scheduler.blocks.num_free == 0
    tokens = bench.scheduler.columns.token_ids[last.row, :8].tolist()
    for _ in range(2):
        assert set(bench.step()) <= {first, last}
    assert last.num_retractions == 1
    assert (last.row, last.blocks) == (-1, [])
    assert last.token_ids[:8].tolist() == tokens
    assert bench.scheduler.num_preempted == 1
    bench.scheduler.remove(first)
    computed = bench.step()
    # Recomputed whole, or from what nobody has needed the room of: 9 tokens, both full blocks are still there.
    assert computed == {last: 1 if caches_prefixes else 9}
    assert last.cached_tokens == 0  # its own do not count
    assert bench.started == [last]
    assert bench.scheduler.columns.token_ids[last.row, :8].tolist() == tokens
    assert bench.scheduler.num_admitted == 2  # an admission is counted once


def test_time_of_the_last_token_survives_a_preemption():
    bench = Bench(num_blocks=5, block_size=4)
    first, last = bench.add(4), bench.add(6)
    while not last.num_retractions:
        before_ns = bench.now_ns
        bench.step()
    bench.scheduler.remove(first)
    batch, _ = bench.scheduler.schedule(1, bench.now_ns + 5000)
    assert batch.rows.tolist() == [last.row]
    assert bench.scheduler.columns.last_time_ns[last.row] == before_ns


def test_a_row_says_nothing_of_whom_it_had_before():
    bench = Bench(num_rows=1)
    old = bench.add(30, stop_token_ids=(7,), logit_bias=((1, 2.0),), min_tokens=9)
    bench.step()
    bench.step()
    bench.scheduler.columns.is_aborted[old.row] = True
    bench.scheduler.remove(old)
    new = bench.add(2, ignore_eos=True)
    bench.step()
    columns, sampling = bench.scheduler.columns, bench.scheduler.sampling
    assert bench.batch.block_table.tolist() == [new.blocks]
    assert columns.block_table[0].tolist() == new.blocks + [0] * 15
    assert columns.stop_ids[0].tolist() == [-1] * STOP_COLUMNS
    assert not columns.is_aborted[0]
    assert columns.min_total[0] == 2
    assert not sampling.bias and not sampling.banned_early


def test_a_paused_sequence_keeps_its_blocks_and_computes_nothing():
    bench = Bench()
    a, b = bench.add(3), bench.add(3)
    bench.step()
    blocks = list(a.blocks)
    bench.scheduler.set_paused(a, True)
    assert bench.step() == {b: 1}
    assert a.blocks == blocks
    bench.scheduler.set_paused(b, True)
    assert not bench.scheduler.has_work
    assert bench.step() is None
    bench.scheduler.set_paused(a, False)
    assert bench.scheduler.has_work
    assert bench.step() == {a: 1}


def test_a_paused_prompt_stops_between_chunks_and_lets_others_pass():
    bench = Bench(budget=4, num_rows=2)
    long, short = bench.add(12), bench.add(3)
    assert bench.step() == {long: 4}
    bench.scheduler.set_paused(long, True)
    assert bench.step() == {short: 3}
    bench.scheduler.set_paused(long, False)
    assert bench.step() == {short: 1, long: 3}


def test_who_waits_paused_is_passed_and_has_its_turn_when_resumed():
    bench = Bench(num_rows=1)
    a, b = bench.add(3), bench.add(3)
    bench.scheduler.set_paused(a, True)
    assert bench.step() == {b: 3}
    bench.scheduler.set_paused(a, False)
    bench.scheduler.remove(b)
    assert bench.step() == {a: 3}


def test_paused_sequences_are_preempted_first_when_a_decode_needs_a_block():
    bench = Bench(num_blocks=3, block_size=4)
    first, second = bench.add(4), bench.add(3)
    bench.step()
    bench.scheduler.set_paused(first, True)  # earlier, and yet it goes first
    for _ in range(2):
        assert bench.step() == {second: 1}
    assert first.num_retractions == 1
    assert second.num_retractions == 0


def test_a_sequence_paused_by_its_client_gives_way_to_who_waits():
    bench = Bench(num_rows=1)
    slow = bench.add(3)
    bench.step()
    waiting = bench.add(3)
    bench.scheduler.set_paused(slow, True)
    assert bench.step() is None, "paused for a moment by a full ring: it keeps its row"
    bench.scheduler.set_paused(slow, True, yields=True)
    assert bench.step() == {waiting: 3}
    assert slow.num_retractions == 1
    bench.scheduler.set_paused(slow, False)
    bench.scheduler.remove(waiting)
    assert bench.step() == {slow: 4}


def test_nobody_yields_in_vain():
    bench = Bench(num_blocks=9, block_size=4)
    running, slow = bench.add(20), bench.add(4)
    bench.step()
    bench.step()
    bench.scheduler.set_paused(slow, True, yields=True)
    bench.add(20)  # five blocks: more than are free and held by `slow` together
    assert list(bench.step()) == [running]
    assert slow.num_retractions == 0


def test_nobody_passes_the_first_in_line_while_it_waits_for_blocks():
    bench = Bench(num_blocks=5, block_size=4)
    running = bench.add(8)
    bench.step()
    large, small = bench.add(12), bench.add(1)
    assert bench.step() == {running: 1}
    bench.scheduler.remove(running)
    assert bench.step() == {large: 12, small: 1}


def test_what_could_not_run_alone_is_refused_with_the_numbers():
    bench = Bench(num_blocks=5, block_size=4, max_model_len=64)
    assert bench.scheduler.capacity_tokens == 16
    with pytest.raises(NeverFitsError, match=r"16 tokens .* at most 15 .*context 64, KV cache 16"):
        bench.add(16)
    assert not bench.scheduler.waiting
    sequence = bench.add(15)
    bench.step()
    assert bench.scheduler.columns.max_total[sequence.row] == 16


def test_speculation_has_its_blocks_before_the_step_and_ends_at_the_context():
    bench = Bench(most_tokens=6, block_size=2, num_blocks=20, max_model_len=12)
    sequence = bench.add(3)
    bench.step()
    assert len(sequence.blocks) == 4  # 3 + 5 positions ahead
    while int(bench.scheduler.columns.num_tokens[sequence.row]) < 11:
        bench.step()
    bench.step()
    assert len(sequence.blocks) == 6  # 12 positions, and not one block more


def test_stop_ids_are_those_of_the_request_and_of_the_model():
    bench = Bench(eos_ids=(98, 99))
    both = bench.add(3, stop_token_ids=(5,))
    own = bench.add(3, stop_token_ids=(5,), ignore_eos=True)
    many = bench.add(3, stop_token_ids=tuple(range(STOP_COLUMNS)))
    strings = bench.add(3, stop=(b"x",))
    bench.step()
    columns = bench.scheduler.columns
    assert both.stop_ids == {5, 98, 99}
    assert own.stop_ids == {5}
    assert columns.stop_ids[both.row].tolist() == [5, 98, 99, -1]
    assert columns.is_slow[[both.row, own.row, many.row, strings.row]].tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert (columns.stop_ids[many.row] == -1).all()
    assert strings.matcher is not None and both.matcher is None


def test_min_tokens_mask_names_every_stop_id_and_knows_what_was_generated():
    bench = Bench(num_blocks=5, block_size=4)
    first, masked = bench.add(4), bench.add(4, min_tokens=3, stop_token_ids=(5,))
    bench.step()
    sampling = bench.scheduler.sampling
    assert sorted(sampling.banned_early[masked.row].tolist()) == [5, EOS]
    bench.scheduler.set_paused(masked, True)
    while not masked.num_retractions:
        bench.step()
    bench.scheduler.remove(first)
    bench.scheduler.set_paused(masked, False)
    batch, _ = bench.scheduler.schedule(1, 1)
    assert sampling.position[batch.rows].tolist() == [1]
    assert sampling.min_tokens[batch.rows].tolist() == [3]


# -- the prefix cache ------------------------------------------------------------------------------------------------------


def finish(bench, sequence, num_steps=1):
    for _ in range(num_steps):
        bench.step()
    bench.scheduler.remove(sequence)


def test_a_second_request_computes_what_the_first_has_not():
    bench = Bench(budget=64)
    finish(bench, bench.add(prompt=range(20)))
    second = bench.add(prompt=[*range(17), 70, 71])
    assert bench.step() == {second: 3}
    assert second.cached_tokens == 16
    assert bench.batch.positions.tolist() == [16, 17, 18]
    tables = bench.scheduler.tables
    assert (tables.num_query_tokens, tables.num_hit_tokens) == (39, 16)


def test_the_last_token_of_a_prompt_is_always_computed():
    bench = Bench()
    finish(bench, bench.add(prompt=range(8)))
    again = bench.add(prompt=range(8))
    assert bench.step() == {again: 4}
    assert again.cached_tokens == 4


def test_identical_prompts_admitted_together_are_computed_once():
    bench = Bench(budget=64)
    a, b, c = (bench.add(prompt=range(18)) for _ in range(3))
    assert bench.step() == {a: 18, b: 2, c: 2}
    assert a.blocks[:4] == b.blocks[:4] == c.blocks[:4]
    assert len({a.blocks[4], b.blocks[4], c.blocks[4]}) == 3
    assert bench.scheduler.blocks.num_used == 7


def test_chunks_of_others_are_taken_over_even_in_the_middle_of_a_block():
    bench = Bench(budget=16, num_rows=3)
    other = bench.add(3)
    bench.step()
    # 15 tokens are left for prompts: the short prompt leaves 5 of them, the budget of the next step ends in a block.
    a, b = bench.add(prompt=range(40)), bench.add(prompt=range(40))
    assert bench.step() == {other: 1, a: 15}
    assert bench.step() == {other: 1, a: 15}
    assert bench.step() == {other: 1, a: 10, b: 4}
    assert b.cached_tokens == 36, "all but the block with the last token"
    assert b.blocks[:9] == a.blocks[:9]


def test_who_began_alone_goes_on_with_what_another_has_computed_meanwhile():
    bench = Bench(budget=6, num_rows=2)
    slow = bench.add(prompt=range(30))
    assert bench.step() == {slow: 6}  # half of its second block
    bench.scheduler.set_paused(slow, True)
    fast = bench.add(prompt=range(30))
    assert bench.step() == {fast: 6}
    assert fast.cached_tokens == 4
    while fast.is_prefilling:
        bench.step()
    bench.scheduler.set_paused(slow, False)
    assert bench.step() == {fast: 1, slow: 2}
    assert slow.cached_tokens == 22  # of 30: 6 it had computed before, 2 now
    assert slow.blocks[:7] == fast.blocks[:7]


def test_answers_of_earlier_turns_are_found():
    bench = Bench(budget=64)
    first = bench.add(prompt=range(6))
    for _ in range(8):
        bench.step()
    turn = bench.scheduler.columns.token_ids[first.row, :14].tolist()
    bench.scheduler.remove(first)
    next_turn = bench.add(prompt=[*turn, 90, 91])
    assert bench.step() == {next_turn: 4}
    assert next_turn.cached_tokens == 12


def test_blocks_that_two_compute_at_the_same_time_become_one():
    bench = Bench(num_rows=2)
    a, b = bench.add(prompt=range(4)), bench.add(prompt=range(4))
    bench.step()
    assert a.blocks[0] == b.blocks[0], "both computed their only block, one of them was kept"
    for _ in range(5):
        bench.step()
    assert a.blocks[:2] == b.blocks[:2]
    assert a.blocks[2] != b.blocks[2]


def test_salts_keep_requests_apart():
    bench = Bench(budget=64)
    finish(bench, bench.add(prompt=range(20), cache_salt=b"mine"))
    other = bench.add(prompt=range(20), cache_salt=b"yours")
    none = bench.add(prompt=range(20))
    same = bench.add(prompt=range(20), cache_salt=b"mine")
    assert bench.step() == {other: 20, none: 20, same: 4}


def test_prompt_logprobs_compute_every_position_and_leave_their_blocks():
    bench = Bench(budget=64)
    finish(bench, bench.add(prompt=range(20)))
    whole = bench.add(prompt=range(20), prompt_logprobs=0)
    assert bench.step() == {whole: 20}
    assert whole.cached_tokens == 0
    finish(bench, whole)
    assert bench.scheduler.tables.cache.num_cached == 5


def test_the_least_recently_used_end_is_given_up_first_and_only_when_needed():
    bench = Bench(num_blocks=9, budget=64)
    finish(bench, bench.add(prompt=range(0, 13)))  # three full blocks
    finish(bench, bench.add(prompt=range(100, 113)))
    assert bench.scheduler.tables.cache.num_cached == 6
    big = bench.add(prompt=range(200, 212), max_tokens=1)
    bench.step()
    assert bench.scheduler.tables.cache.num_cached == 6 - 1 + 3
    bench.scheduler.remove(big)
    kept = bench.add(prompt=range(100, 113))
    cut = bench.add(prompt=range(0, 13))
    # The block that `kept` needs is the next of the oldest, whose first block alone is left.
    assert bench.step() == {kept: 1, cut: 9}


def test_who_shares_needs_fewer_blocks_to_be_admitted():
    bench = Bench(num_blocks=7, budget=64)
    a = bench.add(prompt=range(16))
    bench.step()
    assert bench.scheduler.blocks.num_free == 2
    other, same = bench.add(prompt=range(500, 516)), None
    assert bench.step() == {a: 1}
    bench.scheduler.remove(other)
    same = bench.add(prompt=range(17))
    assert bench.step() == {a: 1, same: 1}


def test_nobody_yields_for_blocks_that_would_stay_held():
    bench = Bench(num_blocks=9, budget=64)
    running, slow = bench.add(prompt=range(17)), bench.add(prompt=range(17))
    bench.step()
    bench.scheduler.set_paused(slow, True, yields=True)
    assert bench.scheduler.blocks.num_free == 2
    bench.add(16)  # four blocks; `slow` has five, of which four are held by `running` too
    assert list(bench.step()) == [running]
    assert slow.num_retractions == 0


def test_nobody_yields_blocks_that_whoever_waits_would_only_take_over():
    bench = Bench(num_blocks=9, budget=64)
    running, slow = bench.add(12), bench.add(prompt=range(17))
    bench.step()
    assert bench.scheduler.blocks.num_free == 0
    bench.scheduler.set_paused(slow, True, yields=True)
    # Seven blocks, of which it finds four at `slow`: three are missing, and `slow` would give back one.
    bench.add(prompt=range(28))
    bench.scheduler.set_paused(running, True)  # it would need a block too
    assert bench.step() is None
    assert slow.num_retractions == 0


def test_flush_forgets_what_was_computed_and_what_goes_on_from_it():
    bench = Bench(budget=64)
    finish(bench, bench.add(prompt=range(20)))
    running = bench.add(prompt=range(20))
    bench.step()
    bench.scheduler.flush_cache()
    bench.scheduler.check()
    assert bench.scheduler.blocks.num_used == len(running.blocks) == 5
    for _ in range(9):
        bench.step()
    after = bench.add(prompt=range(20))
    assert bench.step() == {running: 1, after: 20}
    bench.scheduler.remove(running)
    bench.scheduler.check()


def test_without_the_cache_nothing_is_found_or_kept():
    bench = Bench(budget=64, caches_prefixes=False)
    finish(bench, bench.add(prompt=range(20)))
    again = bench.add(prompt=range(20))
    assert bench.step() == {again: 20}
    tables = bench.scheduler.tables
    assert (tables.cache.num_cached, tables.num_query_tokens, again.cached_tokens) == (0, 0, 0)


def test_a_runner_that_cannot_share_blocks_is_heeded():
    info = RunnerInfo("fake", 100, 64, 33, 4, supports_prefix_cache=False)
    scheduler = Scheduler(info, max_num_seqs=2, max_num_batched_tokens=32, eos_ids=())
    assert not scheduler.tables.is_caching


def test_a_sequence_that_breaks_leaves_nothing_and_those_that_share_go_on():
    bench = Bench(budget=64)
    broken, sharer = bench.add(prompt=range(20)), bench.add(prompt=range(20))
    bench.step()
    scheduler = bench.scheduler
    batch, _ = scheduler.schedule(1, 1)
    scheduler.advance(batch, 1, failed=(0,))
    scheduler.remove(broken)
    scheduler.check()
    assert scheduler.tables.cache.num_cached == 0
    assert sharer.row >= 0 and len(sharer.blocks) == 6
    scheduler.remove(sharer)
    scheduler.check()
    assert scheduler.tables.cache.num_cached == 0
    assert scheduler.blocks.num_used == 0


def test_guessed_tokens_are_found_only_when_they_were_kept():
    """A runner that speculates: the commit says how many of the tokens were verified."""
    bench = Bench(most_tokens=4, budget=64)
    sequence = bench.add(prompt=range(6))
    bench.step()
    columns = bench.scheduler.columns
    batch, _ = bench.scheduler.schedule(1, 1)
    bench.scheduler.advance(batch, 1)
    row = sequence.row  # 7 tokens; three guesses of four are kept
    columns.token_ids[row, 7:10] = [50, 51, 52]
    columns.num_tokens[row], columns.num_computed[row] = 10, 9
    assert columns.num_indexed[row] == 4
    bench.scheduler.remove(sequence)
    bench.scheduler.check()
    again = bench.add(prompt=[*range(6), 6, 50, 51, 52])
    assert bench.step() == {again: 2}


def test_without_chunks_a_prompt_is_computed_whole_whatever_the_budget_is():
    bench = Bench(budget=8, num_rows=3, chunks_prompts=False)
    running = bench.add(3)
    bench.step()
    long, later = bench.add(20), bench.add(5)
    assert bench.step() == {running: 1, long: 20}
    assert bench.step() == {running: 1, long: 1, later: 5}


@pytest.mark.parametrize(
    "damage",
    [
        lambda s, seq: s.columns._free_rows.pop(),
        lambda s, seq: s.blocks.allocate(1),
        lambda s, seq: seq.blocks.pop(),
        lambda s, seq: s.waiting.append(seq),
        lambda s, seq: s.by_row.__setitem__(seq.row, None),
        lambda s, seq: setattr(seq, "is_prefilling", True),
        lambda s, seq: s.columns.num_computed.__setitem__(seq.row, 60),
    ],
    ids=["row lost", "block lost", "block forgotten", "runs and waits", "row unknown", "prefilling", "computed"],
)  # fmt: skip
def test_check_sees_damage(damage):
    bench = Bench()
    sequence = bench.add(3)
    bench.step()
    bench.scheduler.check()
    damage(bench.scheduler, sequence)
    with pytest.raises(AssertionError):
        bench.scheduler.check()


def test_what_penalties_know_survives_preemption_and_prefix_hits():
    bench = Bench(num_rows=3, num_blocks=11, budget=64)
    prompt = list(range(8))
    bench.add(prompt=prompt, max_tokens=1)
    sequences = [
        bench.add(prompt=[*prompt, 50 + n], presence_penalty=0.5, max_tokens=18) for n in range(2)
    ]
    most_seen = 0
    while bench.step() is not None:
        for sequence in sequences:
            if sequence.row >= 0:
                scheduler = bench.scheduler
                ids, counts = scheduler.sampling.seen(sequence.row)
                count = int(scheduler.columns.num_tokens[sequence.row])
                output = scheduler.columns.token_ids[sequence.row, 9:count].tolist()
                assert set(ids.tolist()) == {*sequence.prompt_ids.tolist(), *output}
                assert counts.sum() == len(output)
                most_seen = max(most_seen, len(output))
    assert most_seen > 10
    assert sum(sequence.num_retractions for sequence in sequences) > 0
    assert all(sequence.cached_tokens for sequence in sequences)
