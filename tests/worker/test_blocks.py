"""The block allocator keeps its law, and `check` sees each way of breaking it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.worker.blocks import BlockAllocator, OutOfBlocksError


def test_block_zero_is_never_given_out():
    blocks = BlockAllocator(5)
    assert sorted(blocks.allocate(4)) == [1, 2, 3, 4]
    assert (blocks.num_free, blocks.num_used) == (0, 4)


def test_too_many_blocks_are_refused_and_none_is_taken():
    blocks = BlockAllocator(4)
    blocks.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        blocks.allocate(3)
    assert blocks.num_free == 2
    blocks.check()


def test_no_blocks_are_no_blocks():
    blocks = BlockAllocator(2)
    taken = blocks.allocate(1)
    assert blocks.allocate(0) == []
    blocks.release([])
    assert blocks.ref_count[taken[0]] == 1


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    blocks = BlockAllocator(3)
    (block,) = blocks.allocate(1)
    blocks.ref_count[block] += 1
    blocks.release([block])
    assert blocks.num_used == 1
    blocks.check()
    blocks.release([block])
    assert blocks.num_used == 0
    blocks.check()


def test_a_block_released_twice_is_caught_at_once():
    blocks = BlockAllocator(3)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(AssertionError, match="more often"):
        blocks.release(taken)


@given(st.integers(1, 9), st.lists(st.integers(0, 5), max_size=40))
def test_any_order_of_taking_and_giving_keeps_the_law(num_blocks, amounts):
    blocks, held = BlockAllocator(num_blocks), []
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


@pytest.mark.parametrize(
    "damage",
    [lose_a_block, free_a_block_twice, free_a_held_block, give_out_block_zero, hold_block_zero],
)
def test_check_sees_damage(damage):
    blocks = BlockAllocator(6)
    blocks.allocate(2)
    blocks.check()
    damage(blocks)
    with pytest.raises(AssertionError):
        blocks.check()
