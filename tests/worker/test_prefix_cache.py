"""The prefix cache finds blocks by their tokens and what stands before them, and gives up the least recently used end first."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.prefix_cache import PrefixCache

SIZE = 2


def tokens_of(text: str) -> bytes:
    """A token for each character."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32).tobytes()


def insert(cache: PrefixCache, text: str, blocks: list[int], salt: bytes = b"") -> None:
    """The blocks of `text`, which are held."""
    parent = salt
    for at, block in enumerate(blocks):
        part = text[at * SIZE : (at + 1) * SIZE]
        node = cache.insert(parent, tokens_of(part), block)
        parent = node.uid
    cache.check()


def retire(cache: PrefixCache, blocks: list[int]) -> None:
    for block in reversed(blocks):
        assert cache.retire(block)
    cache.check()


def found(cache: PrefixCache, text: str, salt: bytes = b"") -> list[int]:
    return [node.block for node in cache.match(salt, tokens_of(text))]


def test_full_blocks_of_the_longest_known_prefix_are_found():
    cache = PrefixCache(SIZE)
    insert(cache, "abcdef", [7, 8, 9])
    assert found(cache, "abcdef") == [7, 8, 9]
    assert found(cache, "abcdeX") == found(cache, "abcde") == [7, 8]
    assert found(cache, "abXdef") == [7]
    assert found(cache, "Xbcdef") == found(cache, "a") == found(cache, "") == []


def test_a_block_is_found_behind_the_same_tokens_only():
    cache = PrefixCache(SIZE)
    insert(cache, "abzz", [1, 2])
    insert(cache, "cdzz", [3, 4])
    assert found(cache, "abzz") == [1, 2]
    assert found(cache, "cdzz") == [3, 4]
    assert found(cache, "zz") == []


def test_salts_share_nothing_and_cost_nothing_when_their_blocks_are_gone():
    cache = PrefixCache(SIZE)
    insert(cache, "ab", [1])
    insert(cache, "ab", [2], b"a")
    insert(cache, "ab", [3], b"b")
    assert [found(cache, "ab", salt) for salt in (b"", b"a", b"b", b"c")] == [[1], [2], [3], []]
    retire(cache, [2])
    assert cache.evict() == 2
    assert found(cache, "ab", b"a") == []
    assert cache.num_cached == len(cache._nodes) == 2


def test_an_uid_is_no_salt():
    cache = PrefixCache(SIZE)
    insert(cache, "abcd", [1, 2])
    uid = cache.node_of(1).uid
    assert found(cache, "cd", uid.to_bytes(1, "little")) == []
    assert found(cache, "cd", str(uid).encode()) == []


def test_whoever_inserts_what_is_cached_gets_the_block_that_is():
    cache = PrefixCache(SIZE)
    insert(cache, "ab", [1])
    assert cache.insert(b"", tokens_of("ab"), 5).block == 1
    assert cache.node_of(5) is None
    with pytest.raises(AssertionError, match="cached as another"):
        cache.insert(b"", tokens_of("xy"), 1)


def test_a_sequence_is_evicted_from_its_end_and_the_least_recently_used_first():
    cache = PrefixCache(SIZE)
    insert(cache, "abcd", [1, 2])
    insert(cache, "abef", [1, 3])
    insert(cache, "gh", [4])
    retire(cache, [3])
    retire(cache, [1, 2])
    retire(cache, [4])
    assert [cache.evict() for _ in range(4)] == [3, 2, 1, 4]
    assert (cache.num_cached, cache.num_evictable) == (0, 0)


def test_what_is_used_again_goes_last():
    cache = PrefixCache(SIZE)
    insert(cache, "ab", [1])
    insert(cache, "cd", [2])
    retire(cache, [1])
    retire(cache, [2])
    cache.revive(1)
    retire(cache, [1])
    assert [cache.evict(), cache.evict()] == [2, 1]


def evict_and_retire_us(cache: PrefixCache, count: int) -> float:
    """CPU of one block that is given up and cached again, behind all others."""
    begin = time.thread_time_ns()
    for _ in range(count):
        block = cache.evict()
        cache.insert(
            b"", cache.num_cached.to_bytes(4, "little") + block.to_bytes(4, "little"), block
        )
        cache.retire(block)
    return (time.thread_time_ns() - begin) / 1000 / count


def least_of(cache: PrefixCache) -> float:
    return min(evict_and_retire_us(cache, 100) for _ in range(5))


def test_a_block_is_given_up_as_fast_as_ever_when_many_went_before():
    """A dict keeps the places of what was taken from its front: with one, this becomes eight times as long, and then as before, again and again."""
    cache = PrefixCache(SIZE)
    for block in range(40_000):
        cache.insert(b"", block.to_bytes(8, "little"), block)
        cache.retire(block)
    first, worst = least_of(cache), 0.0
    for _ in range(10):
        evict_and_retire_us(cache, 5_000)
        worst = max(worst, least_of(cache))
    assert worst < 4 * first


def test_what_is_not_cached_is_not_kept():
    cache = PrefixCache(SIZE)
    assert not cache.retire(5)
    assert cache.num_evictable == 0


def test_what_stood_behind_an_evicted_block_is_not_found_under_a_new_one():
    """Uids are not used again: the tokens before would be right, but nobody looks behind a node that is gone."""
    cache = PrefixCache(SIZE)
    insert(cache, "ab", [1])
    retire(cache, [1])
    gone = cache.node_of(1).uid
    cache.evict()
    insert(cache, "ab", [2])
    assert cache.node_of(2).uid != gone


def test_forgetting_takes_what_stands_behind_and_frees_what_nobody_holds():
    cache = PrefixCache(SIZE)
    insert(cache, "abcdef", [1, 2, 3])
    insert(cache, "abxy", [1, 4])
    insert(cache, "zz", [5])
    retire(cache, [2, 3])
    assert sorted(cache.forget([1])) == [2, 3]
    cache.check()
    assert found(cache, "abcdef") == []
    assert found(cache, "zz") == [5]
    assert [cache.node_of(block) for block in (1, 2, 3, 4)] == [None] * 4
    assert cache.forget([1, 9]) == []


def test_clear_forgets_everything():
    cache = PrefixCache(SIZE)
    insert(cache, "abcd", [1, 2])
    retire(cache, [2])
    assert cache.clear() == [2]
    cache.check()
    assert found(cache, "abcd") == []
    insert(cache, "abcd", [2, 1])
    assert found(cache, "abcd") == [2, 1]


@given(st.lists(st.text("ab", max_size=8), max_size=12), st.text("ab", max_size=8))
def test_it_finds_what_a_comparison_with_every_text_finds(texts, wanted):
    cache = PrefixCache(SIZE)
    block, known = 0, set()
    for text in texts:
        parent = b""
        for at in range(0, len(text) - SIZE + 1, SIZE):
            block += 1
            parent = cache.insert(parent, tokens_of(text[at : at + SIZE]), block).uid
            known.add(text[: at + SIZE])
    cache.check()
    assert cache.num_cached == len(known)
    ends = range(SIZE, len(wanted) + 1, SIZE)
    most = next((end - SIZE for end in ends if wanted[:end] not in known), len(wanted))
    nodes = cache.match(b"", tokens_of(wanted))
    assert len(nodes) == most // SIZE
    assert b"".join(node.tokens for node in nodes) == tokens_of(wanted[: len(nodes) * SIZE])


def lose_a_parent(cache):
    cache._forget(cache.node_of(1))


def evict_the_beginning_first(cache):
    cache._evictable.update({1: None, 2: None})


def forget_half(cache):
    del cache._by_block[2]


def retire_what_is_not_cached(cache):
    cache._evictable[9] = None


@pytest.mark.parametrize(
    "damage",
    [lose_a_parent, evict_the_beginning_first, forget_half, retire_what_is_not_cached],
)
def test_check_sees_damage(damage):
    cache = PrefixCache(SIZE)
    insert(cache, "abcd", [1, 2])
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()
