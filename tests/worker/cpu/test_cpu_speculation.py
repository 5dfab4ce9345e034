"""On the real model the C kernels give the same tokens and logprobs with guesses as without, to the bit, alone and beside others."""

import numpy as np
import pytest

from shmserve.request import SamplingParams
from shmserve.worker.commit import Committer
from shmserve.worker.cpu.runner import CpuRunner
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions

pytestmark = pytest.mark.slow

NOTE = "The red boat left at 7:15 with 3 crates of lemons. The blue boat left at 8:40 with 12 crates of limes.\n"


@pytest.fixture(scope="module")
def runner(default_model, kernel_cache):
    runner = CpuRunner(
        default_model,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=256,
        kv_cache_bytes=60 << 20,
        num_threads=1,
        progress=lambda what, share: None,
        cache=kernel_cache,
    )
    yield runner
    runner.close()


def answers(runner, model, requests) -> tuple[list[tuple], int, int]:
    """(tokens, logprobs, top) of each (text, params), computed together; the steps, and the guesses that were right."""
    scheduler = Scheduler(runner.info, max_num_seqs=8, max_num_batched_tokens=256, eos_ids=())
    committer = Committer(scheduler, StopConditions(model.token_bytes(), model.special_token_ids))
    found = {}
    tokenizer = model.tokenizer()
    for number, (text, params) in enumerate(requests):
        prompt = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        sequence = Sequence(number, 0, params, prompt, number, 1)
        scheduler.add(sequence)
        found[number] = ([], [], [])
    num_steps = num_right = 0
    while scheduler.has_work:
        batch, _ = scheduler.schedule(num_steps, 1)
        output = runner.run(batch, scheduler.sampling)
        num_steps += 1
        scheduler.advance(batch, output.time_ns, output.failed)
        assert not output.failed
        before = scheduler.columns.num_tokens.copy()
        committed = committer.commit(batch, output, output.time_ns)
        for index, row in enumerate(batch.rows[batch.sample_seqs].tolist()):
            tokens, logprobs, top = found[scheduler.by_row[row].req_id]
            count = int(scheduler.columns.num_tokens[row] - before[row])
            num_right += count - 1
            tokens += output.token_ids[index, :count].tolist()
            if output.logprobs is not None:
                logprobs += output.logprobs[index, :count].tolist()
            if output.top and index in output.top:
                ids, values = output.top[index]
                top += [*zip(ids[:count].tolist(), values[:count].tolist(), strict=True)]
        for sequence, _ in committed.endings:
            scheduler.remove(sequence)
        scheduler.check()
    return [found[number] for number in range(len(requests))], num_steps, num_right


def requests(num_guesses: int) -> list[tuple[str, SamplingParams]]:
    """Greedy with logprobs, drawn at a low temperature, drawn with min_tokens and a bias, and one that never guesses."""
    copies = NOTE * 5

    def params(max_tokens, guesses=num_guesses, **more):
        return SamplingParams(max_tokens, num_speculative_tokens=guesses, **more)

    return [
        (copies, params(40, temperature=0.0, num_logprobs=2)),
        (copies, params(40, temperature=0.4, top_p=0.9, seed=5, num_logprobs=0)),
        (copies, params(30, temperature=0.7, seed=6, min_tokens=20, stop_token_ids=(198, 30), logit_bias=((28, 1.0),))),
        ("The capital of France is", params(40, guesses=0, temperature=1.0, seed=7)),
        (copies[:150], params(25, temperature=0.0, stop=(b"limes",))),
    ]  # fmt: skip


def test_answers_are_the_same_with_guesses_alone_and_beside_others(runner, default_model):
    plain, _, none = answers(runner, default_model, requests(0))
    assert none == 0
    together, _, num_right = answers(runner, default_model, requests(7))
    assert num_right > 15
    for number, request in enumerate(requests(15)):
        (alone,), _, _ = answers(runner, default_model, [request])
        # repr, since a logprob that nobody asked for is NaN
        for which in (0, 2) if request[1].num_logprobs < 0 else (0, 1, 2):
            assert repr(plain[number][which]) == repr(together[number][which]), (number, which)
            assert repr(plain[number][which]) == repr(alone[which]), (number, which)
    assert len(plain[0][2]) == 40 and len(plain[0][1]) == 40


def test_a_copied_text_takes_a_fraction_of_the_steps(runner, default_model):
    (_, params), *_ = requests(7)  # greedy
    _, num_steps, num_right = answers(runner, default_model, [(NOTE * 5, params)])
    assert num_right > 20 and num_steps + num_right < 45, (num_steps, num_right)
