"""Grammars are compiled while others run, kept, copied, and their masks say exactly what may come next."""

import select
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from shmserve import grammar as g
from shmserve.request import FinishReason, SamplingParams
from shmserve.token_bytes import TokenBytes
from shmserve.worker.constraints import Constraints
from shmserve.worker.grammars import GrammarCompiler, allowed, fill_masks
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return g.tokenizer_of(default_model)


@pytest.fixture
def compiler(tokenizer):
    compiler = GrammarCompiler(lambda: tokenizer)
    yield compiler
    compiler.close()


def wait(compiler):
    assert select.select([compiler.fd], [], [], 30)[0], "nothing became ready"
    return compiler.ready()


def test_first_request_waits_and_the_next_gets_a_copy_at_once(compiler):
    grammar = g.from_regex("ab+")
    assert compiler.begin(7, grammar) is None
    assert compiler.num_compiling == 1
    ((req_id, matcher, fault),) = wait(compiler)
    assert (req_id, fault) == (7, "") and compiler.num_compiling == 0
    again = compiler.begin(8, grammar)
    assert again is not None and again is not matcher
    assert not matcher.is_accepting() and not again.is_accepting()


def test_copies_do_not_share_what_they_have_consumed(compiler, tokenizer):
    grammar = g.from_choice(["Hello", "dog"])
    compiler.begin(1, grammar)
    ((_, first, _),) = wait(compiler)
    second = compiler.begin(2, grammar)
    assert first.try_consume_tokens(tokenizer.tokenize_str("Hello")) > 0
    assert second.try_consume_tokens(tokenizer.tokenize_str("dog")) > 0


def test_grammar_that_cannot_be_compiled_ends_its_request_with_the_reason(compiler):
    compiler.begin(1, g.from_regex("(a"))
    ((req_id, matcher, fault),) = wait(compiler)
    assert (req_id, matcher) == (1, None) and "unclosed" in fault
    assert compiler.begin(2, g.from_regex("(a")) is None  # nothing wrong is kept
    wait(compiler)


def test_forgotten_request_is_not_told_and_leaves_no_readable_descriptor(compiler):
    for req_id in range(20):
        compiler.begin(req_id, g.from_regex(f"a{{{req_id + 1}}}"))
        compiler.forget(req_id)
    compiler.begin(99, g.from_regex("b"))
    seen = []
    while not seen:
        seen += wait(compiler)
    assert [req_id for req_id, _, _ in seen] == [99]
    assert not select.select([compiler.fd], [], [], 0)[0]


def test_a_burst_of_one_grammar_compiles_it_once(compiler):
    compile_it, compiled = compiler._compile, []

    def compile_and_note(grammar):
        compiled.append(grammar)
        return compile_it(grammar)

    compiler._compile = compile_and_note
    same, other = g.from_regex("ab+"), g.from_regex("c")
    for req_id, grammar in ((1, same), (2, other), (3, same), (4, same)):
        assert compiler.begin(req_id, grammar) is None
    compiler.forget(1)
    ready = {}
    while len(ready) < 3:
        ready |= {req_id: matcher for req_id, matcher, _ in wait(compiler)}
    assert sorted(ready) == [2, 3, 4] and compiled == [same, other]
    assert ready[3] is not ready[4] and compiler.num_compiling == 0
    compiler.forget(3)


def test_who_is_forgotten_last_takes_its_grammar_along(compiler):
    grammar = g.from_regex("ab+")
    for req_id in (1, 2):
        compiler.begin(req_id, grammar)
    for req_id in (1, 2):
        compiler.forget(req_id)
    assert compiler.begin(3, grammar) is None, "not what was cancelled"
    seen = []
    while not seen:
        seen += wait(compiler)
    ((req_id, matcher, fault),) = seen
    assert (req_id, fault) == (3, "") and matcher is not None


def test_a_grammar_that_fails_on_the_way_is_no_end_of_the_text(tokenizer, default_model):
    """Past its limits it allows the end of the sequence and nothing else: a model has to say it, and it would be a "stop"."""
    limits = LLParserLimits(step_max_items=50, verbose_errors=False)
    ambiguous = g.from_ebnf('start: s\ns: s s | "a" | "b"')
    matcher = LLMatcher(tokenizer, ambiguous, log_level=0, limits=limits)
    may = allowed(fill_masks([matcher], tokenizer.vocab_size), tokenizer.vocab_size)
    eos = default_model.eos_token_ids
    assert np.flatnonzero(may[0]).tolist() == sorted(eos)
    params = SamplingParams(max_tokens=9)
    sequence = SimpleNamespace(params=params, stop_ids=set(eos), matcher=None, grammar=matcher)
    ending = StopConditions(TokenBytes.from_list([]), ()).judge_one(sequence, eos[0], 1, 8)
    assert ending.reason is FinishReason.ERROR
    assert "Too many items" in ending.fault and "<" not in ending.fault


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(compiler, monkeypatch):
    """Copies share one lexer: past its limit each new copy would fail at its first token, for as long as the worker lives."""
    grammar = g.from_regex("[a-h]*a[a-h]{40}c")
    constraints = Constraints(compiler, 49152)
    least = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(
        compiler, "_compile", lambda text: LLMatcher(compiler._new_tokenizer(), text, limits=least)
    )

    def begin(req_id):
        params = SamplingParams(max_tokens=9, grammar=grammar)
        sequence = Sequence(req_id, 0, params, np.zeros(1, np.int32), req_id, 1)
        constraints.add(sequence)
        if sequence.grammar is None:
            select.select([compiler.fd], [], [], 30)
            assert [each for each, _ in constraints.ready()] == [sequence]
        return sequence.grammar

    first, second = begin(1), begin(2)
    for token_id in compiler._new_tokenizer().tokenize_str("bacahagafadabaccab" * 9):
        fill_masks([first], 49152)
        if first.is_error() or not first.consume_token(token_id):
            break
    fill_masks([second], 49152)
    assert first.is_error() and second.is_error() and "states" in second.get_error()
    constraints.forget(1)
    third = begin(3)
    fill_masks([third], 49152)
    assert not third.is_error()


def test_a_look_while_a_grammar_becomes_ready_leaves_no_readable_descriptor(compiler):
    """Else the worker would not sleep again until the next one is compiled."""
    told, seen = compiler._done.add, []

    def add_late(count):
        seen.extend(compiler.ready())  # the worker is awake for another reason
        told(count)

    compiler._done.add = add_late
    compiler.begin(1, g.from_regex("ab+"))
    while not seen:
        seen += wait(compiler)
    assert [req_id for req_id, _, _ in seen] == [1]
    assert not select.select([compiler.fd], [], [], 0.1)[0]


@pytest.mark.parametrize("count", [1, 5])
def test_masks_allow_exactly_the_tokens_that_the_grammar_does(tokenizer, count):
    matchers = [LLMatcher(tokenizer, g.from_choice(["Hello", "dog"])) for _ in range(count)]
    masks = fill_masks(matchers, tokenizer.vocab_size)
    assert masks.shape == (count, -(-tokenizer.vocab_size // 32))
    may = allowed(masks, tokenizer.vocab_size)
    assert may.shape == (count, tokenizer.vocab_size)
    for row in may:
        texts = {tokenizer.decode_str([i]) for i in np.flatnonzero(row)}
        assert texts and all("Hello".startswith(t) or "dog".startswith(t) for t in texts)
        assert {"H", "Hello", "d"} <= texts
