"""Compiled products against torch's in float32, for every split of rows and panels into tiles."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels.cpu import linear
from inflight_kernels.cpu.threads import is_available

pytestmark = pytest.mark.fast(3)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def test_kernels_can_be_compiled_here() -> None:
    """Or else what follows would test nothing."""
    assert is_available()


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize(("rows", "columns"), [(16, 2), (96, 64), (7 * 16, 96), (48, 1536)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 8, 15, 64, 77, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(
    generator: torch.Generator,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    num_tokens: int,
    has_bias: bool,
) -> None:
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    x = torch.randn(num_tokens, columns, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator) if has_bias else None
    assert linear.takes(weight)
    packed = linear.pack(weight)
    numbers = torch.tensor([rows - 1, 0, 9, 9])
    assert torch.equal(linear.rows(packed, numbers), weight[numbers])
    found = linear.linear(x, packed, bias)
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias)
    assert found.dtype == dtype
    bound = LIMIT[dtype] * float(expected.abs().max()) if num_tokens else 0.0
    torch.testing.assert_close(found.float(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", LIMIT)
def test_a_row_does_not_depend_on_the_others(
    generator: torch.Generator, dtype: torch.dtype
) -> None:
    packed = linear.pack(torch.randn(160, 96, generator=generator).to(dtype))
    x = torch.randn(77, 96, generator=generator).to(dtype)
    together = linear.linear(x, packed, None)
    alone = torch.cat([linear.linear(row[None], packed, None) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_tokens", [1, 3, 13, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_gives_what_it_gives_in_float32(
    generator: torch.Generator, dtype: torch.dtype, num_tokens: int
) -> None:
    weight = torch.randn(112, 90, generator=generator).to(dtype)
    weight[0, :2] = torch.tensor([6e-8, -3e-6])  # of float16 below the smallest normal number
    x, bias = torch.randn(num_tokens, 90, generator=generator), torch.ones(112)
    found = linear.linear(x, linear.pack(weight), bias)
    assert torch.equal(found, linear.linear(x, linear.pack(weight.float()), bias))


@pytest.mark.parametrize(("rows", "columns"), [(17, 64), (16, 3)])
def test_other_sizes_are_not_taken(rows: int, columns: int) -> None:
    assert not linear.takes(torch.zeros(rows, columns))
