"""What ranks tell one another, as processes: through the memory of a machine, and through gloo."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from inflight_backend.models.parallel.collectives import GroupCollectives
from inflight_backend.models.parallel.place import Place

NUM_ROUNDS = 40


def part_of(rank: int, round_number: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, whose sums are exact."""
    numbers = torch.arange(num_rows * 96).reshape(num_rows, 96) % 7
    return (numbers + 3 * rank + round_number % 5).to(dtype)


def fail(*_: object) -> None:
    raise OSError


def run_rank(rank: int, size: int, folder: Path, fails: str, where: int, is_there: bool) -> None:
    """Everything, in rows that need one piece of the memory and several. ``fails``: a function of
    `os` that raises on rank ``where``, or is not there."""
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if rank == where and is_there:
        setattr(os, fails, fail)
    elif rank == where:
        delattr(os, fails)
    ranks = GroupCollectives(Place(rank, size))
    assert (ranks._memory is None) == bool(fails)
    for number in range(NUM_ROUNDS):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        num_rows = (1, 64, 6_000, 0)[number % 4]
        parts = [part_of(each, number, num_rows, dtype) for each in range(size)]
        assert torch.equal(ranks.add(parts[rank].clone()), torch.stack(parts).sum(0))
        own = parts[rank] if rank < size - 1 else parts[rank][:, :94]
        joined = torch.cat(parts, 1)[:, : 96 * size - 2]
        assert torch.equal(ranks.join_columns(own, 96 * size - 2), joined)
        tokens = torch.arange(num_rows) + number
        assert torch.equal(ranks.share(tokens if rank == 0 else tokens * 0), tokens)
    assert ranks.least(5 - rank) == 6 - size
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "where", "is_there"),
    [("", -1, True), ("memfd_create", 0, True), ("memfd_create", 0, False), ("readlink", 1, True)],
    ids=["memory", "a sandbox", "a Python for old systems", "two machines"],
)
def test_sums_and_what_else_is_told(tmp_path: Path, fails: str, where: int, is_there: bool) -> None:
    """By gloo where there is no memory for all of them."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, 3, tmp_path, fails, where, is_there))
        for rank in range(3)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0, 0]
