"""Logprobs of prompts from the chunk to the record: each token once, before the first tokens, whatever happens meanwhile."""

from dataclasses import replace

import numpy as np
import pytest

from shmserve.request import MOST_LOGPROBS, FinishReason
from shmserve.wire.logprobs import PAIRS_PER_SLOT
from shmserve.wire.tokens import TokenKind


def prompt_of(num_tokens: int) -> list[int]:
    return [3 + at % 20 for at in range(num_tokens)]


@pytest.mark.parametrize("num_top", [0, 1, 11, 12, MOST_LOGPROBS])
@pytest.mark.parametrize("length", [1, 2, 13, 40])
def test_each_token_of_a_prompt_is_scored_once_and_the_first_is_not(rig, num_top, length):
    r = rig(max_num_batched_tokens=7, token_slots=1024)
    prompt = prompt_of(length)
    r.front.submit(5, prompt, prompt_logprobs=num_top)
    r.run_dry()
    said = r.front.prompt.get(5, [])
    assert [ids[0] for ids, _ in said] == prompt[1:]
    width = 1 + min(num_top, r.runner.info.vocab_size)
    for ids, logprobs in said:
        assert len(ids) == len(logprobs) == width
        assert ids[1:] == [(ids[0] + rank) % 29 for rank in range(width - 1)]
        expected = [1, *range(1, width)]
        assert logprobs == pytest.approx([-np.log(2) * rank for rank in expected])
    assert r.front.finished[5].finish == FinishReason.LENGTH


def test_a_run_of_plain_scores_takes_a_twelfth_of_the_slots(rig):
    r = rig()
    r.front.submit(1, prompt_of(25), prompt_logprobs=0)
    r.run_dry()
    assert r.front.kinds.count(TokenKind.PROMPT_LOGPROBS) == -(-24 // PAIRS_PER_SLOT)


def test_nobody_asked_means_no_records(rig):
    r = rig()
    r.front.submit(1, prompt_of(25))
    r.run_dry()
    assert TokenKind.PROMPT_LOGPROBS not in r.front.kinds


def test_scores_do_not_come_from_the_prefix_cache_and_not_twice_after_a_preemption(rig):
    r = rig(num_blocks=13, max_num_seqs=3, max_num_batched_tokens=5, token_slots=1024)
    prompt = prompt_of(22)
    r.front.submit(1, prompt, max_tokens=2)
    r.run_dry()
    for req_id in (2, 3):
        r.front.submit(req_id, prompt, prompt_logprobs=2, max_tokens=20, ignore_eos=True)
    r.run_dry()
    assert sum(r.front.finished[req_id].num_retractions for req_id in (2, 3)) > 0
    for req_id in (2, 3):
        assert [ids[0] for ids, _ in r.front.prompt[req_id]] == prompt[1:]
        assert r.front.finished[req_id].cached_tokens == 0
    r.assert_idle()


def test_a_score_that_is_not_finite_ends_that_request_alone(rig):
    r = rig(max_num_batched_tokens=6)
    run = r.runner.run

    def poisoned(batch, sampling):
        output = run(batch, sampling)
        return replace(output, prompt_scores=tuple(map(poison, output.prompt_scores)))

    def poison(scores):
        logprobs = scores.logprobs.copy()
        logprobs[scores.part.token_ids == 17] = np.nan
        return replace(scores, logprobs=logprobs)

    r.runner.run = poisoned
    r.front.submit(1, prompt_of(30), prompt_logprobs=0)
    r.front.submit(2, prompt_of(9), prompt_logprobs=0)
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.ERROR
    assert r.front.messages[1] and not r.front.tokens[1]
    assert r.front.finished[2].finish == FinishReason.LENGTH
    r.assert_idle()


def test_what_a_score_that_is_not_finite_was_computed_with_is_not_found(rig):
    r = rig(max_num_batched_tokens=6)
    run = r.runner.run

    def poisoned(batch, sampling):
        output = run(batch, sampling)
        scores = [replace(s, logprobs=s.logprobs * np.nan) for s in output.prompt_scores]
        return replace(output, prompt_scores=tuple(scores))

    r.runner.run = poisoned
    r.front.submit(1, prompt_of(30), prompt_logprobs=0)
    r.run_dry()
    r.front.submit(2, prompt_of(30))
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.ERROR
    assert r.front.finished[2].finish == FinishReason.LENGTH
    assert r.front.finished[2].cached_tokens == 0


def test_an_abort_under_the_forward_pass_of_a_scored_prompt_leaves_nothing(rig):
    r = rig(max_num_batched_tokens=6)
    r.front.submit(1, prompt_of(30), prompt_logprobs=3)
    r.step()
    r.under_forward = lambda: r.engine.abort(1)
    r.run_dry()
    assert r.front.finished[1].finish == FinishReason.ABORT
    assert len(r.front.prompt[1]) < 29
    r.assert_idle()
