"""Stop strings against a search of the whole text by brute force: however it is cut, whatever the order of the list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.stop import ClearTexts, StopMatch, StopMatcher

stops_of = st.lists(st.text("ab", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=4)
text_of = st.text("abc", max_size=30).map(str.encode)
cuts_of = st.lists(st.integers(0, 30), max_size=12)


def parts_of(text: bytes, cuts: list[int]) -> list[bytes]:
    """`text` cut at `cuts`; equal cuts give empty parts, as tokens without text do."""
    ends = sorted(min(cut, len(text)) for cut in cuts)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def search(text: bytes, stops: list[bytes], past: int = 0) -> tuple[int, int] | None:
    """(start, end) of the match that ends first behind `past`, and of those that end there the longest."""
    found = [
        (end, start)
        for stop in stops
        for start in range(len(text))
        if (end := start + len(stop)) > past and text[start:end] == stop
    ]
    return min(found)[::-1] if found else None


def feed_all(matcher: StopMatcher, parts: list[bytes]) -> StopMatch | None:
    return next((match for part in parts if (match := matcher.feed(part)) is not None), None)


@given(stops_of, text_of, cuts_of)
def test_any_partition_gives_the_match_of_the_whole_text(stops, text, cuts):
    match = feed_all(StopMatcher(stops), parts_of(text, cuts))
    wanted = search(text, stops)
    if wanted is None:
        assert match is None
    else:
        assert match is not None
        assert (match.start, match.end) == wanted
        assert stops[match.stop] == text[match.start : match.end]


@given(stops_of, text_of, cuts_of)
def test_a_match_is_found_in_the_feed_that_completes_it(stops, text, cuts):
    matcher, fed = StopMatcher(stops), b""
    for part in parts_of(text, cuts):
        fed += part
        match = matcher.feed(part)
        assert (match is not None) == (search(fed, stops) is not None)
        assert matcher.num_bytes == len(fed)
        if match is not None:
            return


@given(stops_of, text_of, cuts_of, st.randoms())
def test_the_order_of_the_list_does_not_matter(stops, text, cuts, random):
    shuffled = stops.copy()
    random.shuffle(shuffled)
    first = feed_all(StopMatcher(stops), parts_of(text, cuts))
    second = feed_all(StopMatcher(shuffled), parts_of(text, cuts))
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.start, first.end) == (second.start, second.end)
        assert stops[first.stop] == shuffled[second.stop]


@given(stops_of, text_of, cuts_of)
def test_held_is_exactly_what_may_yet_begin_a_stop(stops, text, cuts):
    matcher, fed = StopMatcher(stops), b""
    for part in parts_of(text, cuts):
        fed += part
        if matcher.feed(part) is not None:
            return
        beginnings = [
            n
            for n in range(1, len(fed) + 1)
            if any(len(stop) > n and stop.startswith(fed[-n:]) for stop in stops)
        ]
        assert matcher.held() == max(beginnings, default=0)
        assert matcher.held() < max(map(len, stops))


@given(stops_of, text_of, cuts_of)
def test_released_text_is_never_part_of_a_later_match(stops, text, cuts):
    matcher, released = StopMatcher(stops), 0
    for part in parts_of(text, cuts):
        match = matcher.feed(part)
        if match is not None:
            assert match.start >= released
            return
        assert matcher.num_bytes - matcher.held() >= released, "released text was taken back"
        released = matcher.num_bytes - matcher.held()


@given(stops_of, text_of, cuts_of, st.integers(0, 12))
def test_what_ends_under_min_tokens_is_passed_for_good(stops, text, cuts, min_parts):
    """The first `min_parts` tokens do not match; a stop that ends in a later one does, wherever it begins."""
    parts = parts_of(text, cuts)
    matcher = StopMatcher(stops)
    passed = sum(map(len, parts[:min_parts]))
    match = None
    for number, part in enumerate(parts):
        match = matcher.feed(part, is_matching=number >= min_parts)
        if match is not None:
            break
    wanted = search(text, stops, past=passed)
    assert (match and (match.start, match.end)) == wanted


@given(stops_of, text_of, cuts_of)
def test_a_clear_text_is_one_that_a_scan_without_held_bytes_need_not_see(stops, text, cuts):
    """Fed or not, nothing is found or held; and a text that is not clear matches, or leaves something held."""
    texts, matcher, unfed = ClearTexts(stops), StopMatcher(stops), StopMatcher(stops)
    for part in parts_of(text, cuts):
        was_held = matcher.held()
        match, is_clear = matcher.feed(part), texts.has(part)
        if not was_held:
            assert is_clear == (match is None and not matcher.held())
        if was_held or not is_clear:
            same = unfed.feed(part)
            assert (match is None) == (same is None)
            if match is not None:
                assert same is not None
                before, passed = matcher.num_bytes - match.start, unfed.num_bytes - same.start
                assert (before, match.stop) == (passed, same.stop)
                return
        assert unfed.held() == matcher.held()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("parts", [[b"one two three four"], [b"one", b" two", b" three", b" four"]])
def test_of_several_stops_the_earliest_in_the_text_wins(parts, order):
    stops = [[b"four", b"three", b"two"][i] for i in order]
    match = feed_all(StopMatcher(stops), parts)
    assert match == StopMatch(4, 7, stops.index(b"two"))


def test_a_stop_inside_another_wins_as_it_does_when_the_bytes_come_one_by_one():
    stops, text = [b"one two", b"ne"], b"one two"
    whole = StopMatcher(stops).feed(text)
    singly = feed_all(StopMatcher(stops), [bytes([byte]) for byte in text])
    assert whole == singly == StopMatch(1, 3, 1)


def test_of_stops_that_end_together_the_longest_is_cut_away():
    assert StopMatcher([b"d", b"end", b"nd"]).feed(b"the end") == StopMatch(4, 7, 1)


def test_a_stop_may_be_half_a_character():
    euro = "\u20ac".encode()
    matcher = StopMatcher([euro])
    assert matcher.feed(euro[:1]) is None
    assert matcher.held() == 1
    assert matcher.feed(euro[1:]) == StopMatch(0, 3, 0)


@pytest.mark.parametrize("stops", [[], [b""], [b"a", b""]])
def test_no_stop_and_an_empty_stop_are_mistakes_of_the_caller(stops):
    with pytest.raises(AssertionError):
        StopMatcher(stops)
