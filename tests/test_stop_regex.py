"""Stop regexes: what is taken, how much is held, and that the cut into tokens decides nothing."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.stop import StopMatch
from shmserve.stop_regex import StopRegexError, StopScan, compile_stop

PATTERNS = ["ab?c", "a{1,4}?b{1,3}|c", "[a-c]{2}d", "(?:€|d)a", "a.c", "(?i)B[^d]", "a{3}"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "not a regex"),
        ("(?=a)b", "is not taken"),
        (r"(a)\1", "is not taken"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("a+", "without bound.*1024"),
        (".{257}", "1028 bytes.*1024"),
        ("^a", "anchor"),
        (r"a(b|c\b)", "anchor"),
        ("a" * 257, "at most 256 characters, got 257"),
        ("b.{,1}", "lower bound"),
        ("[[:alpha:]]x", "not a regex"),
        ("\ud800", "not a regex"),
    ],
)
def test_what_cannot_be_matched_is_refused_with_the_reason(pattern, reason):
    with pytest.raises(StopRegexError, match=reason):
        compile_stop(pattern)


@pytest.mark.parametrize(
    ("pattern", "width"),
    [("abc", 3), ("a{2,5}", 5), (r"\d{1,9}", 9), (".", 4), ("é", 4), ("(?i)k", 4), ("[^a]b", 8)],
)
def test_the_width_bounds_every_match_in_bytes(pattern, width):
    assert compile_stop(pattern).width == width


def expected(text: str, patterns, stops=()):
    """By Python's own engine, on whole text: the first end, of those the longest."""
    sources = [*map(re.escape, stops), *patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            for i, source in enumerate(sources):
                if re.fullmatch(source, text[start:end]):
                    size = len(text[:start].encode()), len(text[:end].encode())
                    return StopMatch(*size, i)
    return None


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(
    text=st.text("abcdB€ ", max_size=24),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    stops=st.lists(st.sampled_from(["ab", "cd", "€€"]), max_size=2, unique=True),
    data=st.data(),
)
def test_the_first_end_wins_however_the_text_is_cut(text, patterns, stops, data):
    scan, raw, at, match, shown = (
        StopScan([s.encode() for s in stops], patterns),
        text.encode(),
        0,
        None,
        0,
    )
    while at < len(raw) and match is None:
        size = data.draw(st.integers(1, 6))
        match = scan.feed(raw[at : at + size])
        at += size
        if match is None:
            shown = scan.num_bytes - scan.held()
    want = expected(text, patterns, stops)
    if want is None:
        assert match is None
    else:
        assert match is not None
        assert (match.start, match.end) == (want.start, want.end)
        assert shown <= match.start


def test_min_tokens_lets_a_match_pass_for_good():
    scan = StopScan([], ["abc?"])
    assert scan.feed(b"xab", is_matching=False) is None
    assert scan.feed(b" ") is None
    assert scan.feed(b"ab") == StopMatch(4, 6, 0)
