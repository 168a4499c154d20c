"""Buckets and recordings, without a model."""

from __future__ import annotations

import pytest
import torch
from replay import Rerun

from inflight_backend.engine.graph_runner import GraphRunner, bucket_sizes

PADDING = 20


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 4, 6]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (200, [*bucket_sizes(64), 80, 96, 112, 128, 192, 200]),
    ],
)
def test_bucket_sizes(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


def test_buckets_waste_little() -> None:
    sizes = bucket_sizes(1024)
    padded = {rows: min(size for size in sizes if size >= rows) for rows in range(1, 1025)}
    assert max(size - rows for rows, size in padded.items()) <= 63
    assert max(size / rows for rows, size in padded.items() if rows > 64) < 1.5


def test_the_smallest_bucket_runs_on_the_current_slots() -> None:
    seen: list[list[int]] = []

    def step(slots: torch.Tensor) -> torch.Tensor:
        seen.append(slots.tolist())
        return slots.long() * 10

    slots = torch.full((6,), PADDING, dtype=torch.int32)
    capture = Rerun()
    capture._run = lambda call: call()  # type: ignore[method-assign]  # tolist is this test's own
    runner = GraphRunner(step, lambda _, hidden: hidden + 1, slots, capture)
    assert seen == [[PADDING] * size for size in (6, 4, 2, 1)]  # the largest first
    slots[:3] = torch.tensor([5, 1, 3])
    assert runner.run(3).tolist() == [51, 11, 31]
    assert seen[-1] == [5, 1, 3, PADDING]
    assert runner.forward(2).tolist() == [50, 10]  # the decoder alone
    slots[:6] = torch.arange(6)
    assert runner.run(6).tolist() == [1, 11, 21, 31, 41, 51]


def test_the_stand_in_refuses_what_a_graph_cannot_hold() -> None:
    slots = torch.full((2,), PADDING, dtype=torch.int32)
    with pytest.raises(AssertionError, match="waits for the device"):
        GraphRunner(
            lambda rows: rows.long() * int(rows.sum()), lambda _, hidden: hidden, slots, Rerun()
        )
