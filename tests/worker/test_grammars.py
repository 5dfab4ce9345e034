"""Grammars are compiled while others run, kept, copied, and their masks say exactly what may come next."""

import select

import numpy as np
import pytest
from llguidance import LLMatcher

from shmserve import grammar as g
from shmserve.worker.grammars import GrammarCompiler, allowed, fill_masks


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
