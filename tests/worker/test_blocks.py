"""The block allocator keeps its law, and `check` sees each way of breaking it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.blocks import BlockAllocator, OutOfBlocksError
from shmserve.worker.prefix_cache import PrefixCache

SIZE = 2


def new_blocks(num_blocks):
    return BlockAllocator(num_blocks, PrefixCache(SIZE))


def tokens_of(*tokens):
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def cache(blocks, taken, parent=b""):
    """Let the cache know `taken`, one behind the other, under tokens that are their own numbers."""
    for block in taken:
        parent = blocks.cache.insert(parent, tokens_of(block, block), block).uid


def test_block_zero_is_never_given_out():
    blocks = new_blocks(5)
    assert sorted(blocks.allocate(4)) == [1, 2, 3, 4]
    assert (blocks.num_free, blocks.num_used) == (0, 4)


def test_too_many_blocks_are_refused_and_none_is_taken():
    blocks = new_blocks(4)
    blocks.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        blocks.allocate(3)
    assert blocks.num_free == 2
    blocks.check()


def test_no_blocks_are_no_blocks():
    blocks = new_blocks(2)
    taken = blocks.allocate(1)
    assert blocks.allocate(0) == []
    blocks.release([])
    assert blocks.ref_count[taken[0]] == 1


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    blocks = new_blocks(3)
    (block,) = blocks.allocate(1)
    cache(blocks, [block])
    blocks.share(block)
    blocks.forget([block])
    blocks.release([block])
    assert blocks.num_used == 1
    blocks.check()
    blocks.release([block])
    assert blocks.num_used == 0
    blocks.check()


def test_a_block_released_twice_is_caught_at_once():
    blocks = new_blocks(3)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(AssertionError, match="more often"):
        blocks.release(taken)


def test_a_released_cached_block_is_free_for_whoever_asks_and_findable_until_then():
    blocks = new_blocks(4)
    taken = blocks.allocate(2)
    cache(blocks, taken)
    blocks.release(taken)
    assert (blocks.num_free, blocks.num_used) == (3, 0)
    (other,) = blocks.allocate(1)
    assert other not in taken, "the free one first"
    blocks.check()
    assert [node.block for node in blocks.cache.match(b"", tokens_of(*taken[:1] * 2))] == taken[:1]
    assert blocks.allocate(1) == taken[1:], "the end of what was released first"
    assert blocks.cache.node_of(taken[0])
    assert blocks.allocate(1) == taken[:1]
    assert blocks.cache.num_cached == 0
    blocks.check()


def test_a_shared_block_is_not_evicted_and_an_evictable_one_can_be_held_again():
    blocks = new_blocks(3)
    taken = blocks.allocate(1)
    cache(blocks, taken)
    blocks.release(taken)
    blocks.share(taken[0])
    assert blocks.num_free == 1
    blocks.allocate(1)
    with pytest.raises(OutOfBlocksError):
        blocks.allocate(1)
    blocks.check()


def test_only_what_is_cached_can_be_shared():
    blocks = new_blocks(3)
    with pytest.raises(AssertionError, match="not cached"):
        blocks.share(blocks.allocate(1)[0])


def test_flush_frees_what_nobody_holds_and_leaves_the_rest_held():
    blocks = new_blocks(5)
    held, left = blocks.allocate(1), blocks.allocate(2)
    cache(blocks, held)
    cache(blocks, left, b"other")
    blocks.release(left)
    blocks.flush()
    assert blocks.cache.num_cached == 0
    assert (blocks.num_free, blocks.num_used) == (3, 1)
    blocks.check()
    blocks.release(held)
    assert blocks.num_used == 0
    blocks.check()


@given(st.integers(1, 9), st.lists(st.integers(0, 5), max_size=40))
def test_any_order_of_taking_and_giving_keeps_the_law(num_blocks, amounts):
    blocks, held = new_blocks(num_blocks), []
    for amount in amounts:
        if amount <= blocks.num_free:
            held.append(blocks.allocate(amount))
        elif held:
            blocks.release(held.pop(0))
        blocks.check()
        flat = [block for part in held for block in part]
        assert len(set(flat)) == len(flat) == blocks.num_used
        assert blocks.num_free + blocks.num_used == num_blocks - 1


def lose_a_block(blocks):
    blocks._free.pop()


def free_a_block_twice(blocks):
    blocks._free.append(blocks._free[0])


def free_a_held_block(blocks):
    blocks._free.append(blocks.allocate(1)[0])


def give_out_block_zero(blocks):
    blocks._free.append(0)


def hold_block_zero(blocks):
    blocks.ref_count[0] = 1


def cache_a_free_block(blocks):
    blocks.cache.insert(b"", tokens_of(1, 1), blocks._free[0])


def evict_behind_a_holders_back(blocks):
    (block,) = blocks.allocate(1)
    cache(blocks, [block])
    blocks.cache.retire(block)


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_a_block_twice,
        free_a_held_block,
        give_out_block_zero,
        hold_block_zero,
        cache_a_free_block,
        evict_behind_a_holders_back,
    ],
)
def test_check_sees_damage(damage):
    blocks = new_blocks(6)
    blocks.allocate(2)
    blocks.check()
    damage(blocks)
    with pytest.raises(AssertionError):
        blocks.check()
