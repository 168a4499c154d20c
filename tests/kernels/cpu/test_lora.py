"""Compiled products of adapters against torch's in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight_kernels.cpu.routed.lora import (
    NUMBERS_OF_PART,
    StepRows,
    add_lora_stage,
    pack_part,
    takes,
)

COLUMNS, ROWS = 34, 160
PARTS = [[(0, 96, 16), (112, 48, 16)], [(96, 16, 5)], [], [(0, 96, 40), (96, 64, 1)]]
"""Of each adapter: the first row of the answer, how many, and the rank."""
RUNS = [(0, slice(0, 1)), (3, slice(1, 38)), (1, slice(40, 43)), (2, slice(43, 44))]
NUM_TOKENS = 50
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(
    generator: torch.Generator, dtype: torch.dtype, has_scales: bool, has_bias: bool
) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, out = draw(NUM_TOKENS, COLUMNS).to(dtype), draw(NUM_TOKENS, ROWS).to(dtype)
    bias = draw(ROWS) if has_bias else None
    expected, kept = out.float().clone(), []
    table = np.zeros((len(PARTS), 2, 2, NUMBERS_OF_PART), np.int64)
    for place, parts in enumerate(PARTS):
        for number, (start, rows, rank) in enumerate(parts):
            a, b = draw(rank, COLUMNS).to(dtype), draw(rows, rank).to(dtype)
            scales = draw(rows) if has_scales else None
            assert takes(start, a, b)
            kept.append(pack_part(start, a, b, scales))
            table[place, 1, number] = kept[-1].numbers
            for mine in (each for owner, each in RUNS if owner == place):
                changed = expected[mine, start : start + rows]
                if scales is not None:
                    plain = 0 if bias is None else bias[start : start + rows]
                    changed[:] = (changed - plain) * scales + plain
                inner = (x[mine].float() @ a.float().T).to(dtype).float()
                changed += inner @ b.float().T
    step = StepRows(RUNS, table, 48, dtype)
    add_lora_stage(x, 0, bias, out, step.address).run()  # no adapter changes this one
    add_lora_stage(x, 1, bias, out, step.address).run()
    bound = LIMIT[dtype] * float(expected.abs().max())
    torch.testing.assert_close(out.float(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize(("start", "rows", "columns"), [(8, 16, 64), (0, 24, 64), (0, 16, 3)])
def test_other_sizes_are_not_taken(start: int, rows: int, columns: int) -> None:
    assert not takes(start, torch.zeros(4, columns), torch.zeros(rows, 4))
