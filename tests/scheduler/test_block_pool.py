"""The free list and the reference counts."""

from __future__ import annotations

import pytest

from inflight_scheduler.kv.block_pool import BlockPool


def test_fresh_pool_hands_out_ascending_ids() -> None:
    pool = BlockPool(5)
    assert pool.take(2) == [0, 1]
    assert pool.take(3) == [2, 3, 4]
    assert pool.num_free_blocks == 0


def test_last_freed_is_first_taken_again() -> None:
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    assert pool.drop(first) == 2
    assert pool.drop(second) == 2
    assert pool.take(5) == [2, 3, 0, 1, 4]


def test_double_drop_is_caught() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.drop(taken)
    with pytest.raises(AssertionError, match="block 0 is dropped but has no holder"):
        pool.drop(taken)


def test_taking_more_than_free_is_caught() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).take(3)


def test_integrity_names_a_block_that_is_held_twice() -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    pool.check_integrity([taken])
    with pytest.raises(AssertionError, match="block 0 has 2 holders but its reference count is 1"):
        pool.check_integrity([taken, taken])
    with pytest.raises(AssertionError, match="one holder has a block twice"):
        pool.check_integrity([[0, 0], [1]])


def test_integrity_names_a_block_without_holders() -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(AssertionError, match="block 1 has 0 holders"):
        pool.check_integrity([[0]])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, not 0"):
        BlockPool(0)


def test_the_pool_evicts_in_the_order_of_last_use() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    for _ in range(4):
        pool.keep(pool.take(1)[0])
    pool.drop([2])
    pool.drop([0, 1])  # the last one first
    assert (pool.num_free_blocks, pool.num_idle_blocks) == (3, 3)
    pool.share(2)
    pool.drop([2])
    assert pool.take(2) == [1, 0]
    assert evicted == [1, 0]
    pool.check_integrity([[0, 1], [3]])
    with pytest.raises(AssertionError, match="block 2"):
        pool.keep(2)
