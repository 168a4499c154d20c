"""Which adapter gives way on the host."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from inflight_backend.adapters.store import FULL, AdapterStore
from inflight_backend.errors import CapacityExceeded


@dataclass(frozen=True)
class Stored:
    digest: bytes
    num_bytes: int = 10
    rank: int = 1


def test_ten_adapters_in_turn_over_memory_for_three() -> None:
    store, recent = AdapterStore(30), list[int]()
    for task_id in (*range(10), 7, *range(10), 9, 8, 0):
        found = store.find(task_id)
        assert (found is None) == (task_id not in recent)
        if found is None:
            store.put(task_id, Stored(b"%d" % task_id))
        recent = [*(each for each in recent if each != task_id), task_id][-3:]
        assert list(store._entries) == recent
    assert store.num_bytes == 30


def test_none_in_use_gives_way() -> None:
    dice, store, used = random.Random(1), AdapterStore(30), dict[int, int]()
    num_refused = 0
    for _ in range(3000):
        task_id = dice.randrange(10)
        adapter = Stored(b"%d" % task_id)
        if dice.random() < 0.5:
            try:
                store.acquire(task_id, store.find(task_id) or store.put(task_id, adapter))
                used[task_id] = used.get(task_id, 0) + 1
            except CapacityExceeded:
                assert len(used) == 3
                num_refused += 1
        elif used:
            task_id = dice.choice(list(used))
            store.release(task_id)
            used[task_id] -= 1
            used = {each: count for each, count in used.items() if count}
        assert all(store.get_used(each).digest == b"%d" % each for each in used)
        assert store.num_bytes == 10 * len(store) <= 30
    assert num_refused > 100


def test_one_that_is_larger_than_all_is_refused_and_nothing_gives_way() -> None:
    store = AdapterStore(30)
    store.put(1, Stored(b"1"))
    with pytest.raises(CapacityExceeded, match=f"{FULL}: an adapter of 31 bytes does not fit"):
        store.put(2, Stored(b"2", 31))
    assert store.find(1) is not None
