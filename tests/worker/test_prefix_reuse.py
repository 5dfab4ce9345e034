"""What requests share of the KV cache, through the engine with simulated tokens and through the kernels with real ones."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from shmserve.request import FinishReason, SamplingParams
from shmserve.wire.submit import Submit, pack_submit
from shmserve.wire.submit_slots import SubmitKind
from shmserve.worker.cpu.runner import CpuRunner
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence

pytestmark = pytest.mark.slow

# -- through the engine ----------------------------------------------------------------------------------------------------

PROMPT = tuple(3 + at % 7 for at in range(17))  # four blocks of four, and one token


def submit_salted(front, req_id: int, salt: bytes) -> None:
    params = SamplingParams(max_tokens=1, seed=req_id)
    request = Submit(req_id, np.array(PROMPT, np.int32), params, cache_salt=salt)
    assert front.submit_ring.try_write(*pack_submit(request))


def test_cached_tokens_are_told_at_the_start_and_at_the_end(rig):
    r = rig()
    r.front.submit(1, PROMPT)
    r.run_dry()
    r.front.submit(2, PROMPT)
    r.run_dry()
    for records in (r.front.started, r.front.finished):
        assert [records[req_id].cached_tokens for req_id in (1, 2)] == [0, 16]
    assert (r.board["prefix_query_tokens"], r.board["prefix_hit_tokens"]) == (34, 16)
    assert r.board["kv_blocks_used"] == 0, "what is only kept is not used"
    r.assert_idle()


def test_what_a_preempted_request_finds_of_its_own_is_not_called_cached(rig):
    r = rig(num_blocks=9)
    for req_id in (1, 2, 3):
        r.front.submit(req_id, (req_id + 2,) * 6, max_tokens=14, ignore_eos=True)
    r.run_dry()
    assert any(r.front.finished[req_id].num_retractions for req_id in (1, 2, 3))
    for req_id in (1, 2, 3):
        assert r.front.finished[req_id].cached_tokens == 0
        assert r.front.tokens[req_id] == r.expected(req_id, 14)


def test_a_flush_forgets_and_is_answered(rig):
    r = rig()
    r.front.submit(1, PROMPT)
    r.run_dry()
    r.front.control(SubmitKind.FLUSH_CACHE, 5)
    r.run_dry()
    r.front.submit(2, PROMPT)
    r.run_dry()
    assert sorted(r.front.finished) == [1, 2, 5]
    assert r.front.finished[2].cached_tokens == 0


def test_a_flush_under_the_forward_pass_forgets_what_that_pass_computes(rig):
    r = rig()
    r.under_forward = lambda: r.front.control(SubmitKind.FLUSH_CACHE, 5)
    r.front.submit(1, PROMPT, ignore_eos=True)
    r.run_dry()
    r.front.submit(2, PROMPT)
    r.run_dry()
    assert len(r.front.tokens[1]) == 4
    assert r.front.finished[2].cached_tokens == 0


def test_salts_come_with_the_request(rig):
    r = rig()
    for req_id, salt in enumerate((b"", b"a", b"b", b"a", b""), 1):
        submit_salted(r.front, req_id, salt)
        r.run_dry()
    cached = [r.front.finished[req_id].cached_tokens for req_id in range(1, 6)]
    assert cached == [0, 0, 0, 16, 16]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_blocks_of_a_request_that_breaks_are_not_found(rig, is_aborted):
    """Aborted in the very step or not: its keys and values may be no numbers."""
    r = rig()
    run = r.runner.run
    r.runner.run = lambda batch, sampling: replace(run(batch, sampling), failed=(0,))
    if is_aborted:
        r.under_forward = lambda: r.front.control(SubmitKind.ABORT, 1)
    r.front.submit(1, PROMPT)
    r.run_dry()
    wanted = FinishReason.ABORT if is_aborted else FinishReason.ERROR
    assert r.front.finished[1].finish == wanted
    r.runner.run = run
    r.front.submit(2, PROMPT)
    r.run_dry()
    assert r.front.finished[2].cached_tokens == 0


# -- through the kernels ---------------------------------------------------------------------------------------------------

SHARED = (
    "The kettle had been on the stove for 12 minutes when the letter came. Anna read it twice, put it down beside the "
    "bread and looked out at the harbour, where the first of the boats was coming in."
)
QUESTIONS = ("", " She did not", " It said that the house", " It said that the boat", " Nobody")


@dataclass
class Made:
    """What came of some requests: tokens and the bits of their logprobs."""

    answers: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    num_computed: int = 0
    num_preempted: int = 0


@pytest.fixture(scope="module")
def runner(default_model, tmp_path_factory):
    runner = CpuRunner(
        default_model,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        kv_cache_bytes=60 << 20,
        num_threads=1,
        progress=lambda what, share: None,
        cache=tmp_path_factory.mktemp("kernels"),
    )
    yield runner
    runner.close()


class Serving:
    """A scheduler over the real runner. `preempts_each_step`: nobody is left running after a step."""

    def __init__(self, runner, *, caches, num_blocks=100, budget=128, preempts_each_step=False):
        self.runner = runner
        self.preempts_each_step = preempts_each_step
        self.scheduler = Scheduler(
            replace(runner.info, num_blocks=num_blocks),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            eos_ids=(),
            caches_prefixes=caches,
        )
        self.made = Made()
        self.num_added = 0

    def serve(self, prompts, max_tokens, temperature) -> list[list[int]]:
        """The answers to `prompts`, computed together."""
        scheduler, made = self.scheduler, self.made
        answers, logprobs = {}, {}
        for prompt in prompts:
            self.num_added += 1
            params = SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=self.num_added, num_logprobs=0
            )
            sequence = Sequence(
                self.num_added, 0, params, np.array(prompt, np.int32), self.num_added, 1
            )
            answers[sequence], logprobs[sequence] = [], []
            scheduler.add(sequence)
        while scheduler.has_work:
            batch, _ = scheduler.schedule(1, 1)
            scheduler.check()
            made.num_computed += batch.num_tokens
            output = self.runner.run(batch, scheduler.sampling)
            scheduler.advance(batch, output.time_ns, output.failed)
            assert not output.failed
            columns = scheduler.columns
            for index, row in enumerate(batch.rows[batch.sample_seqs].tolist()):
                sequence = scheduler.by_row[row]
                answers[sequence].append(int(output.token_ids[index, 0]))
                logprobs[sequence].append(float(output.logprobs[index, 0]))
                columns.token_ids[row, columns.num_tokens[row]] = answers[sequence][-1]
                columns.num_tokens[row] += 1
                scheduler.sampling.position[row] += 1
                if columns.num_tokens[row] == columns.max_total[row]:
                    scheduler.remove(sequence)
            if self.preempts_each_step:
                for sequence in list(scheduler.running):
                    scheduler._preempt(sequence)
        made.num_preempted = scheduler.num_preempted
        made.answers += answers.values()
        made.logprobs += logprobs.values()
        return list(answers.values())


def conversations(runner, ids_of, max_tokens=9, temperature=0.0, **options) -> Made:
    """Two turns of five conversations that begin alike; the second turn goes on from each one's answer."""
    serving = Serving(runner, **options)
    prompts = [ids_of(SHARED + question) for question in QUESTIONS]
    answers = serving.serve(prompts, max_tokens, temperature)
    second = [p + a + ids_of(" And then") for p, a in zip(prompts, answers, strict=True)]
    serving.serve(second, max_tokens, temperature)
    return serving.made


@pytest.fixture(scope="module")
def ids_of(default_model):
    tokenizer = default_model.tokenizer()
    return lambda text: tokenizer.encode(text).ids


@pytest.fixture(
    scope="module", params=[0.0, pytest.param(1.0, marks=pytest.mark.slow)], ids=["greedy", "drawn"]
)
def plain(request, runner, ids_of):
    """Without the cache and with room for everybody."""
    return request.param, conversations(runner, ids_of, temperature=request.param, caches=False)


@pytest.mark.parametrize(
    "options",
    [
        {"caches": True},
        {"caches": True, "budget": 19},
        {"caches": True, "num_blocks": 12},
        {"caches": False, "num_blocks": 12},
        {"caches": True, "preempts_each_step": True},
        pytest.param({"caches": False, "preempts_each_step": True}, marks=pytest.mark.slow),
    ],
    ids=["cached", "chunks", "few blocks", "recomputed", "preempted at each", "recomputed at each"],
)
def test_cache_and_preemption_change_no_bit_of_any_turn(runner, ids_of, plain, options):
    temperature, wanted = plain
    made = conversations(runner, ids_of, temperature=temperature, **options)
    assert made.answers == wanted.answers
    assert made.logprobs == wanted.logprobs
    if "num_blocks" in options or "preempts_each_step" in options:
        assert made.num_preempted > 0
    if options == {"caches": True}:
        assert made.num_computed < wanted.num_computed / 2
